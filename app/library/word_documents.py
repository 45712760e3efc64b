"""Reads DOCX and PPTX: their XML is written as HTML, whatever its namespaces (also Strict's) and the names of parts.

Notes and comments are written directly after their references, so that a passage has both. mammoth was rejected: it
took five times as long, and reads neither formulas, headers, text boxes nor embedded documents: preparing its input for
that took as much code as this.
"""

import posixpath
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from html import escape
from itertools import chain, groupby
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

from ragblend.app.library.documents import note_names
from ragblend.app.library.encodings import REPLACEMENT, decode
from ragblend.app.library.file_checks import archive_xml, open_archive
from ragblend.app.library.html_text import CONTINUES_ABOVE, KEPT_SPACE, html_sections, inline_markup
from ragblend.app.library.numerals import parse_number
from ragblend.app.library.word_numbering import Numbering
from ragblend.app.library.xml_elements import child_val, local_name, xml_attribute, xml_child
from ragblend.kvstore.errors import UnreadableDocumentError

TAGS = {"p": "p", "tbl": "table", "tr": "tr", "tc": "td"}
# The namespace of texts in slides, charts and diagrams.
DRAWING = re.compile(r"\{[^}]*/drawingml/(2006/)?main\}")
AS_TEXT = {"tab": " ", "ptab": " ", "br": "<br>", "cr": "<br>", "noBreakHyphen": "-"}
# Deleted or moved text, the reading of a Japanese word, and properties.
LEFT_OUT = {"del", "moveFrom", "rt", "sectPr", "pPr", "rPr", "tblPr", "tcPr", "trPr"}
NOTES = {"footnoteReference": "footnotes", "endnoteReference": "endnotes", "commentReference": "comments"}
SCRIPT_TAGS = {"superscript": "sup", "subscript": "sub"}
EMBEDDED = {"OLEObject", "oleObj", "objectEmbed", "objectLink"}  # the last two in ISO Strict
TRUE_VALUES = {"1", "true"}
RELATED = {"altChunk", "relIds", *EMBEDDED}
NEWER_CHART = re.compile(r"\{[^}]*/chartex\}")  # such as a waterfall or a map
# Boxes, ticks and arrows of symbol fonts, by the last byte of their code. Those of the font Symbol are in pypdf.
SYMBOLS = {
    "Wingdings": {0x6F: "☐", 0x78: "☒", 0xA8: "☐", 0xE0: "→", 0xFB: "✗", 0xFC: "✓", 0xFD: "☒", 0xFE: "☑"}
    | {0x71: "❑", 0x76: "❖", 0xA7: "▪", 0xD8: "➢"},
    "Wingdings 2": {0x4F: "✗", 0x50: "✓", 0x52: "☑", 0x54: "☒", 0xA3: "☐"},
}
HEADING = re.compile("(heading|title)\\b", re.IGNORECASE)
# Parts without text, and those that are read where another part refers to them.
WITHOUT_TEXT = re.compile(
    "^ppt/|theme|settings|fonttable|customxml|docprops|charts|diagrams|embeddings|glossary", re.IGNORECASE
)
INDENTATION = re.compile(r"(?<=<dd>|<br>)[ \t]+|[ \t]{2,}")  # of code on a slide; HTML would lose it
# Office Math in MathML, by the names of its elements; `all` are the parts of an element.
MATH_NAMES = {"f": "mfrac", "sSup": "msup", "sSub": "msub", "sSubSup": "msubsup", "limLow": "munder"}
MATH_NAMES |= {"limUpp": "mover", "m": "mtable", "mr": "mtr"}
MATH_NAMES |= dict.fromkeys(("num", "den", "e", "sub", "sup", "deg", "lim", "fName"), "mrow")
MATH = {name: f"<{tag}>{{all}}</{tag}>" for name, tag in MATH_NAMES.items()} | {
    "nary": "<munderover><mo>{chr}</mo>{sub}{sup}</munderover>{e}",
    "sPre": "<msubsup>{none}{sub}{sup}</msubsup>{e}",
    "rad": "<mroot>{e}{deg}</mroot>",
    "sqrt": "<msqrt>{e}</msqrt>",  # our own name of a root without a degree
    "func": "{fName} {e}",
    "d": "{begChr}{all}{endChr}",
}
MATH_DEFAULTS = {"chr": "∫", "begChr": "(", "endChr": ")"}
MATH_DEFAULTS |= dict.fromkeys(("none", "sub", "sup", "deg", "e", "fName"), "<mrow></mrow>")
MATH_SEPARATORS = {"eqArr": "; ", "d": ", "}
Relations = dict[str, str]  # the members that a part of an archive refers to, by the ids of these relations


