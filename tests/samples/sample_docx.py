"""Lays a sample source out as a Word document.

The same source gives the same document: the dates in its properties come from the source, and the zip
members, whose time stamps python-docx takes from the clock, are written again with a fixed one.
"""

import io
import zipfile
from datetime import datetime, time

from docx import Document
from docx.document import Document as WordDocument
from docx.enum.text import WD_ALIGN_PARAGRAPH
from docx.oxml import OxmlElement
from docx.oxml.ns import qn
from docx.shared import Mm, Pt, RGBColor
from docx.text.paragraph import Paragraph
from sample_markup import Block, Source, inline, table_cells, typeset

PLUM = RGBColor(0x5B, 0x2A, 0x4D)
ZIP_DATE = (1980, 1, 1, 0, 0, 0)  # the earliest that a zip can hold


def docx_bytes(source: Source) -> bytes:
    """The laid out document."""
    document = Document()
    _set_up(document, source)
    document.add_heading(typeset(source.title), level=0)
    document.add_paragraph(typeset(source.subtitle), style="Subtitle")
    for block in source.blocks:
        _add_block(document, block)
    _number_pages(document)
    out = io.BytesIO()
    document.save(out)
    return _without_clock(out.getvalue())


def _set_up(document: WordDocument, source: Source) -> None:
    written = datetime.combine(source.written, time(12))
    properties = document.core_properties
    properties.title, properties.subject, properties.author = source.title, source.subtitle, source.author
    properties.last_modified_by, properties.comments = source.author, ""
    properties.created = properties.modified = written
    section = document.sections[0]
    section.page_width, section.page_height = Mm(210), Mm(297)
    section.left_margin = section.right_margin = Mm(30)
    document.styles["Normal"].font.name, document.styles["Normal"].font.size = "Georgia", Pt(11)
    for name in ("Title", "Subtitle", "Heading 2"):
        font = document.styles[name].font
        font.name, font.color.rgb = "Georgia", PLUM
        # The template's headings name theme fonts, which win over a plain name.
        fonts = document.styles[name].element.rPr.rFonts
        for theme in ("asciiTheme", "hAnsiTheme", "eastAsiaTheme", "cstheme"):
            fonts.attrib.pop(qn(f"w:{theme}"), None)


def _add_block(document: WordDocument, block: Block) -> None:
    if block.kind == "page":
        document.add_page_break()
    elif block.kind == "heading":
        document.add_heading(typeset(block.lines[0]), level=2)
    elif block.kind == "table":
        _add_table(document, block)
    else:
        style = {"list": "List Bullet", "steps": "List Number", "note": "Quote"}.get(block.kind, "Normal")
        for line in block.lines:
            _add_runs(document.add_paragraph(style=style), line)


def _add_runs(paragraph: Paragraph, line: str) -> None:
    for style, text in inline(line):
        run = paragraph.add_run(text)
        run.bold, run.italic = style == "bold" or None, style == "italic" or None


def _add_table(document: WordDocument, block: Block) -> None:
    rows = [table_cells(row) for row in block.lines]
    table = document.add_table(rows=len(rows), cols=len(rows[0]), style="Light List")
    for row, texts in zip(table.rows, rows, strict=True):
        for cell, text in zip(row.cells, texts, strict=True):
            cell.text = text
    document.add_paragraph()


def _number_pages(document: WordDocument) -> None:
    footer = document.sections[0].footer.paragraphs[0]
    footer.alignment = WD_ALIGN_PARAGRAPH.CENTER
    footer.add_run("Page ")
    field = OxmlElement("w:fldSimple")
    field.set(qn("w:instr"), "PAGE")
    footer._p.append(field)  # python-docx has no public call for fields


def _without_clock(document: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(document)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            member = zipfile.ZipInfo(name, ZIP_DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.create_system = 3  # else the building machine's system would show
            new.writestr(member, old.read(name))
    return out.getvalue()
