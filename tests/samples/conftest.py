"""The samples' texts, read once with plain readers that are independent of the application's own."""

from pathlib import Path

import pytest
from bs4 import BeautifulSoup
from docx import Document
from pypdf import PdfReader

from ragblend.app.samples import documents_folder


@pytest.fixture(scope="session")
def pages() -> dict[str, list[str]]:
    """File name to the texts of its pages (one text for the formats that have no pages), spaces squeezed."""
    files = sorted(documents_folder().iterdir())
    return {path.name: [" ".join(text.split()) for text in _READERS[path.suffix](path)] for path in files}


def _pdf(path: Path) -> list[str]:
    return [page.extract_text() for page in PdfReader(path).pages]


def _docx(path: Path) -> list[str]:
    # Paragraphs only: readers differ on tables, so no answer may stand in a table alone.
    return ["\n".join(paragraph.text for paragraph in Document(str(path)).paragraphs)]


def _html(path: Path) -> list[str]:
    main = BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser").main
    assert main is not None, f"{path.name} has no <main>"
    return [main.get_text(" ")]


def _markdown(path: Path) -> list[str]:
    return [path.read_text(encoding="utf-8")]


_READERS = {".pdf": _pdf, ".docx": _docx, ".html": _html, ".md": _markdown}
