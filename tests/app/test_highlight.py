"""Highlights: exactly the passage is marked, however the page is rotated, or the reason is given."""

import io
import zipfile
from base64 import b64decode
from dataclasses import replace

import pytest

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.highlight import MAX_CHARACTERS, locate_source, open_document
from ragblend.app.library.ingest import ingest
from ragblend.app.library.matching import find, fold

pytest.importorskip("pypdfium2")
from PIL import Image
from pypdf import PdfWriter
from reportlab.pdfgen.canvas import Canvas

LINES = [
    "The harbour master kept two ledgers and wrote the names",
    "of the ships, the hour they came and what they carried.",
    "When the storm of the ninth of November broke the mole,",
    "both of the ledgers were in the lamp room of the tower.",
]


@pytest.fixture
def sources(open_workspace):
    """Ingests files, and gives the sources of the document of a name, and the library."""

    def of(*paths, chunk_tokens=16):
        workspace = open_workspace(chunk_tokens=chunk_tokens)
        report = ingest(workspace, list(paths))
        assert not report.failed, report.failed
        document = workspace.library.find("default", str(paths[0]))
        passages = workspace.library.passages_of(document.id)
        return workspace.library, [AnswerSource.of(document, passage, 0.5) for passage in passages]

    return of


def write_page(path, pages, rotation=0, crop=None, size=(400, 300)):
    canvas = Canvas(str(path), pagesize=size)
    for lines in pages:
        if crop:
            canvas.setCropBox(crop)
        for number, line in enumerate(lines):
            canvas.drawString(60, 220 - 20 * number, line)
        canvas.showPage()
    canvas.save()
    writer = PdfWriter(clone_from=path)
    for page in writer.pages:
        page.rotate(rotation)
    writer.write(path)
    return path


def write_table(path, rows):
    canvas = Canvas(str(path), pagesize=(400, 300))
    xs, ys = [60 + 110 * n for n in range(len(rows[0]) + 1)], [240 - 20 * n for n in range(len(rows) + 1)]
    canvas.grid(xs, ys)
    for y, row in zip(ys, rows, strict=False):
        for x, cell in zip(xs, row, strict=False):
            canvas.drawString(x + 4, y - 14, cell)
    canvas.save()
    return path


def dark_outside(page, margin=3):
    """How many dark pixels of the picture are in no box, and how many in one."""
    picture = Image.open(io.BytesIO(b64decode(page.png))).convert("L")
    assert picture.size == (page.width, page.height)
    inside = outside = 0
    pixels = picture.load()
    for y in range(picture.height):
        for x in range(picture.width):
            if pixels[x, y] < 128:
                boxed = any(
                    b.left - margin <= x <= b.right + margin and b.top - margin <= y <= b.bottom + margin
                    for b in page.boxes
                )
                inside, outside = inside + boxed, outside + (not boxed)
    return outside, inside


@pytest.mark.parametrize(
    ("rotation", "crop"),
    [(0, None), (90, None), (180, None), (270, None), (0, (40, 100, 390, 280)), (90, (40, 100, 390, 280))],
)
def test_boxes_are_on_the_text(sources, tmp_path, rotation, crop):
    path = write_page(tmp_path / "a.pdf", [LINES], rotation, crop)
    library, rows = sources(path, chunk_tokens=64)
    found = locate_source(library, rows[0])
    assert len(rows) == 1 and found.reason == ""
    (page,) = found.pages
    assert (page.number, page.label, len(page.boxes)) == (1, "p. 1", 4)
    outside, inside = dark_outside(page)
    assert outside == 0 and inside > 500
    assert (page.width > page.height) == (rotation in (0, 180))


def test_only_the_cited_sentence_is_marked(sources, tmp_path):
    """Also where the same letters stand on the page before it, and across lines."""
    path = write_page(tmp_path / "a.pdf", [["both of the ledgers", *LINES]])
    library, rows = sources(path, chunk_tokens=64)
    begin = rows[0].text.index("the lamp room")
    wanted = begin, begin + len("the lamp room")
    (page,) = locate_source(library, rows[0], wanted).pages
    (all_of_it,) = locate_source(library, rows[0]).pages
    assert len(page.boxes) == 1 and len(all_of_it.boxes) == 5
    box, line = page.boxes[0], all_of_it.boxes[-1]
    assert box.right - box.left < 0.5 * (line.right - line.left) and abs(box.top - line.top) < 5
    text = tmp_path / "a.txt"
    text.write_text("\n".join(LINES))
    library, rows = sources(text, chunk_tokens=64)
    found = locate_source(library, rows[0], (4, 11))
    assert found.text[found.start : found.stop] == rows[0].text[4:11] == "harbour"


