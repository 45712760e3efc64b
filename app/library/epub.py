"""Reads EPUB: the chapters in the order of the book's spine, each as HTML.

EbookLib is AGPL, and gives chapters in file order without their headings.
"""

import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from ragblend.app.library.encodings import decode
from ragblend.app.library.file_checks import archive_xml, open_archive
from ragblend.app.library.html_text import html_sections
from ragblend.kvstore.errors import EncryptedDocumentError, UnreadableDocumentError

CONTAINER = "META-INF/container.xml"
# The last two are those of older versions of the format.
TEXT_TYPES = {"application/xhtml+xml", "text/html", "image/svg+xml"}
TEXT_TYPES |= {"text/x-oeb1-document", "application/x-dtbook+xml"}


def epub_chapters(path: Path, notes: list[str]) -> Iterator[tuple[str, str]]:
    """(text, heading) of the sections; a chapter that the spine names twice is read once. Raises DocumentError."""
    with open_archive(path) as archive:
        names = set(archive.namelist())
        if "META-INF/encryption.xml" in names and "META-INF/rights.xml" in names:
            raise EncryptedDocumentError(f"Reading {path}: the book has copy protection, and cannot be read.")
        for name in dict.fromkeys(_spine(archive, path)):
            if name in names:
                yield from html_sections(decode(archive.read(name), path, notes), is_book=True)
            else:
                notes.append(f"a chapter of the book is missing: {name}")


def _spine(archive: zipfile.ZipFile, path: Path) -> list[str]:
    """The names of the chapters' files, in reading order."""
    package = archive_xml(archive, CONTAINER).find(".//{*}rootfile[@full-path]")
    if package is None:
        raise UnreadableDocumentError(f"Reading {path}: the book lists no chapters. Save it again as EPUB.")
    name = package.get("full-path", "")
    root = archive_xml(archive, name)
    items = {item.get("id"): item for item in root.iterfind(".//{*}item")}
    order = [items.get(reference.get("idref")) for reference in root.iterfind(".//{*}itemref")]
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(item.get("href", ""))))
        for item in order
        if item is not None
        and item.get("media-type", "").lower() in TEXT_TYPES
        and "nav" not in item.get("properties", "").split()  # the table of contents repeats the headings
    ]
