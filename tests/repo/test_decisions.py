"""The decision records: short, of one form, listed, and where code and documents refer to them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
FOLDER = REPO / "docs" / "decisions"
RECORDS = {int(path.name[:4]): path for path in sorted(FOLDER.glob("[0-9]*.md"))}
HEADINGS = ["Context", "Decision", "Consequence"]
REFERENCE = re.compile(r"\bdecisions? (\d+)", re.IGNORECASE)
NOT_OURS = {"site", "build", "dist", "bench-results"}  # and hidden folders
SUFFIXES = {".css", ".html", ".js", ".md", ".py", ".toml", ".yaml", ".yml"}
TITLE = re.compile(r"# (\d+)\. (.+)\n")


def referenced(text: str) -> set[int]:
    """The numbers of the records that a text refers to, as in `decision 7`."""
    return {int(number) for number in REFERENCE.findall(text)}


def sources() -> Iterator[Path]:
    """Every text file of ours: code, tests, documents and what builds them."""
    yield from (path for path in [*REPO.glob("*"), *(REPO / ".ci").glob("*")] if path.is_file())
    folders = [
        path for path in REPO.iterdir() if path.is_dir() and path.name[0] != "." and path.name not in NOT_OURS
    ]
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.suffix in SUFFIXES)


def test_there_are_at_most_40_records() -> None:
    assert 0 < len(RECORDS) <= 40
    assert len(RECORDS) == len(list(FOLDER.glob("*.md"))) - 1  # the index


@pytest.mark.parametrize("path", RECORDS.values(), ids=lambda path: path.stem)
def test_a_record_is_short_and_of_one_form(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.split()) < 120
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == HEADINGS
    title = TITLE.match(text)
    assert title, "the first line is `# NUMBER. Title`"
    assert int(title[1]) == int(path.name[:4])


def test_the_index_lists_every_record_in_order() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    titles = {number: TITLE.match(path.read_text(encoding="utf-8")) for number, path in RECORDS.items()}
    rows = [f"- [{found[2]}]({RECORDS[number].name})" for number, found in titles.items() if found]
    assert index.splitlines()[-len(rows) :] == rows


def test_every_reference_leads_to_a_record() -> None:
    assert referenced("As Decision 3 says (see decision 12, decisions 4); 5 decisions") == {3, 12, 4}
    missing = {
        str(path.relative_to(REPO)): unknown
        for path in sources()
        if path != Path(__file__)
        if (unknown := referenced(path.read_text(encoding="utf-8", errors="ignore")) - RECORDS.keys())
    }
    assert missing == {}
