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
DUBLIN_CORE, SVG = (
    "http://purl.org/dc/elements/1.1/",
    "urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0",
)
# With the namespace: text fields have these names, too.
LEFT_OUT |= {f"{{{DUBLIN_CORE}}}creator", f"{{{DUBLIN_CORE}}}date", f"{{{SVG}}}title", f"{{{SVG}}}desc"}
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
    return html_sections(_html(content, script_tags, False))


def _html(node: Element, script_tags: dict[str, str], is_text: bool) -> str:
    """A node as HTML. is_text: whether it is inside a paragraph or heading; text elsewhere is not shown.

    script_tags: `sub` or `sup`, by the name of the style.
    """
    name = local_name(node)
    if name in LEFT_OUT or node.tag in LEFT_OUT or xml_attribute(node, "display") == "none":
        return ""
    is_text |= name in {"h", "p"}
    inside = escape(node.text or "") * is_text
    for part in node:
        inside += _html(part, script_tags, is_text) + escape(part.tail or "") * is_text
    if name in NOTES:
        return f" ({inline_markup(inside)}) "
    tag = TAGS.get(name) or (script_tags.get(xml_attribute(node, "style-name")) if name == "span" else None)
    if tag is None:
        return AS_TEXT.get(name, "") + inside
    columns, rows = (xml_attribute(node, f"number-{what}-spanned") for what in ("columns", "rows"))
    return f'<{tag} colspan="{columns}" rowspan="{rows}">{inside}</{tag}>'
