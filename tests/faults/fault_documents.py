"""Makers of documents whose size or shape is an attack; each writes one and returns its path."""

import zipfile
import zlib
from pathlib import Path

WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
CHAPTER = "<html><body><h1>Harbour</h1>" + "<p>The tide comes in twice a day.</p>" * 300 + "</body></html>"


def one_line_html(path: Path, size: int) -> Path:
    """size: bytes."""
    piece = "<p>The <b>harbour</b> master kept <i>two</i> ledgers.</p>"
    return _written(path, (piece * (size // len(piece))).encode())


def nested_html(path: Path, size: int) -> Path:
    """size: tags."""
    return _written(path, b"<div>" * size + b"bottom" + b"</div>" * size)


def nested_headings_html(path: Path, size: int) -> Path:
    """size: headings."""
    return _written(path, b"<h1><div>x" * size)


def nested_tables_html(path: Path, size: int) -> Path:
    """size: tables."""
    return _written(path, b"<table><tr><td>x" * size)


def nested_captions_html(path: Path, size: int) -> Path:
    """size: tables, each in the caption of another one."""
    return _written(path, b"<table><caption>x" * size)


def merged_xlsx(path: Path, size: int) -> Path:
    """size: rows of a cell that also spans 999 columns, with a text beside its first row."""
    from openpyxl import Workbook

    book = Workbook()
    sheet = book.active
    sheet["A1"], sheet["ALM1"], sheet[f"B{size + 1}"] = "harbour", "tide", "end"
    sheet.merged_cells.add(f"A1:ALK{size}")
    book.save(path)
    return path


def empty_tags_html(path: Path, size: int) -> Path:
    """size: tags, of which nothing comes."""
    return _written(path, b"<b>" * size)


def headings_markdown(path: Path, size: int) -> Path:
    """size: sections."""
    return _written(path, "".join(f"# Heading {n}\n\ntext\n\n" for n in range(size)).encode())


def paragraphs_docx(path: Path, size: int) -> Path:
    """size: paragraphs."""
    body = "".join(f"<w:p><w:r><w:t>Paragraph {n} of it.</w:t></w:r></w:p>" for n in range(size))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "word/document.xml", f'<w:document xmlns:w="{WORD}"><w:body>{body}</w:body></w:document>'
        )
    return path


def rows_csv(path: Path, size: int) -> Path:
    """size: rows."""
    return _written(path, ("number,name\n" + "".join(f"{n},boat {n}\n" for n in range(size))).encode())


def repeated_epub(path: Path, size: int) -> Path:
    """size: how often the spine names the one chapter."""
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest><item id="c" href="c.xhtml" '
        'media-type="application/xhtml+xml"/></manifest><spine>'
        + '<itemref idref="c"/>' * size
        + "</spine></package>"
    )
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(
            "META-INF/container.xml",
            '<container><rootfiles><rootfile full-path="p.opf"/></rootfiles></container>',
        )
        archive.writestr("p.opf", package)
        archive.writestr("c.xhtml", CHAPTER)
    return path


def pages_pdf(path: Path, size: int) -> Path:
    """size: pages."""
    return _pdf(
        path, [f"BT /F 12 Tf 72 700 Td (Page {n} tells of boats.) Tj ET".encode() for n in range(size)]
    )


def operators_pdf(path: Path, size: int) -> Path:
    """size: operators that show text, on one page."""
    return _pdf(path, [b"BT /F 12 Tf " + b"(boats) Tj 1 0 Td " * size + b"ET"])


def bomb_pdf(path: Path, size: int) -> Path:
    """size: bytes that one page unpacks to."""
    packer = zlib.compressobj(9)
    packed = b"".join(packer.compress(b" " * 2**20) for _ in range(size // 2**20)) + packer.flush()
    return _pdf(path, [packed], "/Filter /FlateDecode ")


def looping_pdf(path: Path, size: int) -> Path:
    """A tree of pages that has itself as a branch. size: pages that it says it has."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [3 0 R 2 0 R] >>" % size,
        b"<< /Type /Pages /Count %d /Parent 2 0 R /Kids [2 0 R 3 0 R] >>" % size,
    ]
    return _objects_pdf(path, objects)


def endless_text(path: Path, size: int) -> Path:
    """size: bytes of words without the end of a sentence."""
    return _written(path, (b"boats and ships and tides and " * (size // 30 + 1))[:size])


def spaces(path: Path, size: int) -> Path:
    """size: bytes of white space inside a line."""
    return _written(path, b"a" + b" " * size + b"b")


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def _pdf(path: Path, contents: list[bytes], filtered: str = "") -> Path:
    first = 4  # objects: catalogue, pages, font, then a page and its content in turn
    kids = b" ".join(b"%d 0 R" % (first + 2 * n) for n in range(len(contents)))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Count %d /Kids [%s] >>" % (len(contents), kids),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for n, content in enumerate(contents):
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Resources << /Font << /F 3 0 R >> >> "
            b"/Contents %d 0 R >>" % (first + 2 * n + 1)
        )
        stream = b"<< %s/Length %d >>\nstream\n%s\nendstream" % (filtered.encode(), len(content), content)
        objects.append(stream)
    return _objects_pdf(path, objects)


def _objects_pdf(path: Path, objects: list[bytes]) -> Path:
    places = []
    with path.open("wb") as file:
        file.write(b"%PDF-1.4\n")
        for number, body in enumerate(objects, start=1):
            places.append(file.tell())
            file.write(b"%d 0 obj\n%s\nendobj\n" % (number, body))
        table = file.tell()
        file.write(b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1))
        file.writelines(b"%010d 00000 n \n" % place for place in places)
        file.write(b"trailer << /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (len(objects) + 1, table))
    return path
