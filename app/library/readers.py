"""Document readers: one file -> parts of text, each with its location ("p. 3", a heading, a row).

Parsing runs in a limited subprocess (`sandbox`), which bounds memory and time; this module bounds the amount of text.
The parsers are pypdf, Beautiful Soup, expat and csv. LlamaIndex's readers were rejected: they load a PDF three times
and hide why it failed, join table cells without a space, stop at a ragged row, and need copyleft packages for EPUB.
"""

import csv
import io
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.library.documents import SCANNED
from ragblend.app.library.file_checks import MAX_TEXT_BYTES, check_content, check_file, decode, open_archive
from ragblend.app.library.pdf_pages import OCR_BYTES, can_recognise, recognised
from ragblend.app.library.sandbox import OnPage, run_in_sandbox
from ragblend.app.progress import silent
from ragblend.kvstore.errors import EmptyDocumentError, OversizedDocumentError

MAX_CHARACTERS = 32_000_000  # of one document: some 16,000 passages of 512 tokens
MAX_PARTS = 300_000  # pages, sections, rows
# Soft hyphen, zero-width space, stray byte order mark.
INVISIBLE = dict.fromkeys(map(ord, "\u00ad\u200b\ufeff"))
# Control characters, and those that mean something in one font only.
NOT_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd]")
SNIFF_CHARACTERS = 16_384
WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
BREAKS = {f"{WORD}tab": "\t", f"{WORD}br": "\n", f"{WORD}cr": "\n", f"{WORD}p": "\n\n"}
VERSION = 1  # part of a document's recipe: raise it when the text that comes out changes


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A part of a document's text and its location, which may be empty."""

    text: str
    location: str


def read_document(path: Path, on_page: OnPage = silent) -> list[DocumentPart]:
    """Read the text of a document, in reading order. Raises DocumentError.

    on_page(done, total): a PDF's pages, and then those that need text recognition (seconds each); it is called several
    times a second, and if it raises, reading is cancelled.
    """
    check_file(path)
    parts = run_in_sandbox(parse, path, on_page=on_page)
    without = [number for number, part in enumerate(parts, start=1) if not part.text]
    if without and can_recognise():
        found = run_in_sandbox(recognised, path, without, on_page=on_page, memory_bytes=OCR_BYTES)
        for number, text in found:
            parts[number - 1] = DocumentPart(clean(text), parts[number - 1].location)
    parts = [part for part in parts if part.text]
    if not parts:
        raise EmptyDocumentError(_no_text(path))
    return parts


def parse(path: Path, on_page: OnPage = silent) -> list[DocumentPart]:
    """In the sandbox: the parts with text, and PDF pages without any. Raises whatever parsers raise."""
    check_content(path)
    suffix = path.suffix.lower()
    found = _read_pdf(path, on_page) if suffix == ".pdf" else READERS[suffix](path)
    cleaned = (DocumentPart(clean(part.text), part.location) for part in found)
    return list(_within_limits(path, (part for part in cleaned if part.text or suffix == ".pdf")))


def _within_limits(path: Path, parts: Iterable[DocumentPart]) -> Iterator[DocumentPart]:
    characters = 0
    for count, part in enumerate(parts, start=1):
        characters += len(part.text)
        if characters > MAX_CHARACTERS or count > MAX_PARTS:
            raise OversizedDocumentError(
                f"Reading {path}: it has more than {MAX_CHARACTERS:,} characters of text or {MAX_PARTS:,} pages, "
                "sections or rows, the limits for one document. Split it into parts."
            )
        yield part