def docx_sections(path: Path, notes: list[str]) -> list[tuple[str, str]]:
    """(text, heading) of a DOCX. notes: gets a sentence that names what is embedded. Raises DocumentError."""
    with open_archive(path) as archive:
        document = _OfficeDocument(archive)
        html = document.word_html(path)
        note_names(notes, "what is embedded was not read", sorted(document.left_out))
        fonts = sorted(document.unknown_fonts)
        note_names(notes, f"signs of these fonts were replaced by {REPLACEMENT}", fonts)
        return html_sections(html)


def pptx_slides(path: Path, notes: list[str]) -> Iterator[tuple[str, str]]:
    """Each slide's texts, tables, charts, diagrams and notes. notes: gets sentences that name the slides that are not
    read. Raises DocumentError.
    """
    unread, empty = list[str](), list[str]()
    with open_archive(path) as archive:
        document = _OfficeDocument(archive)
        (main,) = _relations(archive, "", "officeDocument").values()
        slides = _relations(archive, main, "/slide")
        listed = [each.attrib.values() for each in archive_xml(archive, main).iterfind(".//{*}sldId")]
        names = [slides[id_] for id_ in chain.from_iterable(listed) if id_ in slides]
        for at, name in enumerate(names, start=1):
            texts = [document.part_text(name)]
            for notes_page in _relations(archive, name, "notesSlide").values():
                texts += [f"Notes: {text}"] if (text := document.part_text(notes_page)) else []
            unread += [str(at)] if document.left_out else []
            empty += [] if any(texts) else [str(at)]
            document.left_out.clear()
            yield "\n".join(texts).strip(), f"slide {at}"
    note_names(notes, "charts or objects on these slides were not read", unread)
    note_names(notes, "these slides have no text, and were left out", empty)


def _relations(archive: zipfile.ZipFile, part: str, kind: str = "") -> Relations:
    """The relations of a part of a package, or of the package (""); of one kind, or all."""
    folder, name = posixpath.split(part)
    listed = posixpath.join(folder, "_rels", f"{name}.rels")
    items = archive_xml(archive, listed) if listed in archive.namelist() else ()
    of_kind = (item for item in items if item.get("Type", "").endswith(kind))
    found = {item.get("Id", ""): posixpath.join("/", folder, item.get("Target", "")) for item in of_kind}
    return {id_: posixpath.normpath(target)[1:] for id_, target in found.items()}