def test_a_passage_over_two_pages_is_marked_on_both(sources, tmp_path):
    path = write_page(tmp_path / "a.pdf", [["Cover"], LINES[:2], LINES[2:]])
    library, rows = sources(path, chunk_tokens=64)
    assert rows[0].location == "p. 1 – p. 3"
    pages = locate_source(library, rows[0]).pages
    assert [(page.number, page.label) for page in pages] == [(1, "p. 1"), (2, "p. 2"), (3, "p. 3")]
    assert [len(page.boxes) for page in pages] == [1, 2, 2]
    assert [dark_outside(page)[0] for page in pages] == [0, 0, 0]


def test_rows_of_a_table_are_marked_though_their_columns_names_are_not_beside_them(sources, tmp_path):
    rows = [
        ["Code", "Meaning", "Remedy"],
        ["E12", "Valve leaks", "Close the tap"],
        ["E23", "Too much foam", "Less soap"],
    ]
    library, found = sources(write_table(tmp_path / "a.pdf", rows), chunk_tokens=64)
    assert found[0].text.endswith("Code: E23\nMeaning: Too much foam\nRemedy: Less soap")
    place = locate_source(library, found[0])
    tops = [box.top for page in place.pages for box in page.boxes]
    assert place.reason == "" and 160 < min(tops) < 180 and 200 < max(tops) < 220, (
        "the rows, not the names above"
    )


def test_a_pdf_is_opened_page_by_page_without_marks(sources, tmp_path):
    path = write_page(tmp_path / "a.pdf", [["Cover"], LINES[:2], LINES[2:]])
    library, rows = sources(path, chunk_tokens=64)
    for asked, shown in ((1, 1), (3, 3), (0, 1), (99, 3)):
        found = open_document(library, rows[0].document_id, asked)
        assert (found.page_count, found.pages[0].number, found.pages[0].boxes) == (3, shown, ())
    invented = replace(rows[0], text="It says something else.", location="p. 2")
    assert locate_source(library, invented).first_page == 2, "what cannot be marked still has its page"
    assert locate_source(library, rows[0]).page_count == 3
    path.unlink()
    assert "no such file" in open_document(library, rows[0].document_id).reason
    library.remove(rows[0].document_id)
    assert "deleted from the library" in open_document(library, rows[0].document_id).reason


