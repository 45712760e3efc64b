"""Finds a source in its document and marks it on the page's picture or in the text, or says why it cannot.

If the answer's sentence is supported by one sentence of the passage, only that is marked. A match is exact: it has all
letters of the passage in order.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.chats import DELETED_TEXT, ChatMessage
from ragblend.app.answering.citations import cite
from ragblend.app.extras import check_installed
from ragblend.app.library.chunking import SEPARATOR, TABLE_HEADER
from ragblend.app.library.documents import Document, DocumentPassage
from ragblend.app.library.file_checks import check_file
from ragblend.app.library.pdf_pages import PageImage, located_pages, unmarked_page
from ragblend.app.library.readers import read_document
from ragblend.app.library.registry import Library
from ragblend.app.library.sandbox import run_in_sandbox
from ragblend.app.library.tables import CELL_NAME
from ragblend.kvstore.errors import DocumentError, LibraryError

AROUND_CHARACTERS = 3000  # of text shown before and after the passage
MOST_CHARACTERS = 400_000  # of text shown of an open document
Place = tuple[int, int] | None  # (start, stop), characters of a source's text


@dataclass(frozen=True)
class Highlight:
    """The source marked on pictures of its pages, or as text[start:stop]; reason: why it was not found.

    cut_before, cut_after: the document has more text there. page_count: of a PDF, else 0; first_page: where it may be.
    """

    document: str
    pages: tuple[PageImage, ...] = ()
    text: str = ""
    start: int = 0
    stop: int = 0
    cut_before: bool = False
    cut_after: bool = False
    reason: str = ""
    page_count: int = 0
    first_page: int = 1


def locate_source(
    library: Library, source: AnswerSource, place: Place = None, around: int = AROUND_CHARACTERS
) -> Highlight:
    """Find the source in the current file. Raises UsageError if the extra `ui` is needed and missing.

    place: mark only source.text[start:stop]; None: the whole passage. around: characters of text on either side.
    """
    document = library.documents_with([source.document_id]).get(source.document_id)
    if document is None or source.text == DELETED_TEXT:
        return Highlight(source.document, reason="The document was deleted from the library.")
    try:
        if _is_pdf(document):
            found = _pages(document, located_pages, source.text, source.location, place)
            return found if found.pages else replace(found, reason=_why_not(document))
        return _in_text(library, document, source, place, around) or Highlight(
            document.name, reason=_why_not(document)
        )
    except DocumentError as error:
        return Highlight(document.name, reason=str(error))


def cited_place(message: ChatMessage, number: int, at: str) -> tuple[AnswerSource, Place]:
    """A source of an answer, and the part of its text to mark. Raises LibraryError if the answer has no such source.

    at: the citation's position in the answer, or `=` and a figure of the source; "" for the first citation of that
    number that has a sentence.
    """
    source = next((each for each in message.sources if each.number == number), None)
    if source is None:
        raise LibraryError(f"Opening source {number} of an answer: the source is no longer here.")
    if at.startswith("="):
        places = [found.span() for found in re.finditer(re.escape(at[1:]), source.text)]
    else:
        cited = (each for each in cite(message.text, message.sources).citations if each.number == number)
        places = [each.place for each in cited if at in ("", str(each.start)) and each.place is not None]
    return source, places[0] if places else None


def open_document(library: Library, document_id: str, page: int = 1) -> Highlight:
    """A document with nothing marked: one page of a PDF (from 1; the nearest one), else the text's first characters.

    reason: why it cannot be shown. Raises UsageError if the extra `ui` is needed and missing.
    """
    document = library.documents_with([document_id]).get(document_id)
    if document is None:
        return Highlight("", reason="The document was deleted from the library.")
    try:
        if _is_pdf(document):
            return _pages(document, unmarked_page, page)
        text = _text(document)
    except DocumentError as error:
        return Highlight(document.name, reason=str(error))
    return Highlight(document.name, text=text[:MOST_CHARACTERS], cut_after=len(text) > MOST_CHARACTERS)


def _is_pdf(document: Document) -> bool:
    return document.file.suffix.lower() == ".pdf"


def _text(document: Document) -> str:
    return SEPARATOR.join(part.text for part in read_document(document.file).parts)


def _in_text(
    library: Library, document: Document, source: AnswerSource, place: Place, around: int
) -> Highlight | None:
    text = _text(document)
    start = _start(text, [p.text for p in _up_to(library, source)], source.text)
    if start is None:
        return None
    first = max(0, start - around)
    last = min(len(text), start + len(source.text) + around)
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


def _pages(document: Document, work: Callable[..., dict[str, Any]], *arguments: Any) -> Highlight:
    check_installed("Pages with highlights", ("pypdfium2", "PIL"), "ui")
    check_file(document.file)
    found = run_in_sandbox(work, document.file, *arguments)
    images = tuple(map(PageImage.from_json, found["pages"]))
    return Highlight(document.name, images, page_count=found["count"], first_page=found["first"])


def _why_not(document: Document) -> str:
    """The reason: the file has changed, or its text cannot be matched to the page."""
    if not document.facts.fit(document.file):
        return "The file has changed since it was read, and no longer contains this passage."
    if _is_pdf(document):
        return "The text of this passage does not match the text on the page, so nothing is marked."
    return "The exact place of this passage in the file is not clear, so nothing is marked."
