"""What a user gets: the wheel, installed in a clean virtual environment and imported from an empty folder."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ragblend.app import samples

# Installing tools' own files, and the loan made by the fixture.
NOT_OURS = {"lent.pth", "_virtualenv.py", "_virtualenv.pth", "__pycache__"}


@pytest.fixture(scope="session")
def wheel_files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_it_is_imported_from_the_new_environment_and_not_from_the_checkout(clean_environment) -> None:
    homes = clean_environment.python_says(
        "import ragblend, ragblend.kvstore, ragblend.engine, ragblend.app, ragblend.ui, ragblend.integrations\n"
        "for name in ('', '.kvstore', '.engine', '.app', '.ui', '.integrations'):\n"
        "    print(__import__('sys').modules['ragblend' + name].__file__)"
    ).splitlines()
    inside = clean_environment.site_packages / "ragblend"
    assert len(homes) == 6
    assert all(Path(home).is_relative_to(inside) for home in homes), homes
    names = {path.name for path in clean_environment.site_packages.iterdir()} - NOT_OURS
    assert {name.split("-")[0] for name in names} == {"ragblend"}, names


def test_every_source_file_is_in_the_wheel(repo, wheel_files) -> None:
    """The links in `ragblend/` are followed when the wheel is made: what they miss is missing only for users."""
    expected = {f"ragblend/{path.name}" for path in (repo / "ragblend").glob("*.py")}
    for folder in ("kvstore", "engine", "integrations", "measuring", "app", "ui"):
        paths = (repo / "ragblend" / folder).rglob("*.py")
        expected |= {path.relative_to(repo).as_posix() for path in paths}
    assert len(expected) > 10
    assert expected - wheel_files == set()
    assert not [name for name in wheel_files if "benchmarks" in name]


def test_the_source_archive_needs_no_links(sdist) -> None:
    """The wheel of these tests is built from it; in the repository the packages are links."""
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive if not (member.isfile() or member.isdir())]
        assert [name for name in archive.getnames() if name.endswith("ragblend/engine/engine.py")]


def test_hints_name_the_file_that_was_installed_and_no_index(wheel, clean_environment) -> None:
    said = clean_environment.python_says(
        "from ragblend.kvstore.errors import install_hint\nprint(install_hint('ui'))"
    )
    assert said == f"pip install '{wheel}[ui]'"


def test_the_benches_run_from_the_wheel(clean_environment) -> None:
    """What they need of `benchmarks/` is in the wheel, with the words of `--figures` and the report's template."""
    said = clean_environment.python_says(
        "from ragblend.app.quality import runs\n"
        "from ragblend.app.quality.sources import QuestionSource, read\n"
        "from ragblend.measuring import docs_questions, memory, report, tune\n"
        "print(len(read(QuestionSource(figures=True, limit=3)).questions), report.TEMPLATE.exists())"
    )
    assert said == "3 True"


def test_a_copy_without_the_links_says_so(repo, tmp_path) -> None:
    """An archive tool or a file system without links leaves a package that has nothing in it."""
    (tmp_path / "ragblend").mkdir()
    shutil.copy(repo / "ragblend" / "__init__.py", tmp_path / "ragblend")
    command = [sys.executable, "-S", "-c", "import ragblend"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "core.symlinks=true" in done.stderr


def test_types_licence_page_and_samples_are_in_the_wheel(repo, wheel_files, clean_environment) -> None:
    assert {"ragblend/py.typed", "ragblend/measuring/report.html"} <= wheel_files
    page = {
        path.relative_to(repo).as_posix() for path in (repo / "ui").glob("*/*.*") if path.suffix != ".pyc"
    }
    assert len(page) > 10
    assert {f"ragblend/{name}" for name in page} <= wheel_files
    assert any(name.endswith("licenses/LICENSE") for name in wheel_files)
    folder = samples.documents_folder()
    documents = {f"ragblend/app/samples/documents/{path.name}" for path in folder.iterdir()}
    assert len(documents) >= 8
    assert (documents | {"ragblend/app/samples/questions.json"}) - wheel_files == set()
    count = clean_environment.python_says(
        "from ragblend.app.samples import documents_folder, questions\n"
        "print(len(list(documents_folder().iterdir())), len(questions()) > 0)"
    )
    assert count == f"{len(documents)} True"


def test_the_command_runs_and_the_version_stands_in_one_place(clean_environment) -> None:
    """`ragblend/__init__.py` says it; the package's metadata are made from that."""
    command = clean_environment.python.parent / "ragblend"
    helped, told = (clean_environment.run(command, option) for option in ("--help", "--version"))
    assert helped.returncode == 0, helped.stderr
    assert {"ingest", "ask"} <= set(helped.stdout.split())
    packaged = clean_environment.python_says(
        "from importlib.metadata import version; print(version('ragblend'))"
    )
    assert told.stdout.split() == ["ragblend", packaged]
