"""The documents are true: Python runs, commands parse, links lead somewhere, figures are those that were recorded.

In *.md and docs/**/*.md every block fenced as `python` is run (a file's blocks share one namespace) unless its fence
says `no-run`; every line of a `bash` block that starts with `ragblend` or `make` is checked against the real command.
"""

import importlib
import io
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from benchmarks import results
from ragblend.app.cli.main import main
from ragblend.engine.selection import METHODS

REPO = Path(__file__).parents[2]
DOCUMENTS = [*sorted(REPO.glob("*.md")), *sorted((REPO / "docs").rglob("*.md"))]
README = (REPO / "README.md").read_text(encoding="utf-8")
MAX_WORDS = 22_000  # of README.md and docs/, tables and code included: an afternoon's reading
# Pictures that are not a method's.
OTHERS = {"data-path", "demo", "load", "needle", "open-webui", "page", "peers", "speed"}

FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
IMAGE = re.compile(r"^!\[(?P<words>[^\]]*)\]\(pictures/(?P<name>[\w-]+)\.png\)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    document: Path
    line: int
    info: tuple[str, ...]
    code: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def blocks(text: str, document: Path = REPO / "none.md") -> Iterator[Block]:
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(document, line, tuple(found["info"].split()), found["code"])


def commands(code: str) -> Iterator[str]:
    """The command lines of a bash block: comments, prompts and continued lines taken out of the way."""
    for line in code.replace("\\\n", " ").splitlines():
        command = line.strip().removeprefix("$ ")
        if command and not command.startswith("#"):
            yield command


ALL_BLOCKS = [block for path in DOCUMENTS for block in blocks(path.read_text(encoding="utf-8"), path)]
COMMANDS = sorted(
    {command for block in ALL_BLOCKS if block.info[:1] == ("bash",) for command in commands(block.code)}
)
PYTHON = [block for block in ALL_BLOCKS if block.info[:1] == ("python",)]


@cache
def help_of(*subcommand: str) -> str | None:
    """What `ragblend SUBCOMMAND --help` says, or None if there is no such subcommand."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said), redirect_stderr(said):
        for name, value in PLAIN.items():
            patch.setenv(name, value)
        return said.getvalue() if main([*subcommand, "--help"]) == 0 else None


# Help is cut to the terminal's width: options must not be.
PLAIN = {"PATH": "/usr/bin:/bin", "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb", "HOME": "/nonexistent"}


def faults_in(command: str) -> list[str]:
    """Why this `ragblend` line would be refused: an unknown subcommand or option."""
    words = shlex.split(command, comments=True)[1:]
    names: tuple[str, ...] = ()
    while words and not words[0].startswith("-") and help_of(*names, words[0]):
        deeper = (*names, words.pop(0))
        if help_of(*deeper) == help_of(*names):  # an argument of the same command, not a subcommand
            break
        names = deeper
    text = help_of(*names) or ""
    if not names and not all(word in {"--help", "--version"} for word in words):
        return [f"no such subcommand: {command}"]
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    return [
        f"ragblend {' '.join(names)} has no {option}"
        for option in options
        if not re.search(rf"{option}\b", text)
    ]


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("ragblend ")])
def test_a_ragblend_command_is_one_that_exists(command) -> None:
    assert faults_in(command) == []


def test_an_unknown_command_or_option_is_a_fault() -> None:
    assert faults_in("ragblend ask 'why?' --method reuse") == []
    assert faults_in("ragblend ask 'why?' --no-such-option") != []
    assert faults_in("ragblend dance now") != []


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_a_make_command_is_one_that_exists(command) -> None:
    done = subprocess.run(
        ["make", "-n", *shlex.split(command, comments=True)[1:]],
        cwd=REPO, env=PLAIN, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_readme_starts_with_the_two_commands_and_is_read_in_five_minutes() -> None:
    assert len(README.split()) <= 900
    first, second, *_ = blocks(README)
    assert (first.code, second.code) == ("make demo\n", "make test\n")


def test_the_documentation_is_read_in_an_afternoon() -> None:
    """What is measured anew replaces what it supersedes; what is said on one page is linked from others."""
    pages = [REPO / "README.md", *(REPO / "docs").rglob("*.md")]
    counts = {
        str(page.relative_to(REPO)): sum(
            bool(re.search(r"\w", word)) for word in page.read_text(encoding="utf-8").split()
        )
        for page in pages
    }
    longest = sorted(counts.items(), key=lambda each: -each[1])[:5]
    words = sum(counts.values())
    assert words <= MAX_WORDS, f"the most are in {longest}"


def test_figures_are_those_that_were_recorded() -> None:
    """After `benchmarks/recorded.json` or `programs.json` changes: `python -m benchmarks.results`."""
    runs = json.loads(results.RECORDED.read_text(encoding="utf-8"))
    assert results.RESULTS.read_text(encoding="utf-8") == results.results_page(runs)
    assert results.render_readme(README, runs) == README
    assert "`probe-shift`" in results.readme_table(runs)
    programs = json.loads(results.PROGRAMS.read_text(encoding="utf-8"))
    adapters = results.FRAMEWORKS.read_text(encoding="utf-8")
    assert results.render_programs(adapters, programs) == adapters
    assert all(row["found"] >= row["retrieved"] / 2 for rows in programs.values() for row in rows)
    assert sum(map(len, programs.values())) == 26  # those of benchmarks/programs_*.py


def test_a_run_is_taken_out_of_a_benchs_folder(tmp_path) -> None:
    with pytest.raises(ValueError, match="must name one of"):
        results.read_run(tmp_path, "t", "c", "s")
    with pytest.raises(FileNotFoundError, match=r"holds no quality\.json"):
        results.read_run(tmp_path, "t", "ragblend bench quality", "s")
    at = {"gpu": None, "cpu": "Abacus", "cpu_cores": 2, "dtype": "bfloat16", "torch": "2"}
    few = {"figures_n": 1, "figures_kept": 1.0, "read_again": 0.0}  # one answer with a figure says nothing
    row = {"method": "reuse", "ratio": None, "kl": 0.12345, "kl_ci": [0.1, 0.2], "nobody": "asks"} | few
    report = {"environment": at, "rows": [row], "settings": {"questions": 6}}
    (tmp_path / "quality.json").write_text(json.dumps(report))
    (tmp_path / "ttft.json").write_text("another bench's")
    run = results.read_run(tmp_path, "Abacus", "ragblend bench quality", "Slow.")
    assert run["rows"] == [{"method": "reuse", "kl": 0.1235, "kl_ci": [0.1, 0.2]}]
    assert "6 questions. Abacus, 2 cores" in results.section(run)
    assert "| `reuse` | 0.123 | 0.100 to 0.200 |" in results.section(run)
    assert json.loads(results.to_json([run], 3)) == [run]
    long = run | {"command": f"bench --methods {','.join(['reuse'] * 40)} --limit 3"}
    assert "`bench --methods METHODS --limit 3`" in results.section(long)
    others = [{"title": "Before"}, {"title": "Abacus"}, {"title": "Behind"}]
    assert results.with_run(others, run) == [others[0], run, others[2]]
    assert results.with_run(others[:1], run) == [others[0], run]


def test_models_share_a_table_of_times() -> None:
    run = {"command": "bench", "machine": "Abacus", "says": "", "n": None}
    times = [
        {"method": "full", "ttft_ms": 1234.5, "speedup": 1},
        {"method": "epic", "ratio": 0.15, "ttft_ms": 617, "speedup": 2},
    ]
    runs = [
        run | {"title": "Time to first token, Slow", "rows": times},
        run | {"title": "Time to first token, Fast", "rows": times[:1]},
    ]
    page = results.results_page(runs)
    assert page.count("## Time to first token\n") == 1 and "| method | ratio | Slow | Fast |" in page
    assert "| `full` |  | 1,234 ms (1) | 1,234 ms (1) |\n| `epic` | 15% | 617 ms (2.0 times) |  |" in page


@pytest.mark.parametrize("document", sorted({block.document for block in PYTHON}), ids=lambda path: path.name)
def test_python_blocks_run(document, tmp_path, monkeypatch, with_smollm2) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAGBLEND_HOME", str(with_smollm2(tmp_path / "home")))
    namespace: dict[str, object] = {"__name__": "document"}
    for block in PYTHON:
        if block.document == document:
            code = compile("\n" * block.line + block.code, str(document), "exec")
            if "no-run" not in block.info:
                exec(code, namespace)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text(encoding="utf-8"))
    missing = [name for name in targets if "://" not in name and not (document.parent / name).exists()]
    assert missing == []


def tree_paths(tree: str) -> Iterator[str]:
    """What an annotated tree names, two spaces a level: `kvstore/`, `kvstore/keys.py`, ..."""
    folders: list[str] = []
    for line in tree.splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        for name in re.findall(r"^[\w/]+\.py|^\w+/|(?<=\.py )\w+\.py", line.strip()):
            del folders[level:]
            yield "".join(folders) + name
            if name.endswith("/"):
                folders.append(name)


def test_the_tree_names_what_is_there() -> None:
    [tree] = [block.code for block in ALL_BLOCKS if "START HERE" in block.code]
    paths = list(tree_paths(tree))
    assert {"engine/interface.py", "engine/selection/", "examples/"} <= set(paths)
    assert [path for path in paths if not (REPO / path).exists()] == []


def test_the_path_of_a_question_names_functions_that_are_there() -> None:
    text = (REPO / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    steps = re.findall(r"`(\w[\w/]+)\.py:([\w.]+)`", text)
    assert len(steps) <= 22, "12 hops of a question, and 10 of a document"
    assert {name for _, name in steps} >= {"EngineInterface.stream", "Fusion.prefill", "KVStore.put"}
    for module, name in steps:
        found = importlib.import_module(f"ragblend.{module.replace('/', '.')}")
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_the_api_reference_names_what_is_there() -> None:
    text = (REPO / "docs" / "reference.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    assert {"ragblend.engine.engine.Engine", "ragblend.kvstore.errors"} <= set(paths)
    for path in paths:
        module, _, name = path.rpartition(".")
        found = getattr(importlib.import_module(module), name, None) or importlib.import_module(path)
        assert found.__doc__, path
    rows = re.findall(r"^\| `(ragblend[\w.]*)` \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) == 3
    for module, names in rows:
        assert set(re.findall(r"`(\w+)`", names)) == set(importlib.import_module(module).__all__), module


def test_blocks_and_commands_are_found() -> None:
    text = "Text\n\n```bash\n$ ragblend ask 'a b' \\\n    --json\n# a comment\n```\n\n```python no-run\n1 / 0\n```\n"
    bash, python = blocks(text)
    assert list(commands(bash.code)) == ["ragblend ask 'a b'      --json"]
    assert (bash.line, python.info, python.code) == (3, ("python", "no-run"), "1 / 0\n")


def test_every_method_has_its_picture():
    """And every picture says in words what there is to see."""
    found = list(IMAGE.finditer((REPO / "docs" / "methods.md").read_text(encoding="utf-8")))
    names = {image["name"] for image in found}
    assert names - OTHERS == set(METHODS) - {"recompute", "exact", "auto"}
    assert names - OTHERS == {path.stem for path in (REPO / "docs" / "pictures").glob("*")} - OTHERS
    assert all(image["words"].startswith(f"{image['name']}: ") for image in found)
