"""Reads ODT and ODP: their XML is written as HTML, like that of DOCX. Notes and comments stand at their references."""

import re
from html import escape
from pathlib import Path
from xml.etree.ElementTree import Element

from ragblend.app.library.file_checks import archive_xml, open_archive
from ragblend.app.library.html_text import html_sections, inline_markup
from ragblend.app.library.xml_elements import local_name, xml_attribute, xml_child

TAGS = {"h": "h1", "p": "p", "list-item": "div", "text-box": "div", "table": "table", "table-row": "tr"}
TAGS |= {"table-cell": "td"}
AS_TEXT = {"s": " ", "tab": " ", "line-break": "<br>"}
NOTES = {"note-body", "annotation"}
# Deleted text, the cells that a merged cell covers, the number of a note, the reading of a Japanese word, the author
# and date of a comment.
LEFT_OUT = {"tracked-changes", "covered-table-cell", "sequence-decls", "note-citation", "ruby-text"}
LEFT_OUT |= {"sender-initials", "creator-initials", "date-string"}
LEFT_OUT |= {"{http://purl.org/dc/elements/1.1/}creator", "{http://purl.org/dc/elements/1.1/}date"}
SVG = "urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0"  # with the namespace: text fields have these names too
LEFT_OUT |= {f"{{{SVG}}}title", f"{{{SVG}}}desc"}
POSITION = re.compile("(?P<sub>sub|-)|super|[1-9]")  # of text, such as `super 58%` or `-33% 58%`


def opendocument_sections(path: Path) -> list[tuple[str, str]]:
    """(text, heading) of paragraphs, lists and table rows, split at headings."""
    with open_archive(path) as archive:
        content = archive_xml(archive, "content.xml")
        styles = list(content.iter())
        if "styles.xml" in archive.namelist():
            # Without its automatic styles, which headers use: the content may have other styles of these names.
            styles += archive_xml(archive, "styles.xml").iterfind("{*}styles/*")
    script_tags = {
        xml_attribute(style, "name"): "sub" if found["sub"] else "sup"
        for style in styles
        if (found := POSITION.match(xml_attribute(xml_child(style, "text-properties"), "text-position")))
    }
    out: list[str] = []
    _write(content, script_tags, out, False)
    return html_sections("".join(out))


def _write(node: Element, script_tags: dict[str, str], out: list[str], is_text: bool) -> None:
    """Write a node as HTML. is_text: whether it is inside a paragraph or heading; text elsewhere is not shown.

    script_tags: `sub` or `sup`, by the name of the style.
    """
    name = local_name(node)
    if name in LEFT_OUT or node.tag in LEFT_OUT or xml_attribute(node, "display") == "none":
        return
    tag = TAGS.get(name) or (script_tags.get(xml_attribute(node, "style-name")) if name == "span" else None)
    inside: list[str] = []
    is_text |= name in {"h", "p"}
    inside.append(escape(node.text or "") if is_text else "")
    for part in node:
        _write(part, script_tags, inside, is_text)
        inside.append(escape(part.tail or "") if is_text else "")
    if name in NOTES:
        out.append(f" ({inline_markup(''.join(inside))}) ")
    else:
        spans = _spans(node) if tag == "td" else ""
        out += [f"<{tag}{spans}>" if tag else AS_TEXT.get(name, ""), *inside, f"</{tag}>" if tag else ""]


def _spans(cell: Element) -> str:
    return "".join(
        f' {name}="{xml_attribute(cell, f"number-{what}-spanned")}"'
        for name, what in (("colspan", "columns"), ("rowspan", "rows"))
    )
