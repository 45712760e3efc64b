"""Document readers: one file -> parts of text, each with its location ("p. 3", a heading, a row).

Parsing runs in a limited subprocess (`sandbox`), which bounds memory and time; this module bounds the amount of text.
`FORMATS` has an entry per suffix, each read by a library made for it (docs/decisions). LlamaIndex's readers were
rejected: they load a PDF three times and hide why it failed, and join table cells without a space.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

from ragblend.app.library import text_formats
from ragblend.app.library.documents import SCANNED, note_names
from ragblend.app.library.encodings import decode
from ragblend.app.library.epub import epub_chapters
from ragblend.app.library.file_checks import check_content, check_file
from ragblend.app.library.html_text import html_sections
from ragblend.app.library.legibility import is_garbled
from ragblend.app.library.opendocument import opendocument_sections
from ragblend.app.library.pdf_reader import pdf_pages
from ragblend.app.library.rich_text import rtf_text
from ragblend.app.library.sandbox import OnPage, run_in_sandbox
from ragblend.app.library.tables import csv_rows, xlsx_rows
from ragblend.app.library.text_recognition import TextRecognition, can_recognise
from ragblend.app.library.word_documents import docx_sections, pptx_slides
from ragblend.app.progress import silent
from ragblend.kvstore.errors import EmptyDocumentError, OversizedDocumentError, install_hint

MAX_CHARACTERS = 32_000_000  # of one document: some 16,000 passages of 512 tokens
MAX_PARTS = 300_000  # pages, sections, rows
# Soft hyphen, zero-width space, stray byte order mark.
INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\ufeff"))
# Control characters, and private-use characters, whose meaning depends on a font.
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
JUDGED_CHARACTERS = 20_000  # of a page or document: enough to judge whether it is in a language
VERSION = 12  # part of a document's recipe: raise it when the text that comes out changes


DEFAULT_RECOGNITION = TextRecognition()
Notes = list[str]  # sentences on what was guessed, replaced or left out
Part = tuple[str, str]  # a text and its location
# Gives `Part`s; that of PDFs also takes `on_page`, and gives a third text: form values and remarks.
Reader = Callable[..., Iterable[tuple[str, ...]]]


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one suffix are read. libraries: modules that the reader imports. They are imported once, into the
    process from which a new process is forked for each file.
    """

    read: Reader
    libraries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a document's text and its location, which may be empty."""

    text: str
    location: str


@dataclass(frozen=True)
class DocumentText:
    """A document's parts in reading order. notes: what was guessed, replaced or left out, a line each."""

    parts: list[DocumentPart]
    notes: tuple[str, ...] = ()


def read_document(
    path: Path, on_page: OnPage = silent, recognition: TextRecognition = DEFAULT_RECOGNITION
) -> DocumentText:
    """Read the text of a document, in reading order. Raises DocumentError, ModelNotFoundError (of text recognition).

    on_page(done, total) counts a PDF's pages, and then the pages that need text recognition (seconds each). It is
    called several times a second; if it raises, reading is cancelled.
    """
    check_file(path)
    libraries = known.libraries if (known := FORMATS.get(path.suffix.lower())) else ()
    found = run_in_sandbox(parse, path, on_page=on_page, imports=libraries)
    parts, notes = list(starmap(DocumentPart, found["parts"])), list(found["notes"])
    illegible, texts = sorted([*found["empty"], *found["garbled"]]), dict[int, str]()
    if illegible and can_recognise():
        pages = recognition.pages(path, [number + 1 for number in illegible], on_page)
        texts = {number - 1: text for number, page in pages if (text := clean(page))}
    for number, text in texts.items():
        filled_in = parts[number].text if number in found["empty"] else ""
        parts[number] = DocumentPart(f"{text}\n{filled_in}".strip(), parts[number].location)
    _note_pages(notes, parts, texts, [n for n in illegible if n not in texts], found["garbled"])
    parts = [part for part in parts if part.text]
    if not parts:
        problem, advice = "there is no text in it", "Nothing of it was ingested"
        if path.suffix.lower() == ".pdf" and not can_recognise():
            problem = f"its pages hold no text, so {SCANNED}"
            advice = (
                f"Install text recognition, `{install_hint('ocr')}`; or run, say, `ocrmypdf in.pdf out.pdf`"
            )
        raise EmptyDocumentError(f"Reading {path}: {problem}. {advice}.")
    return DocumentText(parts, tuple(dict.fromkeys(" ".join(clean(note).split()) for note in notes)))