def clean(text: str) -> str:
    """Remove control characters, broken surrogates and white space at line ends; line ends become \\n."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    text = text.translate(INVISIBLE)
    text = text.encode("utf-8", "replace").decode("utf-8")  # PDF fonts can give half a surrogate pair
    text = NOT_TEXT.sub("", text)
    # Linear time, however long a run of spaces is.
    text = re.sub(r"(?<![ \t])[ \t]++$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _read_txt(path: Path) -> Iterable[DocumentPart]:
    return [DocumentPart(decode(path.read_bytes(), path), "")]


def _read_markdown(path: Path) -> Iterator[DocumentPart]:
    """One part for each heading that is not in a code block."""
    section, in_code = list[str](), False
    for line in clean(decode(path.read_bytes(), path)).split("\n"):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        if not fence and not in_code and (heading := re.match(r"(#+)\s(.*)", line)):
            yield _markdown_section(section)
            section, line = [], f"{heading.group(1)} {heading.group(2)}"
        section.append(line)
    yield _markdown_section(section)


def _markdown_section(lines: list[str]) -> DocumentPart:
    text = "\n".join(lines).strip()
    heading = re.match(r"#+\s+(.+)", text)
    return DocumentPart(text, heading.group(1).strip(" #*_`") if heading else "")


def _read_pages(path: Path) -> Iterator[DocumentPart]:
    """HTML, or the chapters of an EPUB."""
    from ragblend.app.library.html_text import epub_chapters, html_sections

    is_book = path.suffix.lower() == ".epub"
    found = epub_chapters(path) if is_book else html_sections(decode(path.read_bytes(), path))
    return (DocumentPart(section.text, section.heading) for section in found)


def _read_pdf(path: Path, on_page: OnPage = silent) -> Iterator[DocumentPart]:
    from ragblend.app.library.pdf_reader import pdf_pages

    return (DocumentPart(text, f"p. {label}") for label, text in pdf_pages(path, on_page))


def _read_docx(path: Path) -> Iterator[DocumentPart]:
    """Headers, the document, footers, as docx2txt has them, without a tree in memory; paragraphs apart."""
    with open_archive(path) as archive:
        names = archive.namelist()
        headers = [name for name in names if re.match(r"word/header[0-9]*.xml", name)]
        footers = [name for name in names if re.match(r"word/footer[0-9]*.xml", name)]
        members = (*headers, "word/document.xml", *footers)
        yield DocumentPart("".join(_word_text(archive.read(name)) for name in members), "")


def _word_text(xml: bytes) -> str:
    from defusedxml.ElementTree import DefusedXMLParser  # no entities, so no billion laughs

    parser = DefusedXMLParser(target=_WordText())
    parser.feed(xml)
    text: str = parser.close()
    return text


class _WordText:
    """An XML parser's target: collects the text of Word's elements."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._in_text = False

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self._pieces.append(BREAKS.get(tag, ""))
        self._in_text = tag == f"{WORD}t"

    def data(self, text: str) -> None:
        if self._in_text:
            self._pieces.append(text)

    def end(self, tag: str) -> None:
        self._in_text = False

    def close(self) -> str:
        return "".join(self._pieces)


def _read_csv(path: Path) -> Iterator[DocumentPart]:
    """One part for each row with values, as lines of "column: value"; the header is row 1."""
    text = decode(path.read_bytes(), path)
    csv.field_size_limit(MAX_TEXT_BYTES)  # for the whole process; the default is 131,072
    rows = csv.reader(io.StringIO(text, newline=""), dialect=_dialect(text))
    header = [name.strip() for name in next(rows, [])]
    empty = True
    for number, row in enumerate(rows, start=2):
        if line := _row_text(header, row):
            empty = False
            yield DocumentPart(line, f"row {number}")
    if empty and any(header):  # the file is only a header, or a list of one line
        yield DocumentPart(", ".join(name for name in header if name), "row 1")


def _dialect(text: str) -> type[csv.Dialect] | csv.Dialect:
    try:
        return csv.Sniffer().sniff(text[:SNIFF_CHARACTERS], delimiters=",;\t|")
    except csv.Error:
        return csv.excel


def _row_text(header: list[str], row: list[str]) -> str:
    names = header + [f"column {n}" for n in range(len(header) + 1, len(row) + 1)]
    pairs = ((name, " ".join(value.split())) for name, value in zip(names, row, strict=False))
    return "\n".join(f"{name}: {value}" if name else value for name, value in pairs if value)


READERS: dict[str, Callable[[Path], Iterable[DocumentPart]]] = {
    ".txt": _read_txt,
    ".md": _read_markdown,
    ".markdown": _read_markdown,
    ".html": _read_pages,
    ".htm": _read_pages,
    ".pdf": _read_pdf,
    ".docx": _read_docx,
    ".epub": _read_pages,
    ".csv": _read_csv,
}


def _no_text(path: Path) -> str:
    if path.suffix.lower() == ".pdf" and not can_recognise():
        return (
            f"Reading {path}: its pages hold no text, so {SCANNED}. Install text recognition, "
            "`pip install 'ragblend[ocr]'`, and try again; or run, for example, `ocrmypdf in.pdf out.pdf`."
        )
    return f"Reading {path}: there is no text in it. Nothing of it was ingested."
