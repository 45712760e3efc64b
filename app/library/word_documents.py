"""Reads DOCX: its XML is written as HTML, whatever its namespaces (Word's, Strict's) and the names of its parts.

Notes and comments stand behind their references, so that a passage has both. mammoth took five times as long, and knows
neither formulas, headers, text boxes of drawings nor embedded documents: as much code prepared its input.
"""

import posixpath
import re
import zipfile
from collections import defaultdict
from html import escape
from pathlib import Path
from xml.etree.ElementTree import Element

from ragblend.app.library.documents import shortened
from ragblend.app.library.encodings import REPLACED, decode
from ragblend.app.library.file_checks import archive_xml, local_name, open_archive
from ragblend.app.library.html_text import html_sections, needs_brackets
from ragblend.app.library.word_numbering import Numbering, child, number, value
from ragblend.kvstore.errors import UnreadableDocumentError

TAGS = {"p": "p", "tbl": "table", "tr": "tr", "tc": "td"}
AS_TEXT = {"tab": " ", "ptab": " ", "br": "<br>", "cr": "<br>", "noBreakHyphen": "-"}
# Deleted or moved away, the reading of a Japanese word, the definition of a box's place.
LEFT_OUT = {"del", "moveFrom", "rt", "sectPr", "pPr", "rPr", "tblPr", "tcPr", "trPr"}
NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes", "commentReference": "comments"}
MARKS = {"superscript": "sup", "subscript": "sub"}
SPANS = "spans"  # an attribute of ours
# By the last byte of their code: boxes, ticks and arrows. Symbol's are those of the PDF font of that name.
SIGNS = {
    "Wingdings": {0x6F: "☐", 0x78: "☒", 0xA8: "☐", 0xE0: "→", 0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☑"}
    | {0x71: "❑", 0x76: "❖", 0xA7: "▪", 0xD8: "➢"},
    "Wingdings 2": {0x4F: "✗", 0x50: "✓", 0x52: "☑", 0x54: "☒", 0xA3: "☐"},
}
HEADING = re.compile("(heading|title)\\b", re.IGNORECASE)
WITHOUT_TEXT = re.compile(
    r"theme|settings|fonttable|customxml|docprops|charts|diagrams|embeddings|glossary", re.IGNORECASE
)
RELATIONS = re.compile(r"word/_rels/document\d*\.xml\.rels$")
EMBEDDED = re.compile(r"word/(charts/chart|diagrams/data|embeddings/)[^/]*$")
# Of Office Math: how the arguments of an element are written, and what stands between those of others.
PATTERNS = {
    "f": "{}/{}",
    "sSup": "{}^{}",
    "sSub": "{}_{}",
    "sSubSup": "{}_{}^{}",
    "sPre": "_{}^{} {}",
    "func": "{} {}",
    "limLow": "{} {}",
    "limUpp": "{} {}",
}
SIGNS_OF_LIMITS = {"sub": "_", "sup": "^"}
ROWS = {"m": "; ", "mr": ", ", "eqArr": "; "}


def docx_sections(path: Path, notes: list[str]) -> list[tuple[str, str]]:
    """(text, heading) of a DOCX. notes: gets a sentence that names what is embedded. Raises DocumentError."""
    with open_archive(path) as archive:
        document = _WordDocument(archive, path)
        html = document.html()
        if document.left_out:
            notes.append(f"what is embedded was not read: {shortened(sorted(document.left_out))}")
        if document.unread_fonts:
            fonts = shortened(sorted(document.unread_fonts))
            notes.append(f"signs of these fonts were replaced by {REPLACED}: {fonts}")
        return html_sections(html)


class _WordDocument:
    """The parts of a package by the names of their elements."""

    def __init__(self, archive: zipfile.ZipFile, path: Path) -> None:
        self._archive, self._path = archive, path
        self._parts = defaultdict[str, list[tuple[str, Element]]](list)
        for name in archive.namelist():
            if name.lower().endswith(".xml") and not WITHOUT_TEXT.search(name):
                root = archive_xml(archive, name)
                self._parts[local_name(root)].append((name, root))
        self.left_out = {name for name in archive.namelist() if EMBEDDED.match(name)}
        self.unread_fonts = set[str]()
        self._styles = {
            value(style, "styleId"): style
            for style in self._children("styles")
            if local_name(style) == "style"
        }
        self._numbering = Numbering(self._children("numbering"))
        self._notes = {
            (kind, value(note, "id")): note for kind in NOTES.values() for note in self._children(kind)
        }
        self._chunks = {
            item.get("Id"): posixpath.normpath(posixpath.join("/word", item.get("Target", ""))).lstrip("/")
            for name in archive.namelist()
            if RELATIONS.match(name)
            for item in archive_xml(archive, name)
        }

    def html(self) -> str:
        """Headers, the body and footers, each part once."""
        if not self._parts["document"]:
            raise UnreadableDocumentError(
                f"Reading {self._path}: it has no text part. Save it again in Word."
            )
        out: list[str] = []
        for kind in ("hdr", "document", "ftr"):
            for _, root in self._parts[kind]:
                self._write(root, out)
        for note in self._notes.values():  # to which nothing refers
            self._write(note, out)
        return "".join(out)

    def _children(self, kind: str) -> list[Element]:
        return [child for _, root in self._parts[kind] for child in root]

    def _write(self, node: Element, out: list[str]) -> None:
        name = local_name(node)
        if name in LEFT_OUT:
            if name == "del":  # with its notes
                for each in node.iter():
                    self._notes.pop((NOTES.get(local_name(each), ""), value(each, "id")), None)
            return
        if name == "t":
            out.append(escape(node.text or ""))
        elif name in AS_TEXT:
            out.append(AS_TEXT[name])
        elif name == "oMath":
            out.append(escape(office_formula(node)))
        elif name in NOTES and (note := self._notes.pop((NOTES[name], value(node, "id")), None)) is not None:
            inside: list[str] = []
            self._write(note, inside)
            out.append(f" ({' '.join(re.sub('<[^>]+>', ' ', ''.join(inside)).split())}) ")
        elif name == "sym":
            font, code = value(node, "font"), int(value(node, "char") or "0", 16)
            sign = font_sign(font, code)
            self.unread_fonts |= set() if sign else {font}
            out.append(escape(sign or REPLACED))
        elif name == "ddList":  # of a form: what is chosen in a list
            entries = [value(each, "val") for each in node if local_name(each) == "listEntry"]
            chosen = number(value(child(node, "result"), "val") or value(child(node, "default"), "val"), 0)
            out.append(escape("".join(entries[chosen : chosen + 1])))
        elif name == "docPr":  # of a picture
            out.append(f" {escape(node.get('descr', ''))} ")
        elif name == "altChunk":
            out.append(self._chunk(node))
        elif name == "AlternateContent":
            choices = (choice for choice in node if "".join(choice.itertext()).strip())
            for choice in [next(choices, node[0])] if len(node) else []:
                self._write(choice, out)
        else:
            tag, label = self._tag(node, name)
            if name == "tbl":
                _name_spans(node)
            out.append(f"<{tag}{node.get(SPANS, '')}>" if tag else "")
            out.append(f"{escape(label)} " if label else "")
            for part in node:
                self._write(part, out)
            out.append(f"</{tag}>" if tag else "")

    def _tag(self, node: Element, name: str) -> tuple[str | None, str]:
        """The HTML element of an element, if it has one, and the number of a numbered paragraph."""
        properties = child(node, f"{name}Pr")
        if name == "r":
            style = child(self._styles.get(value(child(properties, "rStyle"), "val")), "rPr")
            found = next(
                (f for each in (properties, style) if (f := child(each, "vertAlign")) is not None), None
            )
            return MARKS.get(value(found, "val")) if child(node, "t") is not None else None, ""
        if name != "p":
            return TAGS.get(name), ""
        mark = child(properties, "rPr")
        # Deleted or moved away: it is no paragraph, and has no number.
        if child(mark, "del") is not None or child(mark, "moveFrom") is not None:
            return "p", ""
        styles, ids = [properties], [value(child(properties, "pStyle"), "val")]
        while (style := self._styles.get(ids[-1])) is not None and len(ids) < 10:  # based on each other
            styles += [style, child(style, "pPr")]
            ids.append(value(child(style, "basedOn"), "val"))
        is_heading = any(
            value(child(each, "outlineLvl"), "val") in set("012345678")
            or HEADING.match(value(child(each, "name"), "val"))
            for each in styles
        )
        lists = [found for each in styles if (found := child(each, "numPr")) is not None]
        numbered = {
            key: next((name for each in lists if (name := value(child(each, key), "val"))), "")
            for key in ("numId", "ilvl")
        }
        label = self._numbering.next_label(numbered["numId"], numbered["ilvl"], ids)
        has_text = any(local_name(each) == "t" and (each.text or "").strip() for each in node.iter())
        if is_heading and has_text:
            return "h1", label
        if not lists or numbered["numId"] == "0":
            return "p", ""
        return ("div", label if has_text else "") if label else ("li", "")

    def _chunk(self, node: Element) -> str:
        """The HTML of an embedded document: of HTML and plain text."""
        target = next((self._chunks[value] for value in node.attrib.values() if value in self._chunks), "")
        if target in self._archive.namelist() and target.lower().endswith(
            (".htm", ".html", ".xhtml", ".txt")
        ):
            text = decode(self._archive.read(target), self._path)
            return f"<pre>{escape(text)}</pre>" if target.lower().endswith(".txt") else f"<div>{text}</div>"
        self.left_out.add(target or "a part that is missing")
        return ""


def _name_spans(table: Element) -> None:
    """Write the columns and rows that cells span as HTML's attributes, and remove cells that go on one above."""
    above = dict[int, tuple[Element, int, int]]()  # by column: a cell, its width and height
    for row in (each for each in table if local_name(each) == "tr"):
        column = 0
        for cell in [each for each in row if local_name(each) == "tc"]:
            properties = child(cell, "tcPr")
            span, merged = value(child(properties, "gridSpan"), "val"), child(properties, "vMerge")
            origin, width, height = cell, number(span, 1), 1
            if merged is not None and value(merged, "val") != "restart" and column in above:
                row.remove(cell)
                origin, width, height = above[column]
                height += 1
            above[column] = origin, width, height
            origin.set(SPANS, f' colspan="{width}" rowspan="{height}"')
            column += width


def font_sign(font: str, code: int) -> str:
    """A character of a font whose letters are signs, or of any other font; "" if it is not known."""
    from pypdf._codecs import charset_encoding

    if font == "Symbol":
        return charset_encoding["/Symbol"][code & 0xFF].strip("\0")
    return SIGNS[font].get(code & 0xFF, "") if font in SIGNS else "" if 0xE000 <= code < 0xF900 else chr(code)


def office_formula(element: Element) -> str:
    """Office Math as one line: `(a+b)/c`, `x^2`, `√(2)`."""
    name = local_name(element)
    if name == "t":
        return element.text or ""
    found = [
        (local_name(part), text)
        for part in element
        if not local_name(part).endswith("Pr")
        if (text := office_formula(part))
    ]
    parts = [text for _, text in found]
    terms = [f"({text})" if needs_brackets(text) else text for text in parts]
    settings = child(element, f"{name}Pr")
    if name in PATTERNS and len(terms) == PATTERNS[name].count("{}"):
        return PATTERNS[name].format(*terms)
    if name == "rad" and parts:  # other roots are powers
        return f"√({parts[-1]})" if len(parts) < 2 else f"({parts[-1]})^(1/{terms[0]})"
    if name == "nary":
        sign = _setting(settings, "chr", "∫")
        return sign + "".join(
            SIGNS_OF_LIMITS.get(kind, " ") + term for (kind, _), term in zip(found, terms, strict=True)
        )
    if name == "d":
        return f"{_setting(settings, 'begChr', '(')}{', '.join(parts)}{_setting(settings, 'endChr', ')')}"
    text = ROWS.get(name, "").join(parts)
    return f"[{text}]" if name == "m" else text


def _setting(settings: Element | None, name: str, default: str) -> str:
    found = child(settings, name)
    return default if found is None else value(found, "val")
