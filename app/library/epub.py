"""Reads EPUB: the chapters in the order of the book's spine, each as HTML.

EbookLib is AGPL, and gives chapters in file order without their headings.
"""

import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from ragblend.app.library.encodings import decode
from ragblend.app.library.file_checks import open_archive
from ragblend.app.library.html_text import Section, html_sections, html_title
from ragblend.kvstore.errors import EncryptedDocumentError, UnreadableDocumentError

CONTAINER = "META-INF/container.xml"
TEXT_TYPES = {"application/xhtml+xml", "text/html"}


def epub_chapters(path: Path) -> Iterator[Section]:
    """The text of the book by chapter; one that the spine names twice is read once. Raises DocumentError."""
    with open_archive(path) as archive:
        names = set(archive.namelist())
        if "META-INF/encryption.xml" in names and "META-INF/rights.xml" in names:
            raise EncryptedDocumentError(
                f"Reading {path}: the book has copy protection, so its text cannot be read."
            )
        for name in dict.fromkeys(_spine(archive, path)):
            if name in names:
                yield from _chapter(decode(archive.read(name), path))


def _chapter(markup: str) -> Iterator[Section]:
    title = html_title(markup)
    for section in html_sections(markup):
        section.heading = section.heading or title
        yield section


def _spine(archive: zipfile.ZipFile, path: Path) -> list[str]:
    package = _package_name(archive, path)
    root = _xml(archive, package)
    folder = posixpath.dirname(package)
    items = {item.get("id"): item for item in root.iter() if _local(item) == "item"}
    order = [items.get(ref.get("idref")) for ref in root.iter() if _local(ref) == "itemref"]
    return [
        posixpath.normpath(posixpath.join(folder, unquote(item.get("href", ""))))
        for item in order
        if item is not None and item.get("media-type") in TEXT_TYPES
    ]


def _package_name(archive: zipfile.ZipFile, path: Path) -> str:
    for element in _xml(archive, CONTAINER).iter():
        if _local(element) == "rootfile" and element.get("full-path"):
            return str(element.get("full-path"))
    raise UnreadableDocumentError(f"Reading {path}: the book has no list of chapters. Save it again as EPUB.")


def _xml(archive: zipfile.ZipFile, name: str) -> Element:
    from defusedxml.ElementTree import fromstring  # no entities, so no billion laughs and no outside files

    root: Element = fromstring(archive.read(name))
    return root


def _local(element: Element) -> str:
    return element.tag.rsplit("}", 1)[-1]
