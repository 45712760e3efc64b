"""PDF: refuse what needs a password, before LlamaIndex's reader (which would retry and hide the reason)."""

from pathlib import Path

from ragblend.kvstore.errors import EncryptedDocumentError, OversizedDocumentError, UnreadableDocumentError

MAX_PAGES = 20_000


def check_pdf(path: Path) -> None:
    """Raises EncryptedDocumentError, OversizedDocumentError or UnreadableDocumentError."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, FileNotDecryptedError, PdfReadError

    try:
        pages = len(PdfReader(path).pages)  # a PDF whose password is empty opens like any other
    except FileNotDecryptedError as error:
        raise EncryptedDocumentError(
            f"Reading {path}: it needs a password. Save it without one, for example with "
            "`qpdf --decrypt --password=... in.pdf out.pdf`."
        ) from error
    except DependencyError as error:
        raise EncryptedDocumentError(
            f"Reading {path}: it is encrypted with AES, which needs one more package: `pip install cryptography`."
        ) from error
    except (PdfReadError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableDocumentError(
            f"Reading {path}: the PDF is damaged ({error}). Open it in a viewer and save or print it to a new PDF."
        ) from error
    if pages > MAX_PAGES:
        raise OversizedDocumentError(f"Reading {path}: it has {pages} pages, {MAX_PAGES} at most. Split it.")
