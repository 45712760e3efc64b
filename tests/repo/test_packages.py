"""The thin packages under the names by which the frameworks' users look for an integration, built and installed."""

import re
import shutil
import sys
import tomllib
from email import message_from_string

import pytest

import ragblend

NAMES = {
    "langchain-ragblend": ("langchain_ragblend", "ragblend.integrations.langchain"),
    "llama-index-llms-ragblend": ("llama_index.llms.ragblend", "ragblend.integrations.llama_index"),
}


@pytest.fixture(params=NAMES)
def package(request, repo, clean_environment, tmp_path):
    """(its name, the folder that it is installed in)"""
    copy, target = tmp_path / "copy", tmp_path / "installed"
    shutil.copytree(repo / "packages" / request.param, copy, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target", target]
    done = clean_environment.run(sys.executable, "-m", "pip", "install", *options, copy)
    assert done.returncode == 0, done.stderr
    return request.param, target


def test_it_gives_all_that_the_integration_gives(package, clean_environment):
    name, folder = package
    theirs, ours = NAMES[name]
    assert folder.joinpath(*theirs.split("."), "py.typed").is_file()
    same = clean_environment.python_says(
        f"import sys; sys.path.insert(0, {str(folder)!r})\n"
        f"import {theirs} as theirs, {ours} as ours, llama_index.core\n"
        "assert theirs.__file__.startswith(sys.path[0]), theirs.__file__\n"
        "print(theirs.__all__ == ours.__all__ and all(getattr(theirs, n) is getattr(ours, n) for n in ours.__all__))"
    )
    assert same == "True"


def test_it_wants_this_ragblend_and_is_found_by_its_words(package):
    name, folder = package
    (metadata,) = folder.glob("*.dist-info/METADATA")
    told = message_from_string(metadata.read_text(encoding="utf-8"))
    extra = "langchain" if "langchain" in name else "llama-index"
    assert (told["Name"], told["Version"]) == (name, ragblend.__version__)
    assert told.get_all("Requires-Dist") == [f"ragblend[{extra}]=={ragblend.__version__}"]
    assert {"rag", "llm", "kv-cache"} <= set(told["Keywords"].split(","))


def test_what_its_page_says_is_there(repo):
    """Extras, paths and names; and where LlamaIndex's hub looks for the class."""
    known = tomllib.loads((repo / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, (module, _) in NAMES.items():
        folder = repo / "packages" / name
        page = (folder / "README.md").read_text(encoding="utf-8")
        (extra, path) = re.search(r'pip install -c constraints.txt "\.\[(.+)\]" \./(\S+)', page).groups()
        assert extra in known["optional-dependencies"] and repo / path == folder
        assert f"pip install {name}\n" in page and f"from {module} import" in page
        links = re.findall(r"\]\((\S+)\)", page)
        assert links and all((folder / link).resolve().is_file() for link in links)
    hub = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["llamahub"]
    assert hub["import_path"] == module and list(hub["class_authors"]) == ["RAGBlendLLM"]
