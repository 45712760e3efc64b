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

CONTEXT_CHARACTERS = 3000  # shown before and after the passage
MAX_CHARACTERS = 400_000  # of text shown of an open document
Place = tuple[int, int] | None  # (start, stop) in a source's text, in characters; None: all of it


@dataclass(frozen=True)
class Highlight:
    """A source, marked on pictures of its pages or as text[start:stop]; reason: why it was not found.

    cut_before, cut_after: the document has more text there. page_count: of a PDF, else 0; first_page: the first page on
    which the source may be, or the page shown.
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
    library: Library, source: AnswerSource, place: Place = None, around: int = CONTEXT_CHARACTERS
) -> Highlight:
    """Find the source in the document's current file. Raises UsageError if the extra `ui` is needed and missing.

    place: the part of source.text to mark. around: characters of text to show on either side.
    """
    document = library.documents_with([source.document_id]).get(source.document_id)
    if document is None or source.text == DELETED_TEXT:
        return Highlight(source.document, reason="The document was deleted from the library.")
    try:
        if _is_pdf(document):
            highlight = _highlighted_pages(document, located_pages, source.text, source.location, place)
            return highlight if highlight.pages else replace(highlight, reason=_reason_not_found(document))
        return _highlighted_text(library, document, source, place, around) or Highlight(
            document.name, reason=_reason_not_found(document)
        )
    except DocumentError as error:
        return Highlight(document.name, reason=str(error))


def cited_place(message: ChatMessage, number: int, at: str) -> tuple[AnswerSource, Place]:
    """A source of an answer, and the part of its text to mark. Raises LibraryError if the answer has no such source.

    at: the citation's position in the answer, or `=` and a figure of the source, or "" for the number's first citation
    that its source supports.
    """
    source = next((each for each in message.sources if each.number == number), None)
    if source is None:
        raise LibraryError(f"Opening source {number} of an answer: the answer has no such source any more.")
    if at.startswith("="):
        places = [found.span() for found in re.finditer(re.escape(at[1:]), source.text)]
    else:
        cited = (each for each in cite(message.text, message.sources).citations if each.number == number)
        places = [each.place for each in cited if at in ("", str(each.start)) and each.place is not None]
    return source, places[0] if places else None


def open_document(library: Library, document_id: str, page: int = 1) -> Highlight:
    """A document with nothing marked: one page of a PDF (from 1; the nearest that exists), or the text's beginning.

    Its `reason` says why it cannot be shown. Raises UsageError if the extra `ui` is needed and missing.
    """
    document = library.documents_with([document_id]).get(document_id)
    if document is None:
        return Highlight("", reason="The document was deleted from the library.")
    try:
        if _is_pdf(document):
            return _highlighted_pages(document, unmarked_page, page)
        text = _document_text(document)
    except DocumentError as error:
        return Highlight(document.name, reason=str(error))
    return Highlight(document.name, text=text[:MAX_CHARACTERS], cut_after=len(text) > MAX_CHARACTERS)


def _is_pdf(document: Document) -> bool:
    return document.file.suffix.lower() == ".pdf"


def _document_text(document: Document) -> str:
    return SEPARATOR.join(part.text for part in read_document(document.file).parts)


def _highlighted_text(
    library: Library, document: Document, source: AnswerSource, place: Place, around: int
) -> Highlight | None:
    text = _document_text(document)
    start = _passage_start(text, [p.text for p in _passages_up_to(library, source)], source.text)
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


def _passages_up_to(library: Library, source: AnswerSource) -> Sequence[DocumentPassage]:
    """The document's passages in reading order up to the source; none if the library no longer has the source."""
    passages = library.passages_of(source.document_id)
    found = [index for index, passage in enumerate(passages) if passage.node_id == source.node_id]
    return passages[: found[0] + 1] if found else []


def _passage_start(text: str, passages: Sequence[str], wanted: str) -> int | None:
    """The index in `text` where the wanted passage starts, as `_find_passage` returns it.

    passages: the document's passages up to the wanted one; they tell which occurrence is meant if there are several.
    None if the text no longer contains the passage, or it is unclear which occurrence is meant.
    """
    cursor = 0
    for passage in passages:
        found = _find_passage(passage, text, cursor)
        if found < 0:
            break
        if passage == wanted and passage is passages[-1]:
            return found
        cursor = found + 1
    first = _find_passage(wanted, text)
    return (
        first if first >= 0 and _find_passage(wanted, text, first + _header_length(wanted) + 1) < 0 else None
    )


def _find_passage(passage: str, text: str, cursor: int = 0) -> int:
    """Like `str.find`, but if the text lacks the whole passage, its table header or cell name is left out.

    The chunker repeats these in passages. The result is then the index of the rest, minus the header's length.
    """
    found = text.find(passage, cursor)
    header = _header_length(passage)
    if found < 0 and header:
        found = max(text.find(passage[header:], cursor) - header, -1)
    return found


def _header_length(passage: str) -> int:
    header = TABLE_HEADER.match(passage) or CELL_NAME.match(passage)
    return header.end() if header else 0


def _highlighted_pages(
    document: Document, draw_pages: Callable[..., dict[str, Any]], *arguments: Any
) -> Highlight:
    check_installed("Pages with highlights", ("pypdfium2", "PIL"), "ui")
    check_file(document.file)
    found = run_in_sandbox(draw_pages, document.file, *arguments)
    images = tuple(map(PageImage.from_json, found["pages"]))
    return Highlight(document.name, images, page_count=found["count"], first_page=found["first"])


def _reason_not_found(document: Document) -> str:
    """Why a passage was not found: the file has changed, or the text does not match the page."""
    if not document.facts.fit(document.file):
        return "The file has changed since it was read, and no longer contains this passage."
    if _is_pdf(document):
        return "The text of this passage does not match the text on the page, so nothing is marked."
    return "It is not clear where in the file this passage is, so nothing is marked."
