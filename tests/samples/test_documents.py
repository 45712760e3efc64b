"""The sample documents are all there, can be read, and are what the sources build."""

import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path

import pytest
from build_samples import BUILT, build
from sample_markup import inline, read_source, typeset

from ragblend.app.samples import documents_folder

FILES = {
    "bell-and-tide-rules.html",
    "causeway-survey-2023.docx",
    "dunlin-maintenance-manual.pdf",
    "interview-keziah-blount.md",
    "keepers-log-1962.md",
    "letters-of-tobit-crane.pdf",
    "minutes-annual-meeting-2024.docx",
    "visitor-guide.html",
}


def zip_members(content: bytes) -> dict[str, tuple[tuple[int, ...], bytes]]:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return {info.filename: (info.date_time, archive.read(info)) for info in archive.infolist()}


def test_the_folder_holds_exactly_the_samples() -> None:
    assert {path.name for path in documents_folder().iterdir()} == FILES


def test_every_format_is_there_at_least_twice() -> None:
    assert Counter(Path(name).suffix for name in FILES) == {".pdf": 2, ".docx": 2, ".html": 2, ".md": 2}


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_document_reads_as_500_to_1200_words(name: str, pages: dict[str, list[str]]) -> None:
    words = sum(len(text.split()) for text in pages[name])
    assert 500 <= words <= 1200, f"{name}: {words} words"


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.endswith(".pdf")))
def test_a_pdf_has_several_numbered_pages(name: str, pages: dict[str, list[str]]) -> None:
    assert len(pages[name]) >= 3
    for number, text in enumerate(pages[name], start=1):
        assert f"Page {number}" in text
        assert len(text.split()) > 100, f"{name} page {number} is nearly empty"
        assert text.isprintable(), f"{name} page {number} has control characters (bullets once read as DEL)"


@pytest.mark.parametrize("name", sorted(name for name in FILES if name.endswith(".html")))
def test_a_web_page_has_noise_around_its_text(name: str, pages: dict[str, list[str]]) -> None:
    html = (documents_folder() / name).read_text(encoding="utf-8")
    assert "<nav" in html
    assert "<footer>" in html
    assert "Privacy" not in pages[name][0]


def test_the_committed_files_are_what_the_sources_build() -> None:
    """After an edit, run `python tests/samples/build_samples.py` and commit what it wrote."""
    built = dict(build())
    assert tuple(built) == BUILT
    for name, content in built.items():
        committed = (documents_folder() / name).read_bytes()
        if name.endswith(".docx"):  # by member: how zlib packs them differs between its builds
            assert zip_members(content) == zip_members(committed), name
        else:
            assert content == committed, name


def test_building_twice_gives_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    first = dict(build())
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    assert dict(build()) == first
    assert all(date == (1980, 1, 1, 0, 0, 0) for date, _ in zip_members(first[BUILT[2]]).values())


def test_markup_is_read_into_blocks_and_runs(tmp_path: Path) -> None:
    head = "---\ntitle: T\nsubtitle: S\nauthor: A\ndate: 2020-01-02\n---\n"
    path = tmp_path / "source.md"
    path.write_text(
        head + "> note\n\n## head\n\none\ntwo\n\n- a\n- b\n\n1. c\n2. d\n\n| x | y |\n| 1 | 2 |\n\n***\n"
    )
    blocks = [(block.kind, block.lines) for block in read_source(path).blocks]
    assert blocks == [
        ("note", ("note",)),
        ("heading", ("head",)),
        ("paragraph", ("one two",)),
        ("list", ("a", "b")),
        ("steps", ("c", "d")),
        ("table", ("| x | y |", "| 1 | 2 |")),
        ("page", ()),
    ]
    assert list(inline("a *b* c **d**")) == [
        ("plain", "a "),
        ("italic", "b"),
        ("plain", " c "),
        ("bold", "d"),
    ]
    assert typeset('"It\'s" ("so")') == "“It’s” (“so”)"


@pytest.mark.parametrize(
    ("text", "message"), [("no head", "no head"), ("---\ntitle: T\n---\n", "lacks author")]
)
def test_a_source_without_its_head_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broken.md"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"broken\.md.*{message}"):
        read_source(path)
