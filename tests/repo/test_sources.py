"""Nothing in the sources depends on, or tells of, the machine they were written on."""

import hashlib
import re
from pathlib import Path

import pytest

SUFFIXES = {".py", ".md", ".toml", ".txt", ".json", ".html", ".yml", ".yaml", ".cff", ".svg", ""}
FOLDERS = ("ragblend", "kvstore", "engine", "integrations", "app", "ui", "tests", "docs", ".ci")
BESIDE = ("benchmarks", "examples", ".github")
# Written apart, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    r"(?<![\w.-])/(?:" + "|".join(("wor" + "k", "roo" + "t", "hom" + "e/[a-z]+", "opt/whe" + "els")) + ")/"
)


def text_files(repo: Path) -> list[Path]:
    roots = [path for path in repo.iterdir() if path.is_file() and path.name != ".git"]
    found = [
        *roots,
        *(path for name in (*FOLDERS, *BESIDE) for path in (repo / name).rglob("*") if path.is_file()),
    ]
    return [path for path in found if path.suffix in SUFFIXES]


def test_no_source_names_a_place_on_somebodys_machine(repo) -> None:
    files = text_files(repo)
    assert len(files) > 30
    told = {
        str(path.relative_to(repo)): found.group()
        for path in files
        if (found := MACHINE_PATHS.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert told == {}


@pytest.mark.parametrize("text", ["cd /wor" + "k/main", "see '/roo" + "t/x'", "/opt/whe" + "els/torch.whl"])
def test_a_machine_path_is_seen(text) -> None:
    assert MACHINE_PATHS.search(text)


def test_the_licence_is_the_standard_text(repo) -> None:
    text = (repo / "LICENSE").read_bytes()
    # SHA-256 of the text as the Apache Software Foundation publishes it.
    assert (
        hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    )
