"""Converts HTML and EPUB chapters to sections of plain text, one block per line, tables included.

LlamaIndex's HTMLTagReader reads UTF-8 only and joins table cells without a space. EbookLib, which its EpubReader needs,
is AGPL, and gives chapters in file order without their headings.
"""

import posixpath
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from bs4 import BeautifulSoup, Tag, XMLParsedAsHTMLWarning
from bs4.element import CData, NavigableString, PreformattedString

from ragblend.app.library.file_checks import decode, open_archive
from ragblend.kvstore.errors import EncryptedDocumentError, UnreadableDocumentError

CONTAINER = "META-INF/container.xml"
TEXT_TYPES = {"application/xhtml+xml", "text/html"}
HIDDEN = set("button script style template noscript head svg math iframe object nav".split())  # noqa: SIM905
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
CELLS = {"td", "th"}
BLOCKS = HEADINGS | set(
    """address article aside blockquote br body caption dd details div dl dt fieldset figcaption figure footer form
    header hr html legend li main ol option p pre section summary table tbody tfoot thead title tr ul""".split()  # noqa: SIM905
)


@dataclass
class Section:
    """A heading ("" before the first) and the text from it to the next heading, the heading included."""

    heading: str
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        lines = (re.sub(r"[ \t\r\f\v]+", " ", line).strip(" |") for line in "".join(self.pieces).split("\n"))
        return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def html_sections(markup: str) -> list[Section]:
    """The text of a page, split at its headings, without scripts, styles and navigation."""
    with warnings.catch_warnings():  # EPUB chapters are XHTML: good enough as HTML
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        soup = BeautifulSoup(markup, "html.parser")
    sections = [Section("")]
    _walk(soup, sections)
    return [section for section in sections if section.text]


def _walk(root: Tag, sections: list[Section]) -> None:
    """Walk depth first with an explicit stack: a page nested ten thousand deep must not overflow Python's."""
    stack: list[Tag | NavigableString | str] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Tag):
            _open(node, sections, stack)
        # A PreformattedString is a comment, a doctype or an instruction.
        elif isinstance(node, CData) or not isinstance(node, PreformattedString):
            is_ours = isinstance(node, _Edge)
            sections[-1].pieces.append(str(node) if is_ours else re.sub(r"\s+", " ", str(node)))


def _open(tag: Tag, sections: list[Section], stack: list[Tag | NavigableString | str]) -> None:
    if tag.name in HIDDEN or tag.has_attr("hidden"):
        return
    if tag.name in HEADINGS:
        sections.append(Section(" ".join(tag.get_text(" ").split())))
    before, after = _edges(tag.name)
    children = [child for child in tag.children if isinstance(child, Tag | NavigableString)]
    stack.extend([_Edge(after), *reversed(children), _Edge(before)])


def _edges(name: str) -> tuple[str, str]:
    if name in CELLS:
        return "", " | "
    if name == "li":
        return "\n- ", ""
    if name in {"p", "table", "ul", "ol", *HEADINGS}:
        return "\n\n", "\n\n"
    return ("\n", "\n") if name in BLOCKS else ("", "")


class _Edge(str):
    """Line ends and separators that we add: kept as they are, unlike the page's own white space."""


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
    found = re.search(r"<title[^>]*>(.*?)</title>", markup, re.IGNORECASE | re.DOTALL)
    title = " ".join(found.group(1).split()) if found else ""
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
