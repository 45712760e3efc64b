"""The sample documents are all there, can be read, and are what the sources build."""

import zipfile
from io import BytesIO

import pytest
from build_samples import BUILT, build

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