def _note_pages(
    notes: Notes, parts: list[DocumentPart], recognised: Iterable[int], unread: list[int], garbled: list[int]
) -> None:
    """Note a PDF's pages (from 0) without legible text: those recognised from pictures, and the unread ones."""
    left = [] if can_recognise() else [number for number in unread if number not in garbled]
    hint = f"; if they are scans, `{install_hint('ocr')}`"
    for what, numbers in (
        ("the text of these pages was recognised from pictures", recognised),
        ("the text of these pages may be unreadable, as their fonts are broken", set(unread) & set(garbled)),
        (f"these pages have no text, and were left out{hint}", [n for n in left if not parts[n].text]),
        (f"of these pages only remarks and form values were read{hint}", [n for n in left if parts[n].text]),
    ):
        note_names(notes, what, [parts[number].location for number in sorted(numbers)])


def parse(path: Path, on_page: OnPage = silent) -> dict[str, Any]:
    """In the sandbox: the document's `parts`, (text, location) each, and `notes`. A PDF's empty pages are parts, too.

    `empty`: the PDF's pages (from 0) without text, except form values and remarks; `garbled`: its pages whose text is
    in no language (`legibility`); for other formats a note says that. Raises whatever parsers raise.
    """
    check_content(path)
    notes, parts, characters, beginning = Notes(), list[Part](), 0, ""
    empty, garbled = list[int](), list[int]()
    suffix = path.suffix.lower()
    is_pdf = suffix == ".pdf"
    found = FORMATS[suffix].read(path, notes, *[on_page] * is_pdf)
    for number, (text, location, *filled_in) in enumerate(found):
        characters += len(text)
        if characters > MAX_CHARACTERS or number >= MAX_PARTS:
            raise OversizedDocumentError(
                f"Reading {path}: it has more than {MAX_CHARACTERS:,} characters of text or {MAX_PARTS:,} pages, "
                "sections or rows, the limits for one document. Split it into parts."
            )
        cleaned = clean("\n".join([text, *filled_in]))
        if is_pdf:
            empty += [] if clean(text) else [number]
            garbled += [number] if is_garbled(text[:JUDGED_CHARACTERS]) else []
        elif len(beginning) < JUDGED_CHARACTERS:
            beginning += f"{text[:JUDGED_CHARACTERS]}\n"
        parts += [(cleaned, clean(location))] if cleaned or is_pdf else []
    if is_garbled(beginning):
        notes.append("its text may be unreadable: it is not like that of any language")
    return {"parts": parts, "notes": notes, "empty": empty, "garbled": garbled}


def clean(text: str) -> str:
    """Remove control characters, broken surrogates and white space at line ends; line ends become \\n."""
    text = re.sub("\r\n|[\r\f\v]", "\n", text)
    text = text.translate(INVISIBLE)
    text = text.encode("utf-8", "replace").decode("utf-8")  # PDFs may have half a surrogate pair
    text = NOT_TEXT.sub("", text)
    # Linear time, however long a run of spaces is.
    text = re.sub(r"(?<![ \t])[ \t]++$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _text_reader(read: Callable[[str], Iterable[Part]]) -> Reader:
    """Make a reader of files from a reader of decoded text."""
    return lambda path, notes: read(decode(path.read_bytes(), path, notes))


def _table_reader(delimiter: str) -> Reader:
    return lambda path, notes: csv_rows(decode(path.read_bytes(), path, notes), notes, delimiter)


_CHARDET, _MARKUP = ("chardet",), ("selectolax.lexbor", "defusedxml.ElementTree", "chardet")
FORMATS = {
    ".txt": Format(_text_reader(lambda text: [(text, "")]), _CHARDET),
    ".pdf": Format(pdf_pages, ("pypdfium2", "pypdf", "pdfplumber")),
    ".docx": Format(docx_sections, _MARKUP),
    ".pptx": Format(pptx_slides, _MARKUP),
    ".rtf": Format(rtf_text),
    ".epub": Format(epub_chapters, _MARKUP),
    ".csv": Format(_table_reader(","), ("clevercsv", "chardet")),
    ".tsv": Format(_table_reader("\t"), ("clevercsv", "chardet")),
    ".xlsx": Format(xlsx_rows, ("openpyxl",)),
    ".ipynb": Format(_text_reader(text_formats.notebook_sections), ("markdown_it",)),
    ".rst": Format(_text_reader(text_formats.rst_sections), ("docutils.core",)),
    ".org": Format(_text_reader(text_formats.org_sections)),
    ".tex": Format(_text_reader(text_formats.latex_text)),
    **dict.fromkeys(
        (".md", ".markdown"), Format(_text_reader(text_formats.markdown_sections), ("markdown_it",))
    ),
    **dict.fromkeys((".html", ".htm", ".xhtml"), Format(_text_reader(html_sections), _MARKUP)),
    **dict.fromkeys((".odt", ".odp"), Format(lambda path, _: opendocument_sections(path), _MARKUP)),
    **dict.fromkeys((".eml", ".mbox"), Format(text_formats.mail_parts, _MARKUP)),
}
