"""Reads the text and label of each page of a PDF with pypdf, which reads the file once."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ragblend.app.library.sandbox import OnPage
from ragblend.kvstore.errors import EncryptedDocumentError, OversizedDocumentError, UnreadableDocumentError

if TYPE_CHECKING:
    from pypdf import PdfReader

MAX_PAGES = 20_000
MAX_SECONDS = 1800.0  # for the text of all pages; `sandbox` bounds the time of one page


def pdf_pages(path: Path, on_page: OnPage) -> Iterator[tuple[str, str]]:
    """(label, text) of every page; the text may be empty. Raises DocumentError."""
    begun = time.monotonic()
    with open_pdf(path) as reader:
        labels, count = reader.page_labels, len(reader.pages)
        for number, label in enumerate(labels):
            on_page(number, count)
            if time.monotonic() - begun > MAX_SECONDS:
                raise OversizedDocumentError(
                    f"Reading {path}: {number} of its {count} pages took {MAX_SECONDS / 60:.0f} minutes, the limit for "
                    "all of them. Split it into parts."
                )
            yield label, reader.pages[number].extract_text()
        on_page(count, count)


@contextmanager
def open_pdf(path: Path) -> "Iterator[PdfReader]":
    """Open a PDF. Raises Encrypted-, Oversized- or UnreadableDocumentError, on opening or while it is read."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, LimitReachedError, PyPdfError

    try:
        with path.open("rb") as file:
            reader = PdfReader(file)
            pages = len(reader.pages)  # a PDF whose password is empty opens like any other
            if pages > MAX_PAGES:
                raise OversizedDocumentError(
                    f"Reading {path}: it has {pages} pages, {MAX_PAGES} at most. Split it."
                )
            yield reader
    except FileNotDecryptedError as error:
        raise EncryptedDocumentError(
            f"Reading {path}: it needs a password. Save it without one, for example with "
            "`qpdf --decrypt --password=... in.pdf out.pdf`."
        ) from error
    except DependencyError as error:
        raise EncryptedDocumentError(
            f"Reading {path}: it is encrypted with AES, which needs one more package: `pip install cryptography`."
        ) from error
    except LimitReachedError as error:
        raise OversizedDocumentError(
            f"Reading {path}: a part of the PDF is suspiciously large ({error}). Open it in a viewer and print it to a "
            "new PDF."
        ) from error
    except (PyPdfError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableDocumentError(
            f"Reading {path}: the PDF is damaged ({error}). Open it in a viewer and save or print it to a new PDF."
        ) from error
