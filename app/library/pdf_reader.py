"""Reads the pages of a PDF: text by pdfium, ruled tables by pdfplumber, form values and remarks by pypdf.

pypdf also gives a page's text where pdfium finds none. Pages that neither can read are noted, and the others are kept.
"""

import re
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ragblend.app.library.documents import note_names
from ragblend.app.library.pdf_tables import TableFinder
from ragblend.app.library.sandbox import OnPage
from ragblend.kvstore.errors import EncryptedDocumentError, OversizedDocumentError, UnreadableDocumentError

MAX_PAGES = 20_000
MAX_SECONDS = 1800.0  # for all pages; `sandbox` limits the time of one page
PRINT_ADVICE = "Open it in a viewer and save or print it to a new PDF."
MIN_WORDS, MAX_SINGLE = 50, 0.8  # words of a page that is judged; share of them with one or two letters
WRAPPED = re.compile("[\ufffe\x02]")  # what pdfium gives for a hyphen at the end of a line
# `COVID-19`; not `HAR-BOUR`.
REAL_HYPHEN = re.compile("\ufffe(?=\\d|[A-Z](?![A-Z]))|(?<![A-Z])\ufffe(?=[A-Z])")
REMARKS = {"/Text", "/FreeText", "/Highlight", "/Underline", "/StrikeOut", "/Stamp"}


def pdf_pages(path: Path, notes: list[str], on_page: OnPage) -> Iterator[tuple[str, str, str]]:
    """(text, "p. " and label, form values and remarks) of every page; the texts may be empty. Raises DocumentError.

    notes: gets a sentence that names the pages that could not be read.
    """
    from pypdf.errors import LimitReachedError

    begun, damaged, divided = time.monotonic(), list[str](), list[str]()
    with open_pdf(path) as (document, reader), closing(TableFinder(path, document)) as tables:
        count = len(document)
        for number in range(count):
            on_page(number, count)
            if time.monotonic() - begun > MAX_SECONDS:
                raise OversizedDocumentError(
                    f"Reading {path}: {number} of its {count} pages took {MAX_SECONDS / 60:.0f} minutes, the limit for "
                    "all of them. Split it into parts."
                )
            label, text = page_label(document, number), _pdfium_text(document, number)
            if _is_unreadable(text) and reader is not None:
                divided += [label] if text else []
                try:
                    pypdf_text = reader.pages[number].extract_text()
                    text = text if _is_unreadable(pypdf_text) else pypdf_text
                except MemoryError:
                    raise
                except LimitReachedError as error:
                    what = f"a part of the PDF is suspiciously large ({error})"
                    raise OversizedDocumentError(f"Reading {path}: {what}. {PRINT_ADVICE}") from error
                except Exception:  # pypdf raises anything for a damaged page
                    text = text if any(map(str.isprintable, text or "")) else None
            elif text:
                text = tables.with_rows(text, number)
            if text is None:
                damaged.append(label)
            yield text or "", f"p. {label}", "\n".join(_form_values(reader, number))
        on_page(count, count)
        if reader is None:
            notes.append("values of forms and remarks, if it has any, could not be read")
    if damaged and len(damaged) == count:
        raise UnreadableDocumentError(f"Reading {path}: all of its pages are damaged. {PRINT_ADVICE}")
    note_names(notes, "the text of these pages is damaged and was left out", damaged)
    note_names(notes, "words may be divided on these pages, whose fonts lack widths or letters", divided)


@contextmanager
def open_pdf(path: Path) -> Iterator[tuple[Any, Any]]:
    """Open a PDF with pdfium and with pypdf; None for the latter, which reads its forms, if it cannot open it.

    Raises Encrypted-, Oversized- or UnreadableDocumentError.
    """
    from pypdf import PdfReader
    from pypdfium2 import PdfDocument, PdfiumError, raw

    try:
        document = PdfDocument(path)
    except PdfiumError as error:
        if error.err_code in {raw.FPDF_ERR_PASSWORD, raw.FPDF_ERR_SECURITY}:
            advice = "Save it without one, for example with `qpdf --decrypt --password=... in.pdf out.pdf`."
            raise EncryptedDocumentError(f"Reading {path}: it needs a password. {advice}") from error
        raise UnreadableDocumentError(f"Reading {path}: it is damaged ({error}). {PRINT_ADVICE}") from error
    with closing(document), path.open("rb") as file:
        if (pages := len(document)) > MAX_PAGES:
            raise OversizedDocumentError(f"Reading {path}: {pages} pages, {MAX_PAGES} at most. Split it.")
        reader = None
        try:
            reader = PdfReader(file)
            len(reader.pages)  # a PDF whose password is empty opens like any other
        except MemoryError:
            raise
        except Exception:  # pypdf raises anything for a damaged file
            reader = None
        yield document, reader


def _is_unreadable(text: str | None) -> bool:
    """Whether a page's text is empty, or has spaces between letters, as pdfium puts them for fonts without widths."""
    words = re.findall(r"[^\W\d_]+", text or "")
    single = sum(len(word) <= 2 and word.isascii() for word in words)
    is_spaced_out = len(words) >= MIN_WORDS and single > MAX_SINGLE * len(words)
    return is_spaced_out or not any(map(str.isprintable, text or ""))


def page_label(document: Any, number: int) -> str:
    """The document's own label of a page (from 0), or its number from 1."""
    return document.get_page_label(number) or str(number + 1)


def _pdfium_text(document: Any, number: int) -> str | None:
    """The page's text, which may be empty; None if pdfium cannot read the page."""
    from pypdfium2 import PdfiumError

    with suppress(PdfiumError), closing(document[number]) as page, closing(page.get_textpage()) as textpage:
        # The bounded text may join cells of one letter, as in `Ajax512`; the other text lacks characters beyond UCS-2.
        texts = [str(textpage.get_text_range()), str(textpage.get_text_bounded())]
        text, bounded = ("".join(WRAPPED.sub("", each).split()) for each in texts)
        text = texts[text != bounded]
        return WRAPPED.sub("", REAL_HYPHEN.sub("-", text)).strip()
    return None


def _form_values(reader: Any, number: int) -> list[str]:
    """The values of a page's form fields, as `label: value`, and the remarks on the page."""
    lines = list[str]()
    if reader is None:
        return lines
    with suppress(Exception):  # pypdf raises anything for a damaged form, which is left out
        for reference in reader.pages[number].get("/Annots") or ():
            annotation = reference.get_object()
            kind = annotation.get("/Subtype")
            if kind == "/Widget" and (value := _value(annotation)) not in ("", "Off"):
                label = annotation.get_inherited("/TU") or annotation.get_inherited("/T") or "field"
                lines.append(f"{label}: {value}")
            elif kind in REMARKS and (remark := annotation.get("/Contents")):
                lines.append(f"Note: {remark}")
    return lines


def _value(field: Any) -> str:
    """A form field's value as its page shows it: of buttons the one that is on, of a choice its name.

    "" for a signature, which is a dictionary.
    """
    value = field.get_inherited("/V")
    if field.get_inherited("/FT") == "/Btn":
        value = field.get("/AS", value)
    if value is None or isinstance(value, dict):
        return ""
    options = field.get_inherited("/Opt") or ()
    names = {str(each[0]): each[1] for each in options if isinstance(each, list) and len(each) > 1}
    values = value if isinstance(value, list) else [value]
    return ", ".join(str(names.get(str(each), each)).removeprefix("/") for each in values)
