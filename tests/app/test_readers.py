"""Document readers: text with its location, and a named error with advice for every document that is refused."""

import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
from document_files import write_xlsx

from ragblend.app.library import file_checks, readers
from ragblend.app.library.documents import content_digest, shortened
from ragblend.app.library.readers import clean, parse, read_document
from ragblend.app.library.text_recognition import TextRecognition
from ragblend.kvstore.errors import (
    EmptyDocumentError,
    EncryptedDocumentError,
    ModelNotFoundError,
    OversizedDocumentError,
    UnreadableDocumentError,
)


def text_of(path):
    return "\n".join(part.text for part in read_document(path).parts)


def test_plain_text_in_any_encoding(tmp_path):
    path = tmp_path / "a.txt"
    german = "Die Möwen über dem Fluss schreien, während die Fähre ablegt. " * 8
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp1252"):
        path.write_bytes(german.encode(encoding))
        assert text_of(path) == german.strip(), encoding


@pytest.mark.parametrize("text", ["A stray\0 one.", "Some " * 1000 + "\0 words." + "\0 more"])
def test_stray_nul_is_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert text_of(tmp_path / "a.txt") == text.replace("\0", "")


def test_markdown_keeps_its_text_and_names_headings(tmp_path):
    path = tmp_path / "a.md"
    second = "## Two ##\n\n```\n# no heading\n```\n| a | b |\n"
    path.write_text(f"before\n\n# One\n\nfirst <b>x</b> & a < b\n\n{second}")
    parts = read_document(path).parts
    assert [part.location for part in parts] == ["", "One", "Two"]
    assert "first <b>x</b> & a < b" in parts[1].text
    assert "# no heading" in parts[2].text and "| a | b |" in parts[2].text


