"""Document readers: one file -> parts of text, each with its location ("p. 3", a heading, a row).

Parsing runs in a limited subprocess (`sandbox`), which bounds memory and time; this module bounds the amount of text.
`FORMATS` has a row per suffix, each read by a library made for it (docs/decisions). LlamaIndex's readers were rejected:
they load a PDF three times and hide why it failed, and join table cells without a space.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from pathlib import Path
from typing import Any

from ragblend.app.library.documents import SCANNED, shortened
from ragblend.app.library.encodings import decode
from ragblend.app.library.epub import epub_chapters
from ragblend.app.library.file_checks import check_content, check_file
from ragblend.app.library.html_text import html_sections
from ragblend.app.library.legibility import is_garbled
from ragblend.app.library.more_formats import (
    latex_text,
    mail_parts,
    notebook_text,
    org_sections,
    rst_sections,
)
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
# Control characters, and those that mean something in one font only.
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
FRONT_MATTER = re.compile(r"\A---\n[\w-]+:.*\n(?:.+\n)*?---$", re.MULTILINE)
JUDGED_CHARACTERS = 20_000  # of a page or document: enough to see whether it is a language's
VERSION = 11  # part of a document's recipe: raise it when the text that comes out changes


RECOGNITION = TextRecognition()
Notes = list[str]  # sentences on what was guessed, replaced or left out
Part = tuple[str, str]  # a text and its location
Reader = Callable[
    [Path, Notes, OnPage], Iterable[tuple[str, ...]]
]  # parts; of a PDF also what people filled in


@dataclass(frozen=True, slots=True)
class Format:
    """How files of one suffix are read. libraries: modules that reading imports. Its process is new for each file, and
    gets them from the process that it is forked from.
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
    path: Path, on_page: OnPage = silent, recognition: TextRecognition = RECOGNITION
) -> DocumentText:
    """Read the text of a document, in reading order. Raises DocumentError, ModelNotFoundError (of text recognition).

    on_page(done, total): a PDF's pages, and then those that need text recognition (seconds each); it is called several
    times a second, and if it raises, reading is cancelled.
    """
    check_file(path)
    libraries = known.libraries if (known := FORMATS.get(path.suffix.lower())) else ()
    found = run_in_sandbox(parse, path, on_page=on_page, imports=libraries)
    parts, notes = list(starmap(DocumentPart, found["parts"])), list(found["notes"])
    empty, garbled = found["empty"], found["garbled"]
    wanted = sorted([*empty, *garbled])
    read = []
    if wanted and can_recognise():
        found_texts = recognition.pages(path, [number + 1 for number in wanted], on_page)
        texts = {number - 1: clean(text) for number, text in found_texts}
        read = [number for number in wanted if texts[number]]
        for number in read:
            filled_in = parts[number].text if number in empty else ""
            parts[number] = DocumentPart(f"{texts[number]}\n{filled_in}".strip(), parts[number].location)
    unread = [number for number in wanted if number not in read]
    notes += _notes_on_pages(parts, read, unread, garbled)
    parts = [part for part in parts if part.text]
    if not parts:
        raise EmptyDocumentError(_no_text(path))
    return DocumentText(parts, tuple(dict.fromkeys(" ".join(clean(note).split()) for note in notes)))


def _notes_on_pages(
    parts: Sequence[DocumentPart], read: Sequence[int], unread: Sequence[int], garbled: Sequence[int]
) -> Iterator[str]:
    """On a PDF's pages (from 0) that were read from their pictures, and those without legible text that were not."""

    def named(numbers: Iterable[int]) -> str:
        return shortened([parts[number].location for number in numbers])

    if read:
        yield f"the text of these pages was recognised from pictures: {named(read)}"
    if doubtful := [number for number in unread if number in garbled]:
        yield f"the text of these pages may be unreadable, as their fonts are broken: {named(doubtful)}"
    if can_recognise():
        return
    left = [number for number in unread if number not in garbled]
    for what, pages in (
        ("these pages have no text, and were left out", [each for each in left if not parts[each].text]),
        (
            "of these pages only remarks and form values were read",
            [each for each in left if parts[each].text],
        ),
    ):
        if pages:
            yield f"{what}; if they are scans, `{install_hint('ocr')}`: {named(pages)}"


