"""Lays a sample source out as a small printed booklet (A5 PDF with running head and page numbers).

The same source gives the same bytes: reportlab's invariant mode fixes dates and ids, only the standard fonts
are used, and page streams are left uncompressed, so no zlib version shows in the result.
"""

import io
from html import escape

from reportlab.lib.colors import Color, HexColor
from reportlab.lib.pagesizes import A5
from reportlab.lib.styles import ParagraphStyle
from reportlab.lib.units import mm
from reportlab.pdfgen.canvas import Canvas
from reportlab.platypus import (
    BaseDocTemplate,
    Flowable,
    Frame,
    KeepTogether,
    PageBreak,
    PageTemplate,
    Paragraph,
    Spacer,
    Table,
)
from sample_markup import Block, Source, inline, table_cells

PLUM: Color = HexColor("#5b2a4d")
GREY: Color = HexColor("#6d6470")
WIDTH_PT, HEIGHT_PT = A5
MARGIN_PT = 19 * mm

_BODY = ParagraphStyle(
    "body", fontName="Times-Roman", fontSize=10.5, leading=14, spaceAfter=6, bulletFontName="Times-Roman"
)
_STYLES = {
    "paragraph": _BODY,
    "list": ParagraphStyle("list", _BODY, leftIndent=12, bulletIndent=2, spaceAfter=3),
    "steps": ParagraphStyle("steps", _BODY, leftIndent=15, bulletIndent=2, spaceAfter=3),
    "note": ParagraphStyle(
        "note", _BODY, fontName="Times-Italic", textColor=GREY, leftIndent=10, rightIndent=10, spaceAfter=12
    ),
    "heading": ParagraphStyle(
        "heading",
        _BODY,
        fontName="Times-Bold",
        fontSize=12.5,
        leading=16,
        textColor=PLUM,
        spaceBefore=6,
        keepWithNext=1,
    ),
    "title": ParagraphStyle(
        "title", _BODY, fontName="Times-Bold", fontSize=22, leading=27, textColor=PLUM, alignment=1
    ),
    "subtitle": ParagraphStyle(
        "subtitle", _BODY, fontName="Times-Italic", fontSize=12, leading=16, alignment=1
    ),
    "cell": ParagraphStyle("cell", _BODY, fontSize=9.5, leading=12, spaceAfter=0),
}
_TAGS = {"plain": "{}", "italic": "<i>{}</i>", "bold": "<b>{}</b>"}


class Causeway(Flowable):
    """A vignette: a row of piers under a rail, and the sea coming in."""

    def wrap(self, width_pt: float, height_pt: float) -> tuple[float, float]:
        self.width, self.height = width_pt, 34.0
        return self.width, self.height

    def draw(self) -> None:
        canvas, left, piers = self.canv, self.width / 2 - 92, 9
        canvas.setFillColor(PLUM)
        for pier in range(piers):
            canvas.rect(left + 10 + pier * 20, 12, 5, 16, stroke=0, fill=1)
        canvas.rect(left, 28, 185, 2, stroke=0, fill=1)
        canvas.setStrokeColor(GREY)
        canvas.setLineWidth(0.7)
        for row, shift in ((12.0, 0.0), (7.0, 8.0)):
            wave = canvas.beginPath()
            wave.moveTo(left - 14 + shift, row)
            for crest in range(13):
                x = left - 14 + shift + crest * 16
                wave.curveTo(x + 5, row + 4, x + 11, row - 4, x + 16, row)
            canvas.drawPath(wave)


def pdf_bytes(source: Source) -> bytes:
    """The laid out booklet."""
    out = io.BytesIO()
    document = BaseDocTemplate(
        out,
        pagesize=A5,
        title=source.title,
        author=source.author,
        subject=source.subtitle,
        invariant=1,
        pageCompression=0,
    )
    frame = Frame(MARGIN_PT, MARGIN_PT, WIDTH_PT - 2 * MARGIN_PT, HEIGHT_PT - 2 * MARGIN_PT, 0, 0, 0, 0)

    def furnish(canvas: Canvas, _: BaseDocTemplate) -> None:
        _head_and_foot(canvas, source)

    document.addPageTemplates([PageTemplate(frames=[frame], onPage=furnish)])
    document.build(_story(source))
    return out.getvalue()


def _head_and_foot(canvas: Canvas, source: Source) -> None:
    canvas.setFillColor(GREY)
    page = canvas.getPageNumber()
    if page > 1:
        canvas.setFont("Times-Italic", 9)
        canvas.drawCentredString(
            WIDTH_PT / 2,
            HEIGHT_PT - 12 * mm,
            f"{source.title}: {source.subtitle[0].lower()}{source.subtitle[1:]}",
        )
    canvas.setFont("Times-Roman", 9)
    canvas.drawCentredString(WIDTH_PT / 2, 11 * mm, f"Page {page}")


def _story(source: Source) -> list[Flowable]:
    story: list[Flowable] = [
        Causeway(),
        Paragraph(escape(source.title), _STYLES["title"]),
        Paragraph(escape(source.subtitle), _STYLES["subtitle"]),
        Spacer(0, 2),
    ]
    for block in source.blocks:
        story.extend(_flowables(block))
    return story


def _flowables(block: Block) -> list[Flowable]:
    if block.kind == "page":
        return [PageBreak()]
    if block.kind == "table":
        return [KeepTogether([Spacer(0, 2), _table(block), Spacer(0, 8)])]
    lines = [
        Paragraph(_tagged(line), _STYLES[block.kind], bulletText=_bullet(block, number))
        for number, line in enumerate(block.lines, start=1)
    ]
    return [*lines, Spacer(0, 4)] if block.kind in ("list", "steps") else lines


def _bullet(block: Block, number: int) -> str | None:
    # A real bullet comes out of some readers as a control character.
    return {"list": "\N{EN DASH}", "steps": f"{number}."}.get(block.kind)


def _table(block: Block) -> Table:
    head, *body = [[escape(cell) for cell in table_cells(row)] for row in block.lines]
    rows = [[Paragraph(f"<b>{cell}</b>", _STYLES["cell"]) for cell in head]]
    rows += [[Paragraph(cell, _STYLES["cell"]) for cell in row] for row in body]
    rules = [
        ("LINEBELOW", (0, 0), (-1, 0), 0.8, PLUM),
        ("LINEBELOW", (0, 1), (-1, -1), 0.3, GREY),
        ("TOPPADDING", (0, 0), (-1, -1), 2),
        ("BOTTOMPADDING", (0, 0), (-1, -1), 3),
        ("LEFTPADDING", (0, 0), (-1, -1), 2),
    ]
    return Table(rows, style=rules, colWidths=[(WIDTH_PT - 2 * MARGIN_PT) / len(rows[0])] * len(rows[0]))


def _tagged(line: str) -> str:
    return "".join(_TAGS[style].format(escape(text, quote=False)) for style, text in inline(line))
