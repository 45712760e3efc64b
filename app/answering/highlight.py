"""Finds a source in its document and marks it on the page's picture or in the text, or says why it cannot.

If the answer's sentence is supported by one sentence of the passage, only that is marked. A match is exact: it has all
letters of the passage in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT
from ragblend.app.extras import check_installed
from ragblend.app.library.chunking import CELL_NAME, SEPARATOR, TABLE_HEADER
from ragblend.app.library.documents import Document, DocumentPassage
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.pdf_pages import PageImage, located_pages
from ragblend.app.library.readers import read_document
from ragblend.app.library.registry import Library
from ragblend.app.library.sandbox import run_in_sandbox
from ragblend.kvstore.errors import DocumentError

AROUND_CHARACTERS = 3000  # of text shown before and after the passage
Place = tuple[int, int] | None  # (start, stop), characters of a source's text


@dataclass(frozen=True)
class Highlight:
    """The source marked on pictures of its pages, or as text[start:stop]; reason: why it was not found.

    cut_before, cut_after: the document has more text there.
    """

    document: str
    pages: tuple[PageImage, ...] = ()
    text: str = ""
    start: int = 0
    stop: int = 0
    cut_before: bool = False
    cut_after: bool = False
    reason: str = ""


def locate_source(library: Library, source: AnswerSource, place: Place = None) -> Highlight:
    """Find the source in the current file. Raises UsageError if the extra `ui` is needed and missing.

    place: mark only source.text[start:stop]; None: the whole passage.
    """
    document = library.documents_with([source.document_id]).get(source.document_id)
    if document is None or source.text == DELETED_TEXT:
        return Highlight(source.document, reason="The document was deleted from the library.")
    try:
        found = _located(library, document, source, place)
    except DocumentError as error:
        return Highlight(document.name, reason=str(error))
    return found or Highlight(document.name, reason=_why_not(document))


def _located(library: Library, document: Document, source: AnswerSource, place: Place) -> Highlight | None:
    path = document.file
    if path.suffix.lower() == ".pdf":
        return _on_pages(document, path, source, place)
    text = SEPARATOR.join(part.text for part in read_document(path).parts)
    start = _start(text, [p.text for p in _up_to(library, source)], source.text)
    if start is None:
        return None
    first = max(0, start - AROUND_CHARACTERS)
    last = min(len(text), start + len(source.text) + AROUND_CHARACTERS)
    if first:  # start at the beginning of a line, if there is one
        first = text.find("\n", first, start) + 1 or first
    begin, end = place or (0, len(source.text))
    if not text.startswith(source.text, start):
        begin = max(begin, _header_length(source.text))
    cut = start - first + begin, start - first + end, first > 0, last < len(text)
    return Highlight(document.name, (), text[first:last], *cut)


def _up_to(library: Library, source: AnswerSource) -> Sequence[DocumentPassage]:
    """The document's passages in reading order up to the source; none if the library no longer has the source."""
    passages = library.passages_of(source.document_id)
    places = [n for n, passage in enumerate(passages) if passage.node_id == source.node_id]
    return passages[: places[0] + 1] if places else []


def _start(text: str, passages: Sequence[str], wanted: str) -> int | None:
    """The index in `text` where the wanted passage starts, as `_find` counts it; of several, the one after `passages`.

    None if the text no longer contains it, or contains it several times without a way to tell which.
    """
    cursor = 0
    for passage in passages:
        found = _find(passage, text, cursor)
        if found < 0:
            break
        if passage == wanted and passage is passages[-1]:
            return found
        cursor = found + 1
    first = _find(wanted, text)
    return first if first >= 0 and _find(wanted, text, first + _header_length(wanted) + 1) < 0 else None


def _find(passage: str, text: str, cursor: int = 0) -> int:
    """As `str.find`. A table header or cell name that the chunker repeated before the passage need not be there: then
    the index is that of the rest of the passage, minus the header's length.
    """
    found = text.find(passage, cursor)
    header = _header_length(passage)
    if found < 0 and header:
        found = max(text.find(passage[header:], cursor) - header, -1)
    return found


def _header_length(passage: str) -> int:
    header = TABLE_HEADER.match(passage) or CELL_NAME.match(passage)
    return header.end() if header else 0


def _on_pages(document: Document, path: Path, source: AnswerSource, place: Place) -> Highlight | None:
    check_installed("Pages with highlights", ("pypdfium2", "PIL"), "ui")
    check_file(path)
    pages = run_in_sandbox(located_pages, path, source.text, source.location, place)
    return Highlight(document.name, tuple(map(PageImage.from_json, pages))) if pages else None


def _why_not(document: Document) -> str:
    """The reason: the file has changed, or its text cannot be matched to the page."""
    path = document.file
    if not document.facts.fit(path):
        return "The file has changed since it was read, and no longer contains this passage."
    if path.suffix.lower() == ".pdf":
        return "The text of this passage does not match the text on the page, so nothing is marked."
    return "The exact place of this passage in the file is not clear, so nothing is marked."
