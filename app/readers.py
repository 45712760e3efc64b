"""One document -> parts of text with where they stand ("p. 3", a heading, a row).

LlamaIndex reads pdf, docx and Markdown. Where its reader loses text (html: glued table cells, UTF-8 only; csv: stops
at a ragged row) or would bring copyleft packages into an Apache-2.0 project (epub: EbookLib is AGPL, html2text GPL),
there is a small one of ours. Parsers see only what passed `guards`.
"""

import logging
import re
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ragblend.app import ocr
from ragblend.app.guards import check_file, read_text
from ragblend.kvstore.errors import Cancelled, DocumentError, EmptyDocumentError, UnreadableDocumentError

INVISIBLE = dict.fromkeys(
    map(ord, "\u00ad\u200b\ufeff")
)  # soft hyphen, zero-width space, stray byte order mark
SCANNED = "it is probably scanned"  # how such a file is known by its failure
VERSION = 1  # part of a document's recipe: raise it when the text that comes out changes


@dataclass(frozen=True)
class Part:
    """A stretch of a document's text and where it stands; location may be empty."""

    text: str
    location: str


def _ignored(done: int, total: int) -> None:
    """For who does not follow the pages."""


def read_document(path: Path, on_page: ocr.OnPage = _ignored) -> list[Part]:
    """The text of a document, in reading order. Raises DocumentError: what is wrong, where, what to do.

    on_page(done, total): of pages whose text has to be recognised, seconds each; what it raises ends the reading.
    """
    check_file(path)
    try:
        with warnings.catch_warnings(), _quiet("pypdf"):
            warnings.simplefilter("ignore")  # parsers warn of oddities in files; what matters is raised
            suffix = path.suffix.lower()
            found = _read_pdf(path, on_page) if suffix == ".pdf" else READERS[suffix](path)
    except (DocumentError, Cancelled):
        raise
    except Exception as error:  # parsers of hostile formats raise anything: one bad file must stop nothing
        raise UnreadableDocumentError(
            f"Reading {path}: it cannot be read as {path.suffix.lower()} ({type(error).__name__}: {error}). "
            "Open it in its own program and save it again."
        ) from error
    parts = [Part(text, part.location) for part in found if (text := clean(part.text))]
    if not parts:
        raise EmptyDocumentError(_no_text(path))
    return parts


def clean(text: str) -> str:
    """Text without control characters and broken surrogates, with \\n line ends and no white space at line ends."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    text = text.translate(INVISIBLE)
    text = text.encode("utf-8", "replace").decode("utf-8")  # PDF fonts can give half a surrogate pair
    text = "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Co"))
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _read_txt(path: Path) -> list[Part]:
    return [Part(read_text(path), "")]


def _read_markdown(path: Path) -> list[Part]:
    from llama_index.core import Document
    from llama_index.core.node_parser import MarkdownNodeParser

    nodes = MarkdownNodeParser().get_nodes_from_node(Document(text=clean(read_text(path))))
    return [Part(node.text, _markdown_heading(node.text)) for node in nodes]


def _markdown_heading(text: str) -> str:
    found = re.match(r"#+\s+(.+)", text)
    return found.group(1).strip(" #*_`") if found else ""


def _read_html(path: Path) -> list[Part]:
    from ragblend.app.html_text import html_sections

    return [Part(section.text, section.heading) for section in html_sections(read_text(path))]


def _read_pdf(path: Path, on_page: ocr.OnPage = _ignored) -> list[Part]:
    from llama_index.readers.file import PDFReader

    from ragblend.app.pdf_guard import check_pdf

    check_pdf(path)
    pages = PDFReader().load_data(path)
    parts = [Part(page.text, f"p. {page.metadata['page_label']}") for page in pages]
    without = [number for number, part in enumerate(parts, start=1) if not clean(part.text)]
    if without and ocr.is_installed():
        for number, text in ocr.recognised(path, without, on_page):
            parts[number - 1] = Part(text, parts[number - 1].location)
    return parts


def _read_docx(path: Path) -> list[Part]:
    from llama_index.readers.file import DocxReader

    return [Part(document.text, "") for document in DocxReader().load_data(path)]


def _read_epub(path: Path) -> list[Part]:
    from ragblend.app.epub_reader import epub_chapters

    return [Part(section.text, section.heading) for section in epub_chapters(path)]


def _read_csv(path: Path) -> list[Part]:
    from ragblend.app.csv_reader import csv_rows

    return [Part(row, f"row {number}") for number, row in csv_rows(path)]


READERS: dict[str, Callable[[Path], list[Part]]] = {
    ".txt": _read_txt,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".html": _read_html,
    ".htm": _read_html,
    ".pdf": _read_pdf,
    ".docx": _read_docx,
    ".epub": _read_epub,
    ".csv": _read_csv,
}


def _no_text(path: Path) -> str:
    if path.suffix.lower() == ".pdf" and not ocr.is_installed():
        return (
            f"Reading {path}: its pages hold no text, so {SCANNED}. Install text recognition, "
            "`pip install 'ragblend[ocr]'`, and try again; or run, for example, `ocrmypdf in.pdf out.pdf`."
        )
    return f"Reading {path}: there is no text in it. Nothing of it was ingested."


class _quiet:
    """Silence a parser's logger for a while: it reports every oddity of a file to the terminal."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def __enter__(self) -> None:
        self._before = self._logger.level
        self._logger.setLevel(logging.CRITICAL)

    def __exit__(self, *_: object) -> None:
        self._logger.setLevel(self._before)