def test_front_matter_of_markdown_is_no_heading(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("---\ntitle: Rules\ndate: 2024\n---\n\nFirst.\n\nOf the\nharbour\n---\n\nSecond.\n")
    assert [(part.location, part.text) for part in read_document(path).parts] == [
        ("", "---\ntitle: Rules\ndate: 2024\n---\n\nFirst."),
        ("Of the harbour", "Of the\nharbour\n---\n\nSecond."),
    ]


def test_a_letter_that_begins_with_a_rule_has_headings(tmp_path):
    path = tmp_path / "a.md"
    path.write_text("---\nMembers: welcome.\n\n# Rules\n\nNone.\n\n---\n\nYours.\n")
    assert [part.location for part in read_document(path).parts] == ["", "Rules"]


def test_html_is_divided_at_headings(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(
        "<h1>Tides</h1><p>High<br>water <b>bold</b></p><h2>Ru<b>les</b> on<br>CO<sub>2</sub></h2>"
        "<!-- note --><style>p{}</style><p>None.</p>"
    )
    assert [(part.location, part.text) for part in read_document(path).parts] == [
        ("Tides", "Tides\n\nHigh\nwater bold"),
        ("Rules on CO₂", "Rules on\nCO₂\n\nNone."),
    ]


@pytest.mark.parametrize(
    ("markup", "heading"),
    [
        ("<h1><svg><title>Acme</title></svg></h1><p>We make pumps.", "Acme"),
        ("<h2><span hidden>Tides</span></h2><p>High at nine.", "Tides"),
        ("<h1><p>Chapter 1</p><p>The Beginning</p></h1><p>It rained.", "Chapter 1 The Beginning"),
        ("<h1>Area: 10<sup>6</sup> m</h1><p>Net.", "Area: 10⁶ m"),
    ],
)
def test_a_heading_is_named_by_its_own_text(tmp_path, markup, heading):
    """The paragraph below one that shows nothing became its name."""
    (tmp_path / "a.html").write_text(markup)
    assert read_document(tmp_path / "a.html").parts[0].location == heading


def test_pdf_keeps_page_numbers(tmp_path, make, monkeypatch):
    monkeypatch.setattr(readers, "can_recognise", lambda: False)
    path = make["pdf"](tmp_path / "a.pdf", ["first page", "", "third page"])
    assert [(part.location, part.text) for part in read_document(path).parts] == [
        ("p. 1", "first page"),
        ("p. 3", "third page"),
    ]


def test_epub_follows_the_spine_and_names_chapters(tmp_path, make):
    chapters = [("z%20z.xhtml", "Start", "<p>first chapter</p>"), ("a.xhtml", "", "<h1>End</h1><p>last</p>")]
    path = make["epub"](tmp_path / "a.epub", chapters)
    with zipfile.ZipFile(path, "a") as archive:  # the manifest's names are URLs
        archive.writestr("OEBPS/z z.xhtml", archive.read("OEBPS/z%20z.xhtml"))
    assert [(part.location, part.text) for part in read_document(path).parts] == [
        ("Start", "first chapter"),
        ("End", "End\n\nlast"),
    ]


def test_csv_rows_carry_their_column_names(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('name;year;note\nAda;1815;"two\nlines"\nshort\nlong;1;2;3\n;;\n')
    assert [(part.location, part.text) for part in read_document(path).parts] == [
        ("row 2", "name: Ada\nyear: 1815\nnote: two lines"),
        ("row 3", "name: short"),
        ("row 4", "name: long\nyear: 1\nnote: 2\ncolumn 4: 3"),
    ]


def test_clean_text_can_be_stored_and_read_by_a_model():
    assert clean("a\x00b\ud800c\r\nd  \n\n\n\ne\u00ad\u200bf\ttab\vg") == "ab?c\nd\n\nef\ttab\ng"


def fails_with(error, path, *words, read=read_document):
    """read: `parse` stays in this process, where limits can be changed."""
    with pytest.raises(error) as caught:
        read(path)
    message = str(caught.value)
    assert str(path) in message and all(word in message for word in words), message
    assert message.rstrip().endswith("."), "ends with what to do"


OLE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600)


@pytest.mark.parametrize(
    ("error", "name", "content", "words"),
    [
        (EmptyDocumentError, "a.txt", b"", ["empty"]),
        (EmptyDocumentError, "a.pdf", b"", ["empty"]),
        (EmptyDocumentError, "a.txt", b" \n\t\n ", ["no text"]),
        (EncryptedDocumentError, "a.docx", OLE, ["without a password"]),
        (UnreadableDocumentError, "a.txt", b"%PDF-1.4 rest", ["promises", "pdf"]),
        (UnreadableDocumentError, "a.pdf", b"just some text", ["promises", "text"]),
        (UnreadableDocumentError, "a.md", b"\x89PNG\r\n\x1a\n" + bytes(50), ["promises", "PNG image"]),
        (UnreadableDocumentError, "a.html", b"\x7fELF" + bytes(50), ["promises", "binary"]),
        (UnreadableDocumentError, "a.csv", b"a,b\n1,\x00\x01\x02", ["promises", "binary"]),
        (UnreadableDocumentError, "a.docx", b"plain words", ["promises", "text"]),
    ],
)
def test_invalid_file_is_refused(tmp_path, error, name, content, words):
    (tmp_path / name).write_bytes(content)
    fails_with(error, tmp_path / name, *words)


def test_scanned_pdf_names_text_recognition(tmp_path, make, monkeypatch):
    monkeypatch.setattr(readers, "can_recognise", lambda: False)
    path = make["pdf"](tmp_path / "a.pdf", ["", ""])
    fails_with(EmptyDocumentError, path, "scanned", "[ocr]", "ocrmypdf")


def test_a_page_of_form_values_alone_is_not_said_to_be_left_out(tmp_path, monkeypatch):
    from reportlab.pdfgen.canvas import Canvas

    monkeypatch.setattr(readers, "can_recognise", lambda: False)
    canvas = Canvas(str(tmp_path / "a.pdf"))
    canvas.rect(72, 600, 100, 100)
    canvas.showPage()
    canvas.acroForm.checkbox(name="agree", checked=True, x=50, y=650)
    canvas.showPage()
    canvas.save()
    document = read_document(tmp_path / "a.pdf")
    assert [part.text for part in document.parts] == ["agree: Yes"]
    left_out, partly = document.notes
    assert "were left out" in left_out and left_out.endswith(": p. 1")
    assert "only remarks and form values" in partly and partly.endswith(": p. 2")


@pytest.fixture
def scan(tmp_path):
    """A PDF of two pages that are pictures, of text and of nothing, around one whose text is text."""
    pytest.importorskip("rapidocr", reason="scans need the extra `ocr`")
    from PIL import Image, ImageDraw, ImageFont
    from reportlab.lib.utils import ImageReader
    from reportlab.pdfgen.canvas import Canvas

    picture = Image.new("RGB", (1000, 500), "white")
    text = "The harbour master kept two ledgers.\nOne of them was for ships that never came."
    ImageDraw.Draw(picture).text((60, 80), text, fill="black", font=ImageFont.load_default(32))
    canvas = Canvas(str(tmp_path / "scan.pdf"), pagesize=(500, 250))
    canvas.drawImage(ImageReader(picture), 0, 0, 500, 250)
    canvas.showPage()
    canvas.drawString(40, 100, "Printed as text.")
    canvas.showPage()
    canvas.drawImage(ImageReader(Image.new("RGB", (500, 250), "white")), 0, 0, 500, 250)
    canvas.save()
    return tmp_path / "scan.pdf"


def test_a_scan_is_read(scan):
    pages = []
    parts = read_document(scan, lambda *numbers: numbers in pages or pages.append(numbers)).parts
    assert [part.location for part in parts] == ["p. 1", "p. 2"]
    written = "The harbour master kept two ledgers.\nOne of them was for ships that never came."
    assert [part.text for part in parts] == [written, "Printed as text."]
    told = [numbers for numbers in pages if numbers[1]]
    assert told == [*((n, 3) for n in range(4)), *((n, 2) for n in range(3))]


def test_a_scan_in_another_language_is_read_by_that_languages_model(scan, tmp_path, monkeypatch):
    """The model is outside of what the parsing process may read, unless it is named. (A copy of the usual one.)"""
    import rapidocr
    from rapidocr.inference_engine.base import InferSession

    (bundled,) = (Path(rapidocr.__file__).parent / "models").glob("*rec*.onnx")
    (tmp_path / "models").mkdir()
    shutil.copy(bundled, tmp_path / "models" / "korean.onnx")
    found = {"model_dir": "https://models.invalid/korean.onnx", "SHA256": content_digest(bundled)}
    asked = []
    monkeypatch.setattr(
        InferSession, "get_model_url", lambda info: asked.append(info.lang_type.value) or found
    )
    recognition = TextRecognition("korean", tmp_path / "models")
    assert read_document(scan, recognition=recognition).parts[0].text.startswith("The harbour master")
    assert asked == ["korean"]
    (tmp_path / "models" / "korean.onnx").unlink()
    monkeypatch.setattr("requests.get", refused)
    with pytest.raises(
        ModelNotFoundError, match=r"korean text, https://models\.invalid/korean\.onnx: .*default"
    ):
        read_document(scan, recognition=recognition)


def refused(*_, **__):
    raise OSError("no network")


def encrypted_member(path, make):
    data = bytearray(make["docx"](path, ["x"]).read_bytes())
    data[data.index(b"PK\x01\x02") + 8] |= 1  # the encryption bit of the directory's first entry
    path.write_bytes(data)


def archive_with(name, content):
    def make_archive(path, _):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(name, content)

    return make_archive


def huge(path, _):
    with path.open("wb") as file:
        file.truncate(file_checks.MAX_TEXT_BYTES + 1)


# A billion laughs: defusedxml refuses entities.
ENTITIES = '<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><package>&b;</package>'


@pytest.mark.parametrize(
    ("name", "write", "error", "words"),
    [
        (
            "a.pdf",
            lambda path, make: make["pdf"](path, ["secret"], password="x"),
            EncryptedDocumentError,
            ["qpdf"],
        ),
        ("a.docx", encrypted_member, EncryptedDocumentError, ["encrypted"]),
        (
            "a.pdf",
            lambda path, make: make["docx"](path, ["x"]),
            UnreadableDocumentError,
            ["Rename it to .docx"],
        ),
        ("a.docx", archive_with("hello.txt", "x"), UnreadableDocumentError, ["zip archive"]),
        (
            "a.docx",
            archive_with("word/document.xml", "<w:not><closed>"),
            UnreadableDocumentError,
            ["ParseError"],
        ),
        (
            "a.epub",
            archive_with("META-INF/container.xml", ENTITIES),
            UnreadableDocumentError,
            ["EntitiesForbidden"],
        ),
        ("a.txt", lambda path, _: os.mkfifo(path), UnreadableDocumentError, ["not a regular file"]),
        ("a.txt", huge, OversizedDocumentError, ["limit", "Split"]),
    ],
)
def test_document_that_cannot_be_read_is_refused(tmp_path, make, name, write, error, words):
    write(tmp_path / name, make)
    fails_with(error, tmp_path / name, *words)


def test_unreadable_file(tmp_path, monkeypatch):
    """The open itself fails: no mode stops root."""
    path = tmp_path / "a.txt"
    path.write_text("x")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "open", refuse)
    fails_with(UnreadableDocumentError, path, "Permission denied", "chmod")


def bomb(path, megabytes, name="word/media/b.bin"):
    """A docx with a member that unpacks to so many MiB of zeros."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if name != "word/document.xml":
            archive.writestr("word/document.xml", "<w/>")
        with archive.open(name, "w") as file:
            for _ in range(megabytes):
                file.write(bytes(1024**2))
    return path


def test_zip_bomb_is_known_by_its_directory_before_anything_is_unpacked(tmp_path, monkeypatch):
    path = bomb(tmp_path / "a.docx", 40)
    assert path.stat().st_size < 200_000
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *_: pytest.fail("unpacked"))
    fails_with(OversizedDocumentError, path, "zip bomb", "MiB", read=parse)


def test_archive_with_one_huge_part(tmp_path, make, monkeypatch):
    monkeypatch.setattr(file_checks, "MAX_TEXT_BYTES", 100_000)
    path = make["docx"](tmp_path / "a.docx", ["word " * 50_000])
    fails_with(OversizedDocumentError, path, "one part", "Split", read=parse)


@pytest.mark.parametrize("name", ["word/document.xml", "word/header1.xml"])
def test_zip_bomb_whose_directory_lies(tmp_path, name):
    """The directory says 10 bytes: no more are unpacked, and the lie is caught."""
    path = bomb(tmp_path / "a.docx", 40, name)
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02")
    data[at + 24 : at + 28] = struct.pack("<I", 10)
    path.write_bytes(data)
    fails_with(UnreadableDocumentError, path, "archive is damaged")


def test_no_encoding_fits(tmp_path, monkeypatch):
    """Bytes that no encoding explains: chardet gives up."""
    monkeypatch.setattr("chardet.detect", lambda data, **_: {"encoding": None, "confidence": 0.0})
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x81"[2:] + b"\x81\x8d\x8f\x90\x9d")
    fails_with(UnreadableDocumentError, tmp_path / "a.txt", "UTF-8", read=parse)


@pytest.mark.parametrize("limit", ["MAX_CHARACTERS", "MAX_PARTS"])
def test_the_text_of_one_document_is_bounded(tmp_path, monkeypatch, limit):
    (tmp_path / "a.csv").write_text("number\n" + "1\n" * 20)
    assert len(parse(tmp_path / "a.csv")["parts"]) == 20
    monkeypatch.setattr(readers, limit, 19)
    fails_with(OversizedDocumentError, tmp_path / "a.csv", "limits for one document", "Split", read=parse)


def test_the_time_for_one_pdf_is_bounded(tmp_path, make, monkeypatch):
    monkeypatch.setattr("ragblend.app.library.pdf_reader.MAX_SECONDS", 0.0)
    path = make["pdf"](tmp_path / "a.pdf", ["x"] * 3)
    fails_with(OversizedDocumentError, path, "of its 3 pages", read=parse)


MAIL = """From: a@example.org
To: b@example.org
Subject: The minutes
Content-Type: multipart/mixed; boundary=x

--x
Content-Type: text/plain

They are attached.
--x
Content-Type: application/pdf
Content-Disposition: attachment; filename=minutes.pdf

%PDF
--x--
"""


def slides_of(*texts):
    def write(path):
        from pptx import Presentation

        slides = Presentation()
        for text in texts:
            slide = slides.slides.add_slide(slides.slide_layouts[5])
            slide.shapes.title.text = text
        slides.save(path)

    return write


@pytest.mark.parametrize(
    ("name", "content", "note"),
    [
        ("a.csv", b"a;b\n1,5;2\n2,5;3\n", "its columns were guessed to be separated by semicolons"),
        ("a.csv", b"a,b\n1,2\n", None),
        ("a.csv", b"sep=;\na;b\n1,5;2\n", None),
        ("a.eml", MAIL.encode(), "attachments were not read: minutes.pdf"),
        ("a.mbox", f"From a\n{MAIL}\nFrom a\n{MAIL}".encode(), "attachments were not read: minutes.pdf, minutes.pdf"),
        ("a.rtf", rb"{\rtf1\ansi\ansicpg932 Text \'85\'7f.}", "1 characters that its encoding does not have"),
        ("a.xlsx", lambda path: write_xlsx(path, [["a", "b"], ["x", "=1+1"]]), "1 formulas have no stored value, and"),
        ("a.xlsx", lambda path: write_xlsx(path, [["a", "b"]], comment="?"), "the comments on its cells were not read"),
        ("a.xlsx", lambda path: write_xlsx(path, [["a", "b"]]), None),
        ("a.pptx", slides_of("One", "", "Three", ""), "these slides have no text, and were left out: 2, 4"),
        ("a.txt", "Möwen über dem Fluss. ".encode() * 20 + b"\xe4", "1 bytes that are not UTF-8 were replaced"),
        ("a.txt", "Möwen über dem Fluss. ".encode(), None),
    ],
)  # fmt: skip
def test_what_was_guessed_or_left_out_is_noted(tmp_path, name, content, note):
    if callable(content):
        content(tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    notes = read_document(tmp_path / name).notes
    assert len(notes) == bool(note) and all(found.startswith(note) for found in notes)


def test_many_pages_in_a_note_are_shortened():
    assert shortened([f"p. {n}" for n in range(1, 4)]) == "p. 1, p. 2, p. 3"
    assert shortened([str(n) for n in range(1, 1000)]).endswith("9, 10 and 989 more")