def test_a_text_is_opened_from_its_beginning(sources, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(" ".join(f"Sentence number {n} tells of the harbour." for n in range(300)))
    library, rows = sources(path)
    found = open_document(library, rows[0].document_id)
    assert (found.text, found.stop, found.cut_after) == (path.read_text(), 0, False)
    whole = locate_source(library, rows[9], around=MAX_CHARACTERS)
    assert whole.text == path.read_text() and whole.text[whole.start : whole.stop] == rows[9].text


def test_changed_file_is_not_highlighted(sources, tmp_path):
    path = write_page(tmp_path / "a.pdf", [LINES])
    library, rows = sources(path, chunk_tokens=64)
    write_page(path, [[line.replace("storm", "calm") for line in LINES]])
    found = locate_source(library, rows[0])
    assert "has changed" in found.reason and not found.pages
    path.unlink()
    assert "no such file" in locate_source(library, rows[0]).reason
    library.remove(rows[0].document_id)
    assert "deleted from the library" in locate_source(library, rows[0]).reason


def test_text_that_the_page_does_not_show_is_not_marked(sources, tmp_path):
    library, rows = sources(write_page(tmp_path / "a.pdf", [LINES]), chunk_tokens=64)
    invented = replace(rows[0], text=rows[0].text.replace("two ledgers", "ten ledgers"))
    found = locate_source(library, invented)
    assert "does not match the text on the page" in found.reason
    elsewhere = replace(rows[0], location="p. 7")
    assert locate_source(library, elsewhere).reason


def test_text_is_marked_where_it_stands(sources, tmp_path):
    path = tmp_path / "a.txt"
    text = " ".join(f"Sentence number {n} tells of the harbour and its {n} boats." for n in range(400))
    path.write_text(text)
    library, rows = sources(path)
    for row in (rows[0], rows[len(rows) // 2], rows[-1]):
        found = locate_source(library, row)
        assert not found.reason and found.text[found.start : found.stop] == row.text
        assert (found.cut_before, found.cut_after) == (row is not rows[0], row is not rows[-1])
        assert len(found.text) <= 6000 + len(row.text)


def test_rows_below_a_repeated_header_are_marked(sources, tmp_path):
    path = tmp_path / "a.md"
    lines = ["| Boat | Berth |", "|---|---|", *(f"| Gull{n} | quay {n} |" for n in range(60))]
    path.write_text("\n".join(lines))
    library, rows = sources(path, chunk_tokens=64)
    assert len(rows) > 3 and all(row.text.startswith(lines[0]) for row in rows)
    for row in rows:
        found = locate_source(library, row)
        whole = row.text if row is rows[0] else row.text.split("\n", 2)[2]
        assert found.text[found.start : found.stop] == whole
        begin = row.text.index("quay")
        found = locate_source(library, row, (begin, begin + 4))
        assert found.text[found.start : found.stop] == "quay"


def test_right_one_of_equal_passages_is_marked(sources, tmp_path):
    path = tmp_path / "a.txt"
    refrain = "The bell rings over the harbour every evening at eight for all of the boats outside."
    verse = "Verse {} of the song has these very words and none of the others in it at all here."
    path.write_text(" ".join(f"{verse.format(n)} {refrain}" for n in range(3)))
    library, rows = sources(path, chunk_tokens=20)
    same = [row for row in rows if row.text == refrain]
    assert len(same) == 3
    places = [locate_source(library, row).start for row in same]
    assert places == sorted(set(places)), "three different places"
    unknown = replace(same[0], node_id="of an earlier version")
    assert locate_source(library, unknown).reason, "which of the three cannot be told"


@pytest.mark.parametrize("suffix", [".md", ".html", ".csv", ".docx", ".epub"])
def test_every_kind_of_text(sources, tmp_path, make, suffix):
    path = tmp_path / f"a{suffix}"
    if suffix == ".docx":
        make["docx"](path, LINES)
    elif suffix == ".epub":
        make["epub"](path, [("a.xhtml", "One", "<p>" + "</p><p>".join(LINES) + "</p>")])
    elif suffix == ".html":
        path.write_text("<h1>Title</h1>" + "".join(f"<p>{line}</p>" for line in LINES))
    else:
        table = ["name,text", *(f"a,{line.replace(',', ' ')}" for line in LINES)]
        path.write_text("\n".join(table if suffix == ".csv" else ["# T", "", *LINES]))
    library, rows = sources(path)
    for row in rows:
        found = locate_source(library, row)
        assert not found.reason and found.text[found.start : found.stop] == row.text


def test_damaged_document_has_a_reason(sources, tmp_path, make):
    path = make["docx"](tmp_path / "a.docx", LINES)
    library, rows = sources(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", "y")
    assert locate_source(library, rows[0]).reason


@pytest.mark.parametrize(
    ("text", "page", "found"),
    [
        ("fine off-\nshore", "xx ﬁne  offshore yy", [(3, 16)]),
        ("STRASSE", "die straße", [(4, 10)]),
        ("one two", "two one", None),
        ("first line\nsecond line", "second line 7 first line", [(14, 24), (0, 11)]),
        ("a line here\nanother", "a line here and a line here", None),
        ("the line here\n7\nmore", "the line here ... more", [(0, 13), (18, 22)]),
        ("Pump | 12 | heavy", "2 Pump 12 heavy", [(2, 15)]),
        (
            "North | Leeds | 1\nNorth | Hull | light",  # a merged cell
            "North Leeds 1 Hull light",
            [(0, 13), (0, 5), (14, 18), (19, 24)],
        ),
        ("", "text", None),
        (" \n", "text", None),
    ],
)
def test_matching(text, page, found):
    assert find(text, fold(page)) == found