def parse(path: Path, on_page: OnPage = silent) -> dict[str, Any]:
    """In the sandbox: `parts`, (text, location) with text, PDF pages without any too, and `notes`.

    empty: the PDF pages (from 0) without text but what people filled in. garbled: those whose text is no language's
    (`legibility`); of other formats it is noted. Raises whatever parsers raise.
    """
    check_content(path)
    notes, parts, characters, beginning = list[str](), list[Part](), 0, ""
    empty, garbled = list[int](), list[int]()
    is_pdf = path.suffix.lower() == ".pdf"
    for number, (text, location, *filled_in) in enumerate(
        FORMATS[path.suffix.lower()].read(path, notes, on_page)
    ):
        characters += len(text)
        if characters > MAX_CHARACTERS or number >= MAX_PARTS:
            raise OversizedDocumentError(
                f"Reading {path}: it has more than {MAX_CHARACTERS:,} characters of text or {MAX_PARTS:,} pages, "
                "sections or rows, the limits for one document. Split it into parts."
            )
        if is_pdf and is_garbled(text[:JUDGED_CHARACTERS]):
            garbled.append(number)
        elif not is_pdf and len(beginning) < JUDGED_CHARACTERS:
            beginning += f"{text[:JUDGED_CHARACTERS]}\n"
        if is_pdf and not clean(text):
            empty.append(number)
        if (cleaned := clean("\n".join([text, *filled_in]))) or is_pdf:
            parts.append((cleaned, location))
    if is_garbled(beginning):
        notes.append("its text may be unreadable: it is not like that of any language")
    return {"parts": parts, "notes": notes, "empty": empty, "garbled": garbled}


def clean(text: str) -> str:
    """Remove control characters, broken surrogates and white space at line ends; line ends become \\n."""
    text = re.sub("\r\n|[\r\f\v]", "\n", text)
    text = text.translate(INVISIBLE)
    text = text.encode("utf-8", "replace").decode("utf-8")  # PDF fonts can give half a surrogate pair
    text = NOT_TEXT.sub("", text)
    # Linear time, however long a run of spaces is.
    text = re.sub(r"(?<![ \t])[ \t]++$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _markdown_sections(text: str) -> Iterator[Part]:
    """One part for each heading; the text stays as it is written, which models read well."""
    from markdown_it import MarkdownIt

    text = clean(text)
    lines = text.split("\n")
    # The line of dashes below a file's front matter would make it a heading.
    tokens = MarkdownIt("commonmark").parse(FRONT_MATTER.sub(lambda found: "\n" * found[0].count("\n"), text))
    begin, heading = 0, ""
    for token, content in pairwise(tokens):
        if token.type == "heading_open" and token.level == 0 and token.map is not None:
            yield "\n".join(lines[begin : token.map[0]]), heading
            begin, heading = token.map[0], " ".join(content.content.split()).strip(" *_`")
    yield "\n".join(lines[begin:]), heading


def _of_text(read: Callable[[str], Iterable[Part]]) -> Reader:
    """A reader of files from a function of their decoded text."""
    return lambda path, notes, _: read(decode(path.read_bytes(), path, notes))


_CHARDET, _MARKUP = ("chardet",), ("selectolax.lexbor", "defusedxml.ElementTree", "chardet")
_MARKDOWN = Format(_of_text(_markdown_sections), ("markdown_it",))
_HTML = Format(_of_text(html_sections), _MARKUP)
_OPENDOCUMENT = Format(lambda path, notes, _: opendocument_sections(path), _MARKUP)


def _table(delimiter: str) -> Format:
    return Format(
        lambda path, notes, _: csv_rows(decode(path.read_bytes(), path, notes), notes, delimiter),
        ("clevercsv", "chardet"),
    )


_MAIL = Format(lambda path, notes, _: mail_parts(path, notes), _MARKUP)
FORMATS: dict[str, Format] = {
    ".txt": Format(_of_text(lambda text: [(text, "")]), _CHARDET),
    ".md": _MARKDOWN,
    ".markdown": _MARKDOWN,
    ".html": _HTML,
    ".htm": _HTML,
    ".xhtml": _HTML,
    ".pdf": Format(pdf_pages, ("pypdfium2", "pypdf", "pdfplumber")),
    ".docx": Format(lambda path, notes, _: docx_sections(path, notes), _MARKUP),
    ".odt": _OPENDOCUMENT,
    ".odp": _OPENDOCUMENT,
    ".pptx": Format(lambda path, notes, _: pptx_slides(path, notes), _MARKUP),
    ".rtf": Format(lambda path, notes, _: rtf_text(path, notes)),
    ".epub": Format(lambda path, notes, _: epub_chapters(path, notes), _MARKUP),
    ".csv": _table(","),
    ".tsv": _table("\t"),
    ".xlsx": Format(lambda path, notes, _: xlsx_rows(path, notes), ("openpyxl",)),
    ".ipynb": Format(_of_text(lambda text: _markdown_sections(notebook_text(text)))),
    ".rst": Format(_of_text(rst_sections), ("docutils.core",)),
    ".org": Format(_of_text(org_sections)),
    ".tex": Format(_of_text(latex_text)),
    ".eml": _MAIL,
    ".mbox": _MAIL,
}


def _no_text(path: Path) -> str:
    if path.suffix.lower() == ".pdf" and not can_recognise():
        return (
            f"Reading {path}: its pages hold no text, so {SCANNED}. Install text recognition, "
            f"`{install_hint('ocr')}`, and try again; or run, for example, `ocrmypdf in.pdf out.pdf`."
        )
    return f"Reading {path}: there is no text in it. Nothing of it was ingested."
