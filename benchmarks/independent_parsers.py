"""Reads files by other parsers than the product's, one for each format, as the reference of `measure_readers`."""

import codecs
import csv
import re
import unicodedata
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragblend.app.library.readers import clean
from ragblend.app.library.sandbox import OnPage

DOCX_PARTS = {"document", "footnotes", "endnotes", "comments", "hdr", "ftr"}
DOCX_LEFT_OUT = {"Fallback", "del", "moveFrom", "instrText", "delText", "rt"}
HIDDEN_TAGS = "script style title noscript template head iframe object datalist button".split()  # noqa: SIM905
WORDS = re.compile(r"\w+")
DIALECTS: dict[str, dict[str, Any]] = {
    "comma": {},
    "semicolon": {"delimiter": ";"},
    "tab": {"delimiter": "\t"},
    "pipe": {"delimiter": "|", "lineterminator": "\n"},
    "all quoted": {"quoting": csv.QUOTE_ALL},
    "single quotes": {"quotechar": "'"},
    "backslash": {"doublequote": False, "escapechar": "\\"},
}


def docx_text(path: Path) -> str:
    """The text elements of a DOCX's parts, without deleted text, and without text that stands in the file twice."""
    from lxml import etree

    texts = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if not name.endswith(".xml"):
                continue
            root = etree.fromstring(archive.read(name), etree.XMLParser(huge_tree=True))
            if etree.QName(root).localname in DOCX_PARTS:
                texts.append("".join(_docx_texts(root)))
    return "\n".join(texts)


def _docx_texts(root: Any) -> Iterator[str]:
    from lxml import etree

    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, str):
            yield node
            continue
        name = etree.QName(node).localname if isinstance(node.tag, str) else "del"
        if name in DOCX_LEFT_OUT:
            continue
        if name == "t":
            yield node.text or ""
        elif name in {"tab", "br", "cr"}:
            yield " "
        if name == "docPr":
            yield f" {node.get('descr', '')} "  # a picture's description
        if name in {"p", "tc", "oMath", "f", "num", "den", "sup", "sub", "e"}:
            stack.append("\n")
        stack += reversed(node)


def pdf_text(path: Path) -> str:
    """The text of a PDF by pdfminer."""
    from pdfminer.high_level import extract_text

    return re.sub(r"\(cid:\d+\)", "", extract_text(path))  # pdfminer's mark for a glyph without a letter


def html_text(markup: bytes | str) -> str:
    """The text of a page by html5lib, without what browsers do not show, and without menus."""
    from bs4 import BeautifulSoup

    from ragblend.app.library.html_text import MENUS

    tree = BeautifulSoup(markup, "html5lib")
    for hidden in tree(HIDDEN_TAGS) + tree.select(f"[hidden], annotation, annotation-xml, {MENUS}"):
        hidden.decompose()
    for menu in tree("select"):
        chosen = menu.find("option", selected=True) or menu.find("option")
        menu.replace_with(f"\n{chosen.get_text() if chosen else ''}\n")
    for picture in tree("img"):
        picture.replace_with(f" {picture.get('alt') or ''} ")
    for line_break in tree("br"):
        line_break.replace_with("\n")
    for tag in tree(re.compile("^(p|div|t[dhr]|li|h[1-6]|d[dt]|option|text|figcaption|caption|label)$")):
        tag.insert_before("\n")
        tag.insert_after("\n")
    return tree.get_text()


def epub_text(path: Path) -> str:
    """The text of the chapters of an EPUB, in any order."""
    from lxml import etree

    with zipfile.ZipFile(path) as archive:
        container = etree.fromstring(archive.read("META-INF/container.xml"))
        package = container.xpath("string(//*[local-name()='rootfile']/@full-path)")
        root = etree.fromstring(archive.read(package))
        listed = root.xpath(
            "//*[local-name()='item'][@id=//*[local-name()='itemref']/@idref]"
            "[not(contains(@properties, 'nav'))]/@href"
        )
        names = {(Path(package).parent / name.split("#")[0]).as_posix() for name in listed}
        chapters = [name for name in archive.namelist() if name in names and re.search(r"html?$", name)]
        return "\n".join(html_text(archive.read(name)) for name in chapters)


def encoded_text(path: Path) -> str:
    """The text of a file in the encoding that its name or its folder declares."""
    return path.read_bytes().decode(declared_encoding(path) or "", "strict")


def declared_encoding(path: Path) -> str | None:
    for name in (path.stem, path.parent.name):
        for length in range(4, 0, -1):
            pieces = re.split(r"[._-]", name.lower())
            name_of_encoding = "_".join(pieces[:length])
            try:
                return codecs.lookup(name_of_encoding).name
            except (LookupError, ValueError):
                continue
    return None


@dataclass(frozen=True)
class DocumentKind:
    suffixes: frozenset[str]
    text: Callable[[Path], str]


KINDS = {
    "docx": DocumentKind(frozenset({".docx"}), docx_text),
    "pdf": DocumentKind(frozenset({".pdf"}), pdf_text),
    "html": DocumentKind(frozenset({".html", ".htm", ".xhtml"}), lambda path: html_text(path.read_bytes())),
    "epub": DocumentKind(frozenset({".epub"}), epub_text),
    "encodings": DocumentKind(frozenset({".txt", ".srt", ".html", ".xml", ".smi"}), encoded_text),
    "csv": DocumentKind(frozenset({".csv", ".tsv"}), lambda path: "\n".join(csv_cells(path))),
}


def csv_cells(path: Path) -> list[str]:
    """The values of a CSV with their columns' names; the file's name begins with the name of its dialect."""
    dialect = DIALECTS[path.name.split("~")[0]]
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = [row for row in csv.reader(file, **dialect) if any(map(str.strip, row))]
    names = [" ".join(name.split()) for name in header]
    return [
        f"{name}: {value}" if name else value
        for row in rows
        for name, value in zip(names, (" ".join(value.split()) for value in row), strict=True)
        if value
    ]


def words_of(text: str) -> list[str]:
    """The words of a text, in NFKC and case-folded; words divided at line ends are joined."""
    folded = unicodedata.normalize("NFKC", clean(text)).casefold()
    return WORDS.findall(re.sub(r"(?<=\w)[-‐]\n(?=\w)", "", folded))


def expected(path: Path, kind: str, on_page: OnPage) -> list[str]:
    """What the independent parser reads: words, or the cells of a CSV. on_page: the sandbox passes it; unused."""
    text = KINDS[kind].text(path)
    return clean(text).split("\n") if kind == "csv" else words_of(text)
