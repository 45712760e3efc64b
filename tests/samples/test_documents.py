"""The sample documents are all there and can be read."""

import pytest

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