class _OfficeDocument:
    """The parts of a DOCX by the names of their root elements; those of a PPTX are read one by one."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._parts = defaultdict[str, list[tuple[Element, Relations]]](list)
        for name in archive.namelist():
            if name.lower().endswith(".xml") and not WITHOUT_TEXT.search(name):
                root = archive_xml(archive, name)
                self._parts[local_name(root)].append((root, _relations(archive, name)))
        self.left_out, self.unknown_fonts = set[str](), set[str]()
        styles = [each for each, _ in self._children("styles") if local_name(each) == "style"]
        self._styles = {xml_attribute(style, "styleId"): style for style in styles}
        self._numbering = Numbering(element for element, _ in self._children("numbering"))
        self._notes = {
            (kind, xml_attribute(note, "id")): (note, relations)
            for kind in NOTES.values()
            for note, relations in self._children(kind)
        }

    def _children(self, kind: str) -> list[tuple[Element, Relations]]:
        return [(each, relations) for root, relations in self._parts[kind] for each in root]

    def word_html(self, path: Path) -> str:
        """Headers, the body and footers, each part once. Raises DocumentError."""
        if not self._parts["document"]:
            raise UnreadableDocumentError(f"Reading {path}: it has no text part. Save it again in Word.")
        out = [self._html(*part) for kind in ("hdr", "document", "ftr") for part in self._parts[kind]]
        while self._notes:  # the remaining ones, to which nothing refers, unless another of them does
            out.append(self._html(*self._notes.pop(next(iter(self._notes)))))
        return "".join(out)

    def part_text(self, name: str) -> str:
        """The text of a slide, or of its notes; without the picture and number on a page of notes."""
        root, relations = archive_xml(self._archive, name), _relations(self._archive, name)
        shapes = [each for each in root.iter() if local_name(each) == "sp"]
        notes = [sp for sp in shapes if any(xml_attribute(each, "type") == "body" for each in sp.iter())]
        nodes = notes if local_name(root) == "notes" else [root]
        html = "".join(self._html(node, relations) for node in nodes)
        html = INDENTATION.sub(lambda found: found[0].replace("\t", " " * 4).replace(" ", KEPT_SPACE), html)
        return "\n\n".join(text for text, _ in html_sections(html)).strip()

    def _html(self, node: Element, relations: Relations) -> str:
        """A part, or an element of it, with the relations of that part."""
        name = local_name(node)
        if name in LEFT_OUT or (name == "tc" and xml_attribute(node, "hMerge") in TRUE_VALUES):
            for each in node.iter() if name == "del" else ():  # its notes are deleted, too
                self._notes.pop((NOTES.get(local_name(each), ""), xml_attribute(each, "id")), None)
            return ""
        if name == "t" and not len(node):  # of a diagram, `t` has paragraphs
            return escape(node.text or "")
        if name in AS_TEXT:
            return AS_TEXT[name]
        if name == "oMath":
            return _formula(node)
        if note := self._notes.pop((NOTES.get(name, ""), xml_attribute(node, "id")), None):
            return f" ({inline_markup(self._html(*note))}) "
        if name == "sym" and (code := xml_attribute(node, "char")):  # on a slide, `sym` is the name of a font
            sign = font_character(font := xml_attribute(node, "font"), int(code, 16))
            self.unknown_fonts |= set() if sign else {font}
            return escape(sign or REPLACEMENT)
        if name == "ddList":  # of a form: what is chosen in a list
            entries = [xml_attribute(each, "val") for each in node if local_name(each) == "listEntry"]
            chosen = parse_number(child_val(node, "result") or child_val(node, "default"), 0)
            return escape("".join(entries[chosen : chosen + 1]))
        if name == "docPr":  # of a picture
            return f" {escape(node.get('descr', ''))} "
        if _is_related(node):
            return self._related_html(node, relations)
        if name.endswith("Chart") and xml_child(node, "ser") is not None:
            return _chart_tables(node)
        if name == "AlternateContent" and len(node):
            html = self._html(next(filter(_has_content, node), node[0]), relations)
            return html if inline_markup(html) else ""  # an empty box would divide a paragraph
        tag, label = self._tag(node, name)
        content = f"{escape(label)} " * bool(label) + "".join(self._html(each, relations) for each in node)
        return f"<{tag}{_spans(node) if name == 'tc' else ''}>{content}</{tag}>" if tag else content

    def _tag(self, node: Element, name: str) -> tuple[str, str]:
        """The HTML tag for an element, and the label of a numbered paragraph; "" for none."""
        properties = xml_child(node, f"{name}Pr")
        if name == "r":
            return self._script_tag(properties) if xml_child(node, "t") is not None else "", ""
        if name != "p":
            return TAGS.get(name, ""), ""
        if DRAWING.match(node.tag):
            return "dd", ""  # a line
        mark = xml_child(properties, "rPr")  # of the paragraph's end
        if xml_child(mark, "del", "moveFrom") is not None:  # the paragraph is not counted
            return "p", ""
        styles, ids = [properties], [child_val(properties, "pStyle")]
        while (style := self._styles.get(ids[-1])) is not None and len(ids) < 10:  # based on each other
            styles += [style, xml_child(style, "pPr")]
            ids.append(child_val(style, "basedOn"))
        lists = [xml_child(each, "numPr") for each in styles]
        values = ([child_val(each, key) for each in lists] for key in ("numId", "ilvl"))
        list_id, level = (next(filter(None, each), "") for each in values)
        label = self._numbering.next_label(list_id, level, ids)
        has_text = any(local_name(each) == "t" and (each.text or "").strip() for each in node.iter())
        levels, names = ({child_val(each, key) for each in styles} for key in ("outlineLvl", "name"))
        if has_text and (levels & set("012345678") or any(map(HEADING.match, names))):
            return "h1", label
        if label:
            return "div", label if has_text else ""
        return "li" if any(each is not None for each in lists) and list_id != "0" else "p", ""

    def _script_tag(self, properties: Element | None) -> str:
        """`sub` or `sup` for a run of text with these properties, or ""."""
        # Of a slide's text, such as `30%` or `-25000`.
        if shift := xml_attribute(properties, "baseline").strip("0%"):
            return "sub" if shift[0] == "-" else "sup"
        style = xml_child(self._styles.get(child_val(properties, "rStyle")), "rPr")
        aligned = (xml_child(each, "vertAlign") for each in (properties, style))
        found = next((each for each in aligned if each is not None), None)
        return SCRIPT_TAGS.get(xml_attribute(found, "val"), "")

    def _related_html(self, node: Element, relations: Relations) -> str:
        """Another part: a chart, a diagram, an embedded document of HTML or plain text."""
        name = next((target for id_ in node.attrib.values() if (target := relations.get(id_))), "")
        kind = posixpath.splitext(name.lower())[1]
        if name in self._archive.namelist() and local_name(node) not in EMBEDDED:
            with suppress(ParseError, ValueError):  # broken, or with entities
                root = archive_xml(self._archive, name) if kind == ".xml" else None
                if root is not None and not NEWER_CHART.match(root.tag):
                    # Without its relations: parts that refer to each other would be read forever.
                    return self._html(root, {})
            if kind in {".htm", ".html", ".xhtml", ".txt"}:
                text = decode(self._archive.read(name), Path(name))
                return f"<pre>{escape(text)}</pre>" if kind == ".txt" else f"<div>{text}</div>"
        self.left_out.add(name or "a part that is missing")
        return ""


def _is_related(node: Element) -> bool:
    """Whether an element stands for another part of the document."""
    return local_name(node) in RELATED or (local_name(node) == "chart" and not len(node))


def _has_content(choice: Element) -> bool:
    """Whether one form of alternative content has any text, or refers to another part. Writing it to see would change
    the numbers of the following paragraphs.
    """
    return any(
        _is_related(each) or local_name(each) in {"ddList", "sym", *NOTES} or each.get("descr", "").strip()
        or (local_name(each) == "t" and (each.text or "").strip())
        for each in choice.iter()
    )  # fmt: skip


def _spans(cell: Element) -> str:
    """Attributes for `html_text`: how many columns a cell spans, and whether it continues the cell above it."""
    properties = xml_child(cell, "tcPr")
    width = xml_attribute(cell, "gridSpan") or child_val(properties, "gridSpan")
    merged = xml_child(properties, "vMerge")
    continues_above = merged is not None and xml_attribute(merged, "val") != "restart"
    continues_above |= xml_attribute(cell, "vMerge") in TRUE_VALUES  # on a slide
    return f' colspan="{width}" rowspan="{CONTINUES_ABOVE if continues_above else 1}"'


def _chart_tables(plot: Element) -> str:
    """The categories or x values of a chart, with the values of each series. Series with other x values get a table of
    their own.
    """
    html, every = "", [each for each in plot if local_name(each) == "ser"]
    for x_values, group in groupby(every, key=lambda each: _points(xml_child(each, "xVal"))):
        series = list(group)
        columns = [x_values or _points(xml_child(series[0], "cat"))]
        columns += [_points(xml_child(each, "val", "yVal"), is_number=True) for each in series]
        rows = [["", *(_points(xml_child(each, "tx")).get(0, "") for each in series)]]
        rows += [[each.get(at, "") for each in columns] for at in sorted(set[int]().union(*columns))]
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
        html += f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
    return html


def _points(node: Element | None, is_number: bool = False) -> dict[int, str]:
    """The texts of a chart's points by their numbers; of several levels of categories only the first, the lowest."""
    found = dict[int, str]()
    for point in node.iter() if node is not None else ():
        if (value := xml_child(point, "v")) is not None:
            text = value.text or ""
            with suppress(ValueError):
                text = f"{float(text):.15g}" if is_number else text
            found.setdefault(parse_number(xml_attribute(point, "idx"), 0), text)
    return found


def font_character(font: str, code: int) -> str:
    """The Unicode character of a code in a symbol font, or in any other font; "" if it is not known."""
    from pypdf._codecs import charset_encoding

    if font == "Symbol":
        return charset_encoding["/Symbol"][code & 0xFF].strip("\0")
    if font in SYMBOLS:
        return SYMBOLS[font].get(code & 0xFF, "")
    return "" if 0xE000 <= code < 0xF900 else chr(code)  # private-use characters of an unknown font


def _formula(element: Element) -> str:
    """Office Math as MathML."""
    name = local_name(element)
    if name == "t":
        return escape(element.text or "")
    parts = [(local_name(part), _formula(part)) for part in element]
    settings = [each for part in element if local_name(part) == f"{name}Pr" for each in part]
    signs = {local_name(each): escape(xml_attribute(each, "val")) for each in settings}
    everything = MATH_SEPARATORS.get(name, "").join(html for part, html in parts if not part.endswith("Pr"))
    values = MATH_DEFAULTS | signs | dict(parts) | {"all": everything}
    name = "sqrt" if name == "rad" and values["deg"] == MATH_DEFAULTS["deg"] else name
    return MATH.get(name, "{all}").format_map(values)
