"""Makers of documents, of the formats that need more than `write_text`. Not a test file."""

import zipfile


def write_pdf(path, pages, password=None):
    """A PDF with one line of text a page; an empty text makes a page with a drawing alone."""
    from reportlab.lib.pdfencrypt import StandardEncryption
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(path), encrypt=StandardEncryption(password, canPrint=0) if password else None)
    for text in pages:
        canvas.drawString(72, 700, text) if text else canvas.rect(72, 600, 100, 100)
        canvas.showPage()
    canvas.save()
    return path


def write_docx(path, paragraphs):
    import docx

    document = docx.Document()
    for paragraph in paragraphs:
        document.add_paragraph(paragraph)
    document.save(str(path))
    return path


def write_xlsx(path, rows, merged=(), comment="", **formats):
    """A workbook of one sheet. comment: on its first cell; formats: number formats by cell, such as `B2="0%"`."""
    from openpyxl import Workbook
    from openpyxl.comments import Comment

    workbook = Workbook()
    for row in rows:
        workbook.active.append(row)
    if comment:
        workbook.active["A1"].comment = Comment(comment, "Ada")
    for cells in merged:
        workbook.active.merge_cells(cells)
    for cell, number_format in formats.items():
        workbook.active[cell].number_format = number_format
    workbook.save(path)
    return path


def write_epub(path, chapters):
    """chapters: (file name, title, body), in the order of the spine; files are stored in the opposite order."""
    items = "".join(
        f'<item id="c{n}" href="{name}" media-type="application/xhtml+xml"/>'
        for n, (name, _, _) in enumerate(chapters)
    )
    spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
    namespace = 'xmlns="http://www.idpf.org/2007/opf"'
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/epub+zip")
        archive.writestr(
            "META-INF/container.xml",
            '<container><rootfiles><rootfile full-path="OEBPS/b.opf"/></rootfiles></container>',
        )
        for name, title, body in reversed(chapters):
            page = f"<html><head><title>{title}</title></head><body>{body}</body></html>"
            archive.writestr(f"OEBPS/{name}", page)
        archive.writestr(
            "OEBPS/b.opf",
            f"<package {namespace}><manifest>{items}</manifest><spine>{spine}</spine></package>",
        )
    return path
