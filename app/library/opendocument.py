"""Reads ODT and ODP: their XML is written as HTML, like that of DOCX. Notes and comments stand at their references."""

import re
from html import escape
from pathlib import Path
from xml.etree.ElementTree import Element

from ragblend.app.library.file_checks import archive_xml, local_name, open_archive
from ragblend.app.library.html_text import html_sections, in_line
from ragblend.app.library.word_numbering import child, value

TAGS = {"h": "h1", "p": "p", "list-item": "div", "text-box": "div", "table": "table", "table-row": "tr"}
TAGS |= {"table-cell": "td"}
AS_TEXT = {"s": " ", "tab": " ", "line-break": "<br>"}
NOTES = {"note-body", "annotation"}
# Deleted text, where a merged cell goes on, the number of a note, the reading of a Japanese word, the author and date
# of a comment.
LEFT_OUT = {"tracked-changes", "covered-table-cell", "sequence-decls", "note-citation", "ruby-text"}
LEFT_OUT |= {"sender-initials", "creator-initials", "date-string"}
LEFT_OUT |= {"{http://purl.org/dc/elements/1.1/}creator", "{http://purl.org/dc/elements/1.1/}date"}
SVG = "urn:oasis:names:tc:opendocument:xmlns:svg-compatible:1.0"  # whose names are those of text fields too
LEFT_OUT |= {f"{{{SVG}}}title", f"{{{SVG}}}desc"}
POSITION = re.compile("(?P<sub>sub|-)|super|[1-9]")  # of text, such as `super 58%` or `-33% 58%`


def opendocument_sections(path: Path) -> list[tuple[str, str]]:
    """(text, heading) of paragraphs, lists and table rows, split at headings."""
    with open_archive(path) as archive:
        content = archive_xml(archive, "content.xml")
        styles = list(content.iter())
        if "styles.xml" in archive.namelist():
            # Not its automatic styles, of headers, which may have the names of other ones in the content.
            styles += archive_xml(archive, "styles.xml").iterfind("{*}styles/*")
    marks = {
        value(style, "name"): "sub" if found["sub"] else "sup"
        for style in styles
        if (found := POSITION.match(value(child(style, "text-properties"), "text-position")))
    }
    out: list[str] = []
    _write(content, marks, out, False)
    return html_sections("".join(out))


def _write(node: Element, marks: dict[str, str], out: list[str], is_text: bool) -> None:
    """Write a node as HTML. is_text: whether it is inside a paragraph or heading; text elsewhere is not shown."""
    name = local_name(node)
    if name in LEFT_OUT or node.tag in LEFT_OUT or value(node, "display") == "none":
        return
    tag = TAGS.get(name) or (marks.get(value(node, "style-name")) if name == "span" else None)
    inside: list[str] = []
    is_text |= name in {"h", "p"}
    inside.append(escape(node.text or "") if is_text else "")
    for part in node:
        _write(part, marks, inside, is_text)
        inside.append(escape(part.tail or "") if is_text else "")
    if name in NOTES:
        out.append(f" ({in_line(''.join(inside))}) ")
    else:
        spans = "".join(
            f' {name}="{value(node, f"number-{what}-spanned")}"'
            for name, what in (("colspan", "columns"), ("rowspan", "rows"))
        )
        out += [
            f"<{tag}{spans if tag == 'td' else ''}>" if tag else AS_TEXT.get(name, ""),
            *inside,
            f"</{tag}>" if tag else "",
        ]
