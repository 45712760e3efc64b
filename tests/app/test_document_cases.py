"""Small files that were read wrongly once, each standing for a kind of fault; and more of each kind."""

import zipfile
from base64 import b64encode
from datetime import datetime, timedelta
from email.message import EmailMessage
from pathlib import Path

import pytest
from document_files import write_epub, write_pdf, write_xlsx
from pypdf import PdfWriter

from ragblend.app.library import readers
from ragblend.app.library.discovery import discover
from ragblend.app.library.pdf_tables import PageTable, with_table_rows
from ragblend.app.library.readers import clean, parse
from ragblend.app.library.tables import TableCell, rows_as_text

CASES = Path(__file__).parent / "cases"
SPHINX = """<div class=related role=navigation><h3>Navigation</h3><ul><li>next</ul></div>
<div role=main><h1>1. Disk<a class=headerlink href=#d>¶</a></h1><p>Two disks are enough.</div>
<div class=sphinxsidebar role=navigation><nav>Contents</nav><div role=search>Search</div></div>"""
DOCBOOK = """<div class=navheader><table><tr><td>Prev</table></div><p>VACUUM collects garbage.
<div class=navfooter><table><tr><td>Home</table></div>"""


def text_of(path):
    return "\n".join(text for text, _ in parse(path)["parts"])


def notes_of(path):
    return " ".join(parse(path)["notes"])


@pytest.mark.parametrize(
    ("name", "wanted", "unwanted"),
    [
        (
            "syllabus.html",
            ["The midterm examination is held on 17 October in room B-12.", "2 | Whale song"],
            [],
        ),
        ("nohead.html", ["The slipway key hangs behind the blue door."], ["Boat club"]),
        ("unclosednav.html", ["The slipway key hangs behind the blue door."], []),
        (
            "pre.html",
            [
                "    if a:\n        return a + b",
                "10⁶ m²",
                "note³",
                "x₁ = 2",
                "E = mc^2",
                "Chart: 42 boats in 1999",
                "Typed 77",
                "Area text 88",
                "Opt B",
                "label in svg",
            ],
            ["Opt A", "106"],
        ),
        ("online.docx", ["The deposit is 400 crowns."], []),
        ("strict.docx", ["The deposit is 400 crowns."], []),
        ("notes.docx", ["The deposit is refunded.", "Only within 30 days of departure."], ["↑"]),
        ("math.docx", ["The area is "], ["The area is ."]),
        ("badpage.pdf", ["The key hangs behind the blue door.", "The meeting starts at six."], []),
        ("de_mixed.txt", ["Der Schlüssel für das Bootshaus", "12 €"], ["Ã"]),
        ("move.docx", ["Rent is due on the 1st."], []),
        ("box.docx", ["Boxed warning 7."], []),
        ("late_quote.csv", ['note: He said "tighten the valve, then wait", so I did\nowner: Bo Berg'], []),
    ],
)
def test_case_is_read_as_people_see_it(name, wanted, unwanted):
    text = text_of(CASES / name)
    times = {text.count(each) for each in wanted}
    assert times == {1} or (name == "de_mixed.txt" and 0 not in times), text[
        -2000:
    ]  # which repeats its lines
    assert not any(each in text for each in unwanted)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("badpage.pdf", "damaged and was left out: 2"),
        ("de_mixed.txt", "not UTF-8"),
        ("zh_cut.txt", "not UTF-8"),
    ],
)
def test_what_was_replaced_or_left_out_is_said(name, word):
    assert word in notes_of(CASES / name)


def test_cut_chinese_text_is_kept():
    data = (CASES / "zh_cut.txt").read_bytes()
    assert text_of(CASES / "zh_cut.txt")[:200] == clean(data.decode("utf-8", "ignore"))[:200]


A_PLUS_B = "<mrow><mi>a</mi><mo>+</mo><mi>b</mi></mrow>"


@pytest.mark.parametrize(
    ("html", "wanted", "unwanted"),
    [
        ("<p>one<p>two", ["one\n\ntwo"], []),
        ("<body><title>Late</title>words", ["words"], ["Late"]),
        ("<nav><a href=x>Menu</a></nav><p>" + "text " * 20, ["text"], ["Menu"]),
        (SPHINX, ["1. Disk", "Two disks"], ["¶", "Navigation", "next", "Search"]),
        (DOCBOOK, ["VACUUM collects"], ["Prev", "Home"]),
        ("<table><tr><td>a<td>b<tr><td>c<td>d</table>", ["a | b\nc | d"], []),
        (
            "<p>a<template><b>x</b></template><script>y</script><!-- z --><p hidden>q",
            ["a"],
            ["x", "y", "z", "q"],
        ),
        ("<ul><li>one<li>two</ul>", ["- one\n- two"], []),
        (
            "<ol start=4><li>four<li><p>five</p><ol type=a><li>x<li value=5>y</ol></ol>",
            ["4. four\n5. five\n\na. x\ne. y"],
            ["- "],
        ),
        ("<pre>a\n\tb</pre>", ["a\n    b"], []),
        ("10 m<sup>2 </sup>and", ["10 m² and"], []),
        ("H<sub>2</sub>O x<sup>n+1</sup> y<sub>max</sub>", ["H₂O", "xⁿ⁺¹", "y_max"], []),
        ("<math><mfrac><mi>a</mi><mi>b</mi></mfrac></math>", ["a/b"], []),
        (f"<math><mfrac>{A_PLUS_B}<mi>c</mi></mfrac></math>", ["(a+b)/c"], []),
        (f"<math>\n<msup>\n{A_PLUS_B}\n<mn>2</mn></msup><mi>x</mi></math>", ["(a+b)^2 x"], []),
        (
            f"<math><msup><mrow><mo>(</mo>{A_PLUS_B}<mo>)</mo></mrow><mn>2</mn></msup></math>",
            ["(a+b)^2"],
            ["(("],
        ),
        ("<math><msqrt><mn>2</mn></msqrt><mroot><mn>8</mn><mn>3</mn></mroot></math>", ["√(2)(8)^(1/3)"], []),
        ("<table><tr><td><math><msqrt><mn>2</mn></msqrt></math><td>a | b</table>", ["√(2) | a | b"], []),
        ("<math><msup><mfrac><mi>a</mi><mi>b</mi></mfrac><mn>2</mn></msup></math>", ["(a/b)^2"], []),
        ("<math><msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup></math>", ["x_1^2"], []),
        (
            "<math><msup><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup><mn>3</mn></msup></math>",
            ["(x_i^2)^3"],
            [],
        ),
        (
            "<math><msup><mroot><mi>x</mi><mn>3</mn></mroot><mn>2</mn></msup></math>",
            ["((x)^(1/3))^2"],
            [],
        ),
        (
            "<math><mfrac><mrow><munderover><mo>∫</mo><mn>0</mn><mn>1</mn></munderover><mi>x</mi></mrow>"
            "<mn>2</mn></mfrac></math>",
            ["(∫_0^1 x)/2"],
            [],
        ),
        ("<math><mfrac><msub><mi>x</mi><mn>1</mn></msub><mn>2</mn></mfrac></math>", ["x_1/2"], []),
        ("<math><msup><msup><mi>x</mi><mn>2</mn></msup><mn>3</mn></msup></math>", ["(x^2)^3"], []),
        (
            "<math><munderover><mo>∑</mo><mrow><mi>i</mi><mo>=</mo><mn>1</mn></mrow><mn>10</mn></munderover><mi>i</mi></math>",
            ["∑_(i=1)^10 i"],
            [],
        ),
        (
            "<math><mtable>"
            + "<mtr><mtd><mn>1</mn></mtd><mtd><mn>2</mn></mtd></mtr>" * 2
            + "</mtable></math>",
            ["[1, 2; 1, 2]"],
            [],
        ),
        ("<input type=password value=secret><input value=shown>", ["shown"], ["secret"]),
        ("<dl><dt>term<dd>meaning</dl>", ["term\nmeaning"], []),
        ("<ruby>漢字<rp>（</rp><rt>かんじ</rt><rp>）</rp></ruby>です", ["漢字(かんじ)です"], []),
        ("<p style='color:red; display : none'>preview<p>letter", ["letter"], ["preview"]),
        ("<pre>one<br>two<br/>three</pre>", ["one\ntwo\nthree"], []),
        ("<?xml version='1.0'?><html><head><title/></head><body><p>kept</p></body></html>", ["kept"], []),
        (
            "<?xml version='1.0'?><html><body><a id='x'/><p>a</p><p><![CDATA[b < c]]></p></body></html>",
            ["b < c"],
            [],
        ),
    ],
)
def test_html_as_a_browser_shows_it(tmp_path, html, wanted, unwanted):
    (tmp_path / "a.html").write_text(html)
    text = text_of(tmp_path / "a.html")
    assert all(each in text for each in wanted), text
    assert not any(each in text for each in unwanted), text


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("koi8-r", "koi8-r", "Ключ висит у двери"),
        ("iso-8859-1", "cp1252", "2010–2015, price € 500"),
    ],
)
def test_html_in_its_declared_encoding(tmp_path, declared, encoding, text):
    """A dash and a euro sign that browsers show were removed from pages in Latin-1."""
    (tmp_path / "a.html").write_bytes(f"<meta charset={declared}><p>{text}".encode(encoding))
    assert text_of(tmp_path / "a.html") == text


CZECH = "Většina měst má už své nejluxusnější hotely, především pařížské; množství škod tím ale neroste."
SPANISH = "El español señalado tenía años y niños; según la tasación varía la función de las autónomas."
TURKISH = "Adım ne, savaşçısı kim? Başka seçeneğim yoktu, meleğin olduğunu söyledi hayır eğer gelirse."
JAPANESE = "鍵は青い扉の裏に掛かっている。JISの規格は情報技術を規定する。"


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("iso2022_jp", JAPANESE),
        ("iso2022_kr", "열쇠는 파란 문 뒤에 걸려 있다. 역사적 사실이다."),
        ("utf-16-be", JAPANESE * 3),  # without a mark
        ("utf-32-le", SPANISH),
        ("utf-32-be", SPANISH),
        ("iso8859-2", CZECH),
        ("iso8859-9", TURKISH),
        ("cp1252", SPANISH),
        ("cp1252", "Kunde;Köln;50 €"),
        ("koi8-r", "Ключ висит за синей дверью, а лодка стоит у причала."),
    ],
)
def test_text_of_an_old_encoding_that_nothing_declares(tmp_path, encoding, text):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    assert text_of(tmp_path / "a.txt") == text


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
MATH = "http://schemas.openxmlformats.org/officeDocument/2006/math"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
DRAWING = "http://schemas.openxmlformats.org/drawingml/2006/main"
DRAWINGS = "http://schemas.microsoft.com/office/drawing"
COMPATIBLE = "http://schemas.openxmlformats.org/markup-compatibility/2006"


def docx(path, body, **parts):
    """A DOCX with this body; parts: other members, by the name of their relationship's type."""
    relations = "".join(
        f'<Relationship Id="r{n}" Type="{OFFICE}/{kind}" Target="{name}"/>'
        for n, (kind, (name, _)) in enumerate(parts.items())
    )
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "_rels/.rels",
            f'<Relationships xmlns="{package}"><Relationship Id="a" Type="{OFFICE}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
        )
        archive.writestr(
            "word/_rels/document.xml.rels", f'<Relationships xmlns="{package}">{relations}</Relationships>'
        )
        archive.writestr(
            "word/document.xml",
            f'<w:document xmlns:w="{WORD}" xmlns:m="{MATH}" xmlns:r="{OFFICE}" xmlns:mc="{COMPATIBLE}"><w:body>{body}'
            "</w:body></w:document>",
        )
        for name, content in parts.values():
            archive.writestr(f"word/{name}", content)
    return path


def run(text):
    return f"<w:r><w:t>{text}</w:t></w:r>"


def paragraph(text):
    return f"<w:p>{run(text)}</w:p>"


BOX = (
    "<w:drawing xmlns:wp='http://schemas.openxmlformats.org/drawingml/2006/wordprocessingDrawing' "
    "xmlns:wps='http://schemas.microsoft.com/office/word/2010/wordprocessingShape'><wp:inline><wps:txbx><w:txbxContent>"
    f"{paragraph('{}')}</w:txbxContent></wps:txbx></wp:inline></w:drawing>"
)
FRACTION = (
    "<m:oMath><m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num>"
    "<m:den><m:r><m:t>2</m:t></m:r></m:den></m:f></m:oMath>"
)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (f"<w:p>{run('Half is ')}{FRACTION}{run('.')}</w:p>", "Half is (a+b)/2."),
        (
            "<w:p><w:del><w:r><w:delText>old</w:delText></w:r></w:del><w:ins>"
            + run("new")
            + "</w:ins></w:p>",
            "new",
        ),
        (
            f"<w:tbl><w:tr><w:tc>{paragraph('a')}</w:tc><w:tc>{paragraph('b')}</w:tc></w:tr></w:tbl>",
            "a | b",
        ),
        (f"<w:sdt><w:sdtContent>{paragraph('controlled')}</w:sdtContent></w:sdt>", "controlled"),
        (
            f"<mc:AlternateContent><mc:Choice Requires='x'>{paragraph('chosen')}</mc:Choice></mc:AlternateContent>",
            "chosen",
        ),
        (f"<w:p><w:fldSimple w:instr='DATE'>{run('17 March')}</w:fldSimple></w:p>", "17 March"),
        (
            f"<w:p><w:r><w:ruby><w:rt>{run('reading')}</w:rt><w:rubyBase>{run('base')}</w:rubyBase></w:ruby></w:r></w:p>",
            "base",
        ),
        (f"<w:p><w:bdo w:val='ltr'>{run('directed')}</w:bdo></w:p>", "directed"),
        (
            f"<w:p>{run('Before.')}<w:r>{BOX.format('Boxed.')}</w:r></w:p>{paragraph('After.')}",
            "Before. Boxed. After.",
        ),
        (
            "<w:p><w:r><mc:AlternateContent><mc:Choice Requires='wps'>" + BOX.format("new") + "</mc:Choice>"
            "<mc:Fallback><w:t/></mc:Fallback></mc:AlternateContent></w:r></w:p>",
            "new",
        ),
        (
            "<w:p><w:r><w:pict xmlns:v='urn:schemas-microsoft-com:vml'><v:oval><v:textbox><w:txbxContent>"
            + paragraph("oval")
            + "</w:txbxContent></v:textbox></v:oval></w:pict></w:r></w:p>",
            "oval",
        ),
        (
            "<w:p>"
            + "".join(
                f"<w:r><w:sym w:font='{font}' w:char='{code}'/></w:r>"
                for font, code in (
                    ("Symbol", "F0A3"),
                    ("Symbol", "00B0"),
                    ("Symbol", "F06D"),
                    ("Wingdings", "F0FE"),
                    ("Arial", "2192"),
                )
            )
            + "</w:p>",
            "≤°μ☑→",
        ),
        (
            "<w:p><w:r><w:fldChar><w:ffData><w:ddList><w:result w:val='1'/><w:listEntry w:val='Oslo'/>"
            "<w:listEntry w:val='Rome'/></w:ddList></w:ffData></w:fldChar></w:r></w:p>",
            "Rome",
        ),
        ("<w:p><w:r><w:t>12</w:t><w:ptab w:alignment='right'/><w:t>15</w:t></w:r></w:p>", "12 15"),
    ],
)
def test_word_document(tmp_path, body, wanted):
    assert " ".join(text_of(docx(tmp_path / "a.docx", body)).split()) == wanted


in_list = "<w:pPr><w:numPr><w:ilvl w:val='0'/><w:numId w:val='1'/></w:numPr>{}</w:pPr>".format
NUMBERING = (
    f'<w:numbering xmlns:w="{WORD}"><w:abstractNum w:abstractNumId="0"><w:lvl w:ilvl="0"><w:numFmt w:val="decimal"/>'
    '<w:lvlText w:val="§ %1"/></w:lvl></w:abstractNum><w:num w:numId="1"><w:abstractNumId w:val="0"/></w:num>'
    "</w:numbering>"
)


@pytest.mark.parametrize(
    ("choice", "fallback", "wanted"),
    [
        ("", "", "§ 1 One § 3 Three"),
        ("Two", "2", "§ 1 One § 2 Two § 3 Three"),
        ("", "2", "§ 1 One § 2 2 § 3 Three"),
    ],
)
def test_alternatives_in_word_are_counted_once(tmp_path, choice, fallback, wanted):
    """An empty numbered paragraph was counted in both forms of its box."""
    one, two, other, three = (
        f"<w:p>{in_list('')}{run(text)}</w:p>" for text in ("One", choice, fallback, "Three")
    )
    box = f"<mc:AlternateContent><mc:Choice>{two}</mc:Choice><mc:Fallback>{other}</mc:Fallback></mc:AlternateContent>"
    path = docx(tmp_path / "a.docx", one + box + three, numbering=("numbering.xml", NUMBERING))
    assert " ".join(text_of(path).split()) == wanted


def test_an_empty_box_does_not_divide_a_paragraph_of_word(tmp_path):
    box = f"<mc:AlternateContent><mc:Choice>{BOX.format('')}</mc:Choice></mc:AlternateContent>"
    path = docx(tmp_path / "a.docx", f"<w:p>{run('Before')}<w:r>{box}</w:r>{run(' after')}</w:p>")
    assert text_of(path) == "Before after"


@pytest.mark.parametrize("kind", ["del", "moveFrom"])
def test_deleted_paragraphs_of_word_are_not_counted_and_have_no_notes(tmp_path, kind):
    """The second of two paragraphs was § 3, and a deleted note stood at the end."""
    gone = f"<w:{kind}/><w:del><w:r><w:delText>Old.</w:delText><w:footnoteReference w:id='2'/></w:r></w:del>"
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{in_list('')}{run('One')}</w:p><w:p>{in_list(f'<w:rPr><w:{kind}/></w:rPr>')}{gone}</w:p>"
        f"<w:p>{in_list('')}{run('Two')}</w:p>",
        numbering=("numbering.xml", NUMBERING),
        footnotes=(
            "footnotes.xml",
            f'<w:footnotes xmlns:w="{WORD}"><w:footnote w:id="2">{paragraph("Old.")}</w:footnote></w:footnotes>',
        ),
    )
    assert " ".join(text_of(path).split()) == "§ 1 One § 2 Two"


def test_signs_of_unknown_fonts_in_word_are_noted(tmp_path):
    path = docx(tmp_path / "a.docx", "<w:p><w:r><w:sym w:font='Webdings' w:char='F061'/></w:r></w:p>")
    assert (
        text_of(path) == "\ufffd"
        and notes_of(path) == "signs of these fonts were replaced by \ufffd: Webdings"
    )


def term(name, text):
    return f"<m:{name}><m:r><m:t>{text}</m:t></m:r></m:{name}>"


@pytest.mark.parametrize(
    ("formula", "wanted"),
    [
        (f"<m:rad>{term('deg', '3')}{term('e', '8x')}</m:rad>", "(8x)^(1/3)"),
        (f"<m:rad><m:deg/>{term('e', '2')}</m:rad>", "√(2)"),
        (f"<m:f>{term('num', '1')}<m:den><m:rad><m:deg/>{term('e', '2')}</m:rad></m:den></m:f>", "1/√(2)"),
        (
            f"<m:f>{term('num', '1')}<m:den><m:rad>{term('deg', '3')}{term('e', '2')}</m:rad></m:den></m:f>",
            "1/((2)^(1/3))",
        ),
        (f"<m:m>{2 * ('<m:mr>' + term('e', '1') + term('e', '2') + '</m:mr>')}</m:m>", "[1, 2; 1, 2]"),
        (f"<m:sSubSup>{term('e', 'x')}{term('sub', '1')}{term('sup', '2')}</m:sSubSup>", "x_1^2"),
        (
            f"<m:nary><m:naryPr><m:chr m:val='∑'/></m:naryPr>{term('sub', 'i=1')}{term('sup', '10')}{term('e', 'i')}"
            "</m:nary>",
            "∑_(i=1)^10 i",
        ),
        (f"<m:nary><m:sub/><m:sup/>{term('e', 'xdx')}</m:nary>", "∫ xdx"),
        (f"<m:nary>{term('sup', 'n')}{term('e', 'x')}</m:nary>", "∫^n x"),
        (f"<m:d><m:dPr><m:begChr m:val='|'/><m:endChr m:val='|'/></m:dPr>{term('e', 'x')}</m:d>", "|x|"),
        (f"<m:d>{term('e', 'x')}{term('e', 'y')}</m:d>", "(x, y)"),
        (
            f"<m:func><m:fName><m:limLow>{term('e', 'lim')}{term('lim', 'x→0')}</m:limLow></m:fName>"
            f"{term('e', 'x')}</m:func>",
            "lim_(x→0) x",
        ),
        (f"<m:sPre>{term('sub', '1')}{term('sup', '2')}{term('e', 'H')}</m:sPre>", "_1^2 H"),
        (
            f"<m:sSup><m:e><m:sSup>{term('e', 'x')}{term('sup', '2')}</m:sSup></m:e>{term('sup', '3')}</m:sSup>",
            "(x^2)^3",
        ),
        (
            "<m:d><m:dPr><m:begChr m:val='{'/><m:endChr m:val=''/></m:dPr>"
            f"<m:e><m:eqArr>{term('e', 'x=1')}{term('e', 'y=2')}</m:eqArr></m:e></m:d>",
            "{x=1; y=2",
        ),
    ],
)
def test_formulas_of_word_keep_their_signs(tmp_path, formula, wanted):
    """The cube root of 8x was read as that of 38x, a matrix as one number, and a sum without its sign."""
    assert text_of(docx(tmp_path / "a.docx", f"<w:p><m:oMath>{formula}</m:oMath></w:p>")) == wanted


def test_a_cell_of_word_that_continues_nothing_keeps_its_text(tmp_path):
    """The first cell of a table that was cut from another one may still continue the cell that was above it."""
    merged = "<w:tc><w:tcPr><w:vMerge/></w:tcPr><w:p><w:r><w:t>harbour</w:t></w:r></w:p></w:tc>"
    row = f"<w:tr>{merged}<w:tc><w:p><w:r><w:t>tide</w:t></w:r></w:p></w:tc></w:tr>"
    assert text_of(docx(tmp_path / "a.docx", f"<w:tbl>{row}</w:tbl>")) == "harbour | tide"


def chart_of(series, kind="chart"):
    """series by name: the numbers of Q1 and Q2, or in a scatter chart y by x."""

    def points(name, texts):
        found = "".join(f"<pt idx='{n}'><v>{text}</v></pt>" for n, text in enumerate(texts))
        return f"<{name}>{found}</{name}>"

    found = "".join(
        f"<ser><tx><v>{name}</v></tx>"
        + (
            points("xVal", numbers) + points("yVal", numbers.values())
            if isinstance(numbers, dict)
            else points("cat", ["Q1", "Q2"]) + points("val", numbers)
        )
        + "</ser>"
        for name, numbers in series.items()
    )
    return f"<chartSpace xmlns='http://x/{kind}'><chart><plotArea><aChart>{found}</aChart></plotArea></chart></chartSpace>"


@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        ({"A": {1: 5}, "B": {10: 50, 20: 60}}, "A\n\n1 | 5\n\nB\n\n10 | 50\n20 | 60"),
        ({"A": {1: 5, 2: 6}, "B": {1: 50, 2: 60}}, "1\nA: 5\nB: 50\n\n2\nA: 6\nB: 60"),
    ],
)
def test_scatter_charts_keep_each_series_x_values(tmp_path, series, wanted):
    """The points of all series had the x values of the first."""
    path = docx(
        tmp_path / "a.docx", "<w:p><chart r:id='r0'/></w:p>", chart=("charts/chart1.xml", chart_of(series))
    )
    assert text_of(path) == wanted


def test_word_headers_footers_and_embedded_html(tmp_path):
    header = f'<w:hdr xmlns:w="{WORD}">{paragraph("Letterhead")}</w:hdr>'
    footer = f'<w:ftr xmlns:w="{WORD}">{paragraph("Page foot")}</w:ftr>'
    chart = "<w:p><mc:AlternateContent><mc:Choice><chart r:id='r{}'/></mc:Choice>"
    chart += f"<mc:Fallback>{run('Not shown')}</mc:Fallback></mc:AlternateContent></w:p>"
    body = paragraph("Body.") + '<w:altChunk r:id="r2"/><w:altChunk r:id="r3"/>'
    body += chart.format(4) + chart.format(5) + paragraph("End.")
    path = docx(
        tmp_path / "a.docx",
        body,
        header=("header1.xml", header),
        footer=("footer1.xml", footer),
        aFChunk=("chunk.html", "<p>From <b>HTML</b>.</p>"),
        other=("chunk.rtf", "not read"),
        chart=("charts/chart1.xml", chart_of({"Sales": [5, 6], "Cost": [3, 4]})),
        map=("charts/chartEx1.xml", chart_of({}, "chartex")),
    )
    assert notes_of(path) == "what is embedded was not read: word/charts/chartEx1.xml, word/chunk.rtf"
    texts = ["Letterhead", "Body.", "From HTML.", "Q1\nSales: 5\nCost: 3", "Q2\nSales: 6\nCost: 4", "End."]
    assert text_of(path).split("\n\n") == [*texts, "Page foot"]


def test_an_object_that_a_strict_word_document_embeds_is_noted(tmp_path):
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{run('Body')}<w:r><w:object><w:objectEmbed r:id='r0'/></w:object></w:r></w:p>",
        package=("embeddings/sheet.xlsx", "not read"),
    )
    assert notes_of(path) == "what is embedded was not read: word/embeddings/sheet.xlsx"


@pytest.mark.parametrize("content", ["", "<chartSpace>", "<!DOCTYPE a [<!ENTITY b 'c'>]><a>&b;</a>"])
def test_a_damaged_chart_leaves_the_word_document_readable(tmp_path, content):
    path = docx(
        tmp_path / "a.docx",
        f"{paragraph('Body')}<w:p><chart r:id='r0'/></w:p>",
        chart=("charts/chart1.xml", content),
    )
    assert text_of(path) == "Body"
    assert notes_of(path) == "what is embedded was not read: word/charts/chart1.xml"


def test_an_object_in_a_footnote_of_word_is_named_by_the_footnotes_relations(tmp_path):
    """`word/footnotes.xml was not read`, as the document has another part by the same id."""
    note = f"<w:p>{run('Net')}<w:r><w:object><OLEObject r:id='r0'/></w:object></w:r></w:p>"
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{run('Fee')}<w:r><w:footnoteReference w:id='2'/></w:r></w:p>",
        footnotes=(
            "footnotes.xml",
            f'<w:footnotes xmlns:w="{WORD}" xmlns:r="{OFFICE}"><w:footnote w:id="2">{note}</w:footnote></w:footnotes>',
        ),
        other=(
            "_rels/footnotes.xml.rels",
            f'<Relationships><Relationship Id="r0" Type="{OFFICE}/oleObject" Target="1.bin"/></Relationships>',
        ),
    )
    assert text_of(path) == "Fee (Net)"
    assert notes_of(path) == "what is embedded was not read: word/1.bin"


def test_word_superscripts_by_a_style_and_notes_by_one(tmp_path):
    """10⁶ was read as 106; the text of a note is no superscript."""
    styled = "<w:r><w:rPr><w:rStyle w:val='Up'/></w:rPr>{}</w:r>".format
    reference = styled("<w:footnoteReference w:id='2'/>")
    style = "<w:style w:styleId='Up'><w:rPr><w:vertAlign w:val='superscript'/></w:rPr></w:style>"
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{run('Area 10')}{styled('<w:t>6</w:t>')}{run(' m')}{reference}</w:p>",
        styles=("styles.xml", f'<w:styles xmlns:w="{WORD}">{style}</w:styles>'),
        footnotes=(
            "footnotes.xml",
            f'<w:footnotes xmlns:w="{WORD}" xmlns:m="{MATH}"><w:footnote w:id="2"><w:p>{run("Net, 10")}'
            f"{styled('<w:t>6</w:t>')}{run(' or ')}{FRACTION}</w:p></w:footnote></w:footnotes>",
        ),
    )
    assert text_of(path) == "Area 10⁶ m (Net, 10⁶ or (a+b)/2)"


def test_word_building_blocks_are_not_the_documents_parts(tmp_path):
    """The numbering, notes and styles of a glossary replaced the document's."""
    notes = f'<w:footnotes xmlns:w="{WORD}"><w:footnote w:id="2">{{}}</w:footnote></w:footnotes>'.format
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{run('Fee 400')}<w:r><w:footnoteReference w:id='2'/></w:r></w:p>",
        footnotes=("footnotes.xml", notes(paragraph("Net of tax."))),
        glossary=("glossary/footnotes.xml", notes(paragraph("Template."))),
    )
    assert text_of(path).split() == ["Fee", "400", "(Net", "of", "tax.)"]


def test_word_comments_on_the_same_words(tmp_path):
    comments = "".join(
        f'<w:comment w:id="{n}" w:initials="A">{paragraph(text)}</w:comment>'
        for n, text in enumerate(("One.", "Two.", "Left over.", "Reply."))
    )
    comments = comments.replace(
        "Left over.", "Left over.</w:t></w:r><w:r><w:commentReference w:id='3'/><w:t>"
    )
    references = "".join(f"<w:r><w:commentReference w:id='{n}'/></w:r>" for n in (0, 1))
    path = docx(
        tmp_path / "a.docx",
        f"<w:p>{run('Text')}{references}</w:p>",
        comments=("comments.xml", f'<w:comments xmlns:w="{WORD}">{comments}</w:comments>'),
    )
    assert " ".join(text_of(path).split()) == "Text (One.) (Two.) Left over. (Reply.)"


@pytest.mark.parametrize(
    ("content", "row"),
    [
        ('a,b\n1,"x ""y"", z"\n', 'a: 1\nb: x "y", z'),
        ("sep=;\na;b\n1;2,5\n", "a: 1\nb: 2,5"),
        ("a;b;c\n1,5;2,5;x\n2,5;3,5;y\n", "a: 1,5\nb: 2,5\nc: x"),
        ("a\tb\nx, y\tz\n", "a: x, y\nb: z"),
        ("a|b\n1|2\n", "a: 1\nb: 2"),
        ("title\nonly one, with commas\n", "title: only one, with commas"),
        ("\na;b\n1;2,5\n", "a: 1\nb: 2,5"),
        ('"a\nname",b\n1,2\n', "a name: 1\nb: 2"),
        ("sep=\t\na\tb\n1,5\t2\n", "a: 1,5\nb: 2"),
        ("Article;Price, net\nPump;12,50\nValve;3,20\n", "Article: Pump\nPrice, net: 12,50"),
        ("Exported 1 May\nname,price\npump,12\nvalve,3\n", "Exported 1 May"),
        ("Questions\nWhy, then?\nWhat, if not?\n", "Questions: Why, then?"),
        ("Betrag\n1,20\n2,50\n", "Betrag: 1,20"),
        ("Stadt\nBerlin,DE\nParis,FR\n", "Stadt: Berlin,DE"),
    ],
)
def test_csv_of_any_dialect(tmp_path, content, row):
    (tmp_path / "a.csv").write_text(content)
    assert parse(tmp_path / "a.csv")["parts"][0][0] == row


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (
            "2024-01-03,Rent,870.00\n2024-02-03,Rent,985.00\n",
            ["2024-01-03 | Rent | 870.00", "2024-02-03 | Rent | 985.00"],
        ),
        ("Company,Acme\nPhone,4711\nVAT,DE12\n", ["Company | Acme", "Phone | 4711", "VAT | DE12"]),
        ("EUR,2024,2025\nRent,870,985\n", ["EUR: Rent\n2024: 870\n2025: 985"]),
        ("Name,1,2\nAda,8,7\n", ["Name: Ada\n1: 8\n2: 7"]),
        ("pump,1\nvalve,3\n", ["pump | 1", "valve | 3"]),
        ("Hour,0,6,12\nMon,3,4,5\n", ["Hour: Mon\n0: 3\n6: 4\n12: 5"]),
        ("Level,60%,70%\nA,2,3\n", ["Level: A\n60%: 2\n70%: 3"]),
        ("State,Land,1/9/20,1/10/20\n,Peru,0,7\n", ["Land: Peru\n1/9/20: 0\n1/10/20: 7"]),
        ("Rent,2024-01-03,2024-02-03\nGas,2024-01-05,2024-03-05\n",
         ["Rent | 2024-01-03 | 2024-02-03", "Gas | 2024-01-05 | 2024-03-05"]),
        ("Oslo,59.9,10.7\nRome,41.9,12.5\n", ["Oslo | 59.9 | 10.7", "Rome | 41.9 | 12.5"]),
        ("Task,Tag,Tag,Days\nFix,ui,app,\nNew,ui,,5", ["Task: Fix\nTag: ui\nTag: app", "Task: New\nTag: ui\nDays: 5"]),
        ("item,price\nnut,ask\nbolt,5\npin,7\n",
         ["item: nut\nprice: ask", "item: bolt\nprice: 5", "item: pin\nprice: 7"]),
        ("who,dept,room\nBea,Sales,Room 4\n\nBob,Board,Oslo\nCid,IT,Room 7\n",
         ["who: Bea\ndept: Sales\nroom: Room 4", "who: Bob\ndept: Board\nroom: Oslo",
          "who: Cid\ndept: IT\nroom: Room 7"]),
        ("item,price,note\npump,5\n\nball,ask\npin,6,new\n",
         ["item: pump\nprice: 5", "item: ball\nprice: ask", "item: pin\nprice: 6\nnote: new"]),
        ("item,price\npump,5\n\nname,phone\nBob,4711\n", ["item: pump\nprice: 5", "name: Bob\nphone: 4711"]),
        ("item,price\npump,5\n\nValves\nball,6\n", ["item: pump\nprice: 5", "item: Valves", "item: ball\nprice: 6"]),
    ],
)  # fmt: skip
def test_which_rows_name_columns(tmp_path, content, rows):
    (tmp_path / "a.csv").write_text(content)
    assert [text for text, _ in parse(tmp_path / "a.csv")["parts"]] == rows


def test_tabs_separate_the_columns_of_a_tsv(tmp_path):
    (tmp_path / "a.tsv").write_text("City\tLat, Lon\nOslo\t59.9, 10.7\nRome\t41.9, 12.5, 3\n")
    assert parse(tmp_path / "a.tsv")["parts"][0][0] == "City: Oslo\nLat, Lon: 59.9, 10.7"
    assert notes_of(tmp_path / "a.tsv") == ""


def test_workbook(tmp_path):
    from openpyxl import Workbook

    workbook = Workbook()
    workbook.active.append(["name", "price"])
    workbook.active.append(["pump", 12.0])
    workbook.create_sheet("Other").append(["single"])
    workbook.save(tmp_path / "a.xlsx")
    assert parse(tmp_path / "a.xlsx")["parts"] == [
        ("Sheet: Sheet\nname: pump\nprice: 12", "Sheet, row 2"),
        ("Sheet: Other\nsingle", "Other, row 1"),
    ]


def test_a_workbook_that_gives_a_wrong_size_is_read_whole(tmp_path):
    write_xlsx(tmp_path / "right.xlsx", [["name", "price"], ["pump", 12]])
    with (
        zipfile.ZipFile(tmp_path / "right.xlsx") as right,
        zipfile.ZipFile(tmp_path / "a.xlsx", "w") as wrong,
    ):
        for name in right.namelist():
            wrong.writestr(name, right.read(name).replace(b'<dimension ref="A1:B2"', b'<dimension ref="A1"'))
    assert parse(tmp_path / "a.xlsx")["parts"] == [("name: pump\nprice: 12", "row 2")]


@pytest.mark.parametrize(
    ("rows", "merged", "texts"),
    [
        (
            [["region", "city", "sales"], ["North", "York", 5], [None, "Leeds", 6], ["South", "Bath", 7]],
            ["A2:A3"],
            [
                "region: North\ncity: York\nsales: 5",
                "region: North\ncity: Leeds\nsales: 6",
                "region: South\ncity: Bath\nsales: 7",
            ],
        ),
        (
            [["product", 2023, None, 2024], [None, "sales", "cost", "sales", "cost"], ["pump", 1, 2, 3, 4]],
            ["A1:A2", "B1:C1", "D1:E1"],
            ["product: pump\n2023 sales: 1\n2023 cost: 2\n2024 sales: 3\n2024 cost: 4"],
        ),
        (
            [["Prices"], [], ["name", "unit", "price"], ["all", None, 5], ["pump", "m", 6]],
            ["A1:C2", "A4:B4"],
            ["Prices", "name: all\nprice: 5", "name: pump\nunit: m\nprice: 6"],
        ),
    ],
)
def test_merged_cells_of_a_sheet(tmp_path, rows, merged, texts):
    path = write_xlsx(tmp_path / "a.xlsx", rows, merged)
    assert [text for text, _ in parse(path)["parts"]] == texts


def test_lines_above_a_table_are_not_its_header(tmp_path):
    """A title became the first column's name, and the real names a row."""
    rows = [
        ["Prices 2024"],
        ["printed", "1 May"],
        [],
        ["code", "name", "unit", "price"],
        ["K1", "pump", "m", 12],
    ]
    assert parse(write_xlsx(tmp_path / "a.xlsx", rows))["parts"] == [
        ("Prices 2024", "row 1"),
        ("printed, 1 May", "row 2"),
        ("code: K1\nname: pump\nunit: m\nprice: 12", "row 5"),
    ]


def test_slides(tmp_path):
    from pptx import Presentation
    from pptx.oxml.ns import qn

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[1])
    slide.shapes.title.text = "Harbour"
    slide.placeholders[1].text = "Area 10"
    for text, baseline in (("6", "30000"), (" m", "0"), ("2", "30%"), (", H", ""), ("2", "-25000")):
        run = slide.placeholders[1].text_frame.paragraphs[0].add_run()
        run.text = text
        run._r.get_or_add_rPr().set("baseline", baseline)
    end = slide.shapes.title.text_frame.paragraphs[0]._p.get_or_add_endParaRPr()
    end.append(end.makeelement(qn("a:sym"), {"typeface": "Wingdings"}))
    slide.notes_slide.notes_text_frame.text = "Ask the master."
    presentation.save(tmp_path / "a.pptx")
    assert parse(tmp_path / "a.pptx")["parts"] == [
        ("Harbour\nArea 10⁶ m², H₂\nNotes: Ask the master.", "slide 1")
    ]


def test_code_on_a_slide_keeps_its_indentation_and_bars(tmp_path):
    """`grep a | sort |` was read as `grep a | sort`."""
    from pptx import Presentation

    code = "if a:\v    run |\n| sort  # x\n|\n| a | b |"
    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    slide.shapes.add_textbox(0, 0, 99, 99).text_frame.text = code
    slide.notes_slide.notes_text_frame.text = "  "
    table = slide.shapes.add_table(2, 2, 0, 0, 99, 99).table
    for n, text in enumerate(("  Oslo", "a  b", "Rome", "c")):
        table.cell(*divmod(n, 2)).text = text
    presentation.save(tmp_path / "a.pptx")
    assert text_of(tmp_path / "a.pptx") == code.replace("\v", "\n") + "\n\nOslo | a b\nRome | c"


def test_slides_with_formulas_charts_and_diagrams(tmp_path):
    """A box with a formula was lost with all of its text, and so was a chart; one in three dimensions made the whole
    file unreadable.
    """
    from lxml import etree
    from pptx import Presentation
    from pptx.chart.data import CategoryChartData
    from pptx.enum.chart import XL_CHART_TYPE
    from pptx.opc.package import Part
    from pptx.opc.packuri import PackURI
    from pptx.oxml.ns import qn

    presentation = Presentation()
    slide = presentation.slides.add_slide(presentation.slide_layouts[6])
    shapes = slide.shapes
    box = shapes.add_textbox(0, 0, 99, 99)
    box.text_frame.text = "The limit is "
    formula = f"<a14:m xmlns:a14='{DRAWINGS}/2010/main' xmlns:m='{MATH}'>{FRACTION}</a14:m>"
    box.text_frame.paragraphs[0]._p.append(etree.fromstring(formula))
    choice = etree.fromstring(
        f"<mc:AlternateContent xmlns:mc='{COMPATIBLE}'><mc:Choice/><mc:Fallback/></mc:AlternateContent>"
    )
    box._element.addprevious(choice)
    choice[0].append(box._element)
    data = CategoryChartData()
    data.categories = ["Q1", "Q2"]
    data.add_series("Sales", (12.5, None))
    data.add_series("Cost", (1.1 + 2.2, 3))
    bars, diagram = (shapes.add_chart(XL_CHART_TYPE.COLUMN_CLUSTERED, 0, 0, 99, 99, data) for _ in range(2))
    plot = bars.chart._chartSpace.chart.plotArea.find(qn("c:barChart"))
    plot.tag = plot.tag.replace("barChart", "area3DChart")
    words = "<a:bodyPr/><a:p><a:r><a:t>Ask first</a:t></a:r></a:p>"
    text = (
        f"<x:dataModel xmlns:x='x' xmlns:a='{DRAWING}'><x:ptLst><x:pt><x:t>{words}</x:t></x:pt></x:ptLst>"
        "</x:dataModel>"
    )
    part = Part(
        PackURI("/ppt/diagrams/data1.xml"), "application/xml", presentation.part.package, text.encode()
    )
    frame = diagram._element.graphic.graphicData
    frame.remove(frame[0])
    frame.append(
        etree.fromstring(f"<relIds xmlns:r='{OFFICE}' r:dm='{slide.part.relate_to(part, 'diagramData')}'/>")
    )
    (tmp_path / "a.pptx").write_text("x")
    shapes.add_ole_object(str(tmp_path / "a.pptx"), "Package", 0, 0)
    presentation.save(tmp_path / "a.pptx")
    assert notes_of(tmp_path / "a.pptx") == "charts or objects on these slides were not read: 1"
    assert text_of(tmp_path / "a.pptx") == (
        "The limit is (a+b)/2\n\nQ1\nSales: 12.5\nCost: 3.3\n\nQ2\nCost: 3\n\nAsk first"
    )


def odt(path, body):
    """An ODT with this body, and with styles `up`, `shared`, `low` and `plain`; headers have a `plain`, too."""
    names = {"office": "office", "text": "text", "table": "table", "draw": "drawing", "style": "style"}
    spaces = [
        f'xmlns:{prefix}="urn:oasis:names:tc:opendocument:xmlns:{name}:1.0"' for prefix, name in names.items()
    ]
    style = (
        "<style:style style:name='{}'><style:text-properties style:text-position='{}'/></style:style>".format
    )
    styles = style("up", "super 58%") + style("low", "-33% 58%") + style("plain", "0% 100%")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        archive.writestr(
            "styles.xml",
            f"<office:document-styles {' '.join(spaces)}><office:styles>{style('shared', 'super')}</office:styles>"
            f"<office:automatic-styles>{style('plain', 'super')}</office:automatic-styles></office:document-styles>",
        )
        archive.writestr(
            "content.xml",
            f"<office:document-content {' '.join(spaces)} xmlns:dc='http://purl.org/dc/elements/1.1/'>"
            f"<office:automatic-styles>{styles}</office:automatic-styles><office:body><office:text>{body}"
            "</office:text></office:body></office:document-content>",
        )
    return path


def odt_cells(*cells):
    row = "".join(f"<table:table-cell>{cell}</table:table-cell>" for cell in cells)
    return f"<table:table><table:table-row>{row}</table:table-row></table:table>"


ODT_NOTE = (
    "<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>Net.</text:p></text:note-body>"
    "</text:note>"
)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("<text:h>Tides</text:h><text:p>High<text:s/>at<text:tab/>nine.</text:p>", "Tides High at nine."),
        (f"<text:p>The fee is 400{ODT_NOTE} crowns.</text:p>", "The fee is 400 (Net.) crowns."),
        (
            "<text:p>400<office:annotation><dc:creator>Ada</dc:creator><dc:date>2024</dc:date><text:p>Check.</text:p>"
            "</office:annotation></text:p>",
            "400 (Check.)",
        ),
        (odt_cells("<text:p>10</text:p><text:p>15</text:p>", "<text:p>b</text:p>"), "10 15 | b"),
        (
            odt_cells(
                "<text:list>" + "<text:list-item><text:p>a 1</text:p></text:list-item>" * 2 + "</text:list>"
            ),
            "a 1 a 1",
        ),
        (
            "<text:p>Fee 12<draw:frame><draw:text-box><text:p>Boxed 5</text:p></draw:text-box></draw:frame>7</text:p>",
            "Fee 12 Boxed 5 7",
        ),
        (
            "<text:p>10<text:span text:style-name='up'>6</text:span> H<text:span text:style-name='low'>2</text:span>"
            "<text:span text:style-name='plain'>3</text:span> m<text:span text:style-name='shared'>2</text:span>"
            "</text:p>",
            "10⁶ H₂3 m²",
        ),
        (
            "<table:table><table:table-row><table:table-cell table:number-rows-spanned='2'><text:p>North</text:p>"
            "</table:table-cell><table:table-cell><text:p>York</text:p></table:table-cell></table:table-row>"
            "<table:table-row><table:covered-table-cell/><table:table-cell><text:p>Leeds</text:p></table:table-cell>"
            "</table:table-row></table:table>",
            "North | York North | Leeds",
        ),
        (odt_cells("<text:p>outer</text:p>" + odt_cells("<text:p>inner</text:p>")), "outer inner"),
        (
            "<text:section text:display='none'><text:p>hidden</text:p></text:section><text:p>shown</text:p>"
            "<text:tracked-changes><text:p>deleted</text:p></text:tracked-changes>",
            "shown",
        ),
    ],
    ids=[
        "text",
        "note",
        "comment",
        "paragraphs of a cell",
        "list",
        "box",
        "raised",
        "merged",
        "nested",
        "hidden",
    ],
)
def test_opendocument(tmp_path, body, wanted):
    assert " ".join(text_of(odt(tmp_path / "a.odt", body)).split()) == wanted


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("a.rtf", r"{\rtf1\ansi The d\'e9p\'f4t is \b open\b0.}", "The dépôt is open."),
        (
            "a.rtf",
            r"{\rtf1 Price {\deleted 300}{\revised 400}{\v secret}, \v hidden\v0 on.}",
            "Price 400, on.",
        ),
        (
            "a.rtf",
            r"{\rtf1 The fee is 400{\super\chftn}{\footnote \pard\plain {\super\chftn} Net {\b of} tax.} crowns.}",
            "The fee is 400 (Net of tax.) crowns.",
        ),
        ("a.rtf", r"{\rtf1{\listtext 1.\tab}Open\par{\pntext 2.\tab}Close}", "1.\tOpen\n2.\tClose"),
        (
            "a.rtf",
            r"{\rtf1\ansi\ansicpg1252\deff0{\fonttbl{\f1\fcharset204{\*\fname A;}Arial Cyr;}{\f2\fcharset2 Symbol;}"
            r"{\f3\fcharset2 Wingdings;}}{\f1 \'ca\'eb, \u1042\'c2\'e0} caf\'e9 {\f2 \'a3}5 \f3 \'fe}",
            "Кл, Ва café ≤5 ☑",
        ),
        (
            "a.rtf",
            r"{\rtf1 10{\fs9\super\lang9 6} m, x\super 2\nosupersub 0, CO\sub 2\nosupersub, \super\nosupersub 5.}",
            "10⁶ m, x²0, CO₂, 5.",
        ),
        (
            "a.rtf",
            r"{\rtf1{\f0 Copy it to D:\\data\\sub\\files please.}}",
            r"Copy it to D:\data\sub\files please.",
        ),
        (
            "a.rtf",
            r"{\rtf1 E:\\v one\\v0 and F:\\listtext {\v set \{x\}}or \\\v not\v0 so.}",
            r"E:\v one\v0 and F:\listtext or \so.",
        ),
        (
            "a.rtf",
            r"{\rtf1\ansi\ansicpg1252\deff0{\fonttbl{\f1\fcharset204 Arial Cyr;}}\f1 \'ca\plain  caf\'e9}",
            "К café",
        ),
        ("a.tex", r"10\textsuperscript{6} m and CO\textsubscript{2}", "10⁶ m and CO₂"),
        (
            "a.rst",
            "Tides\n=====\n\nHigh at *nine*.\n\n.. include:: /etc/hosts\n",
            "Tides\n\nHigh at nine.\n\n.. include:: /etc/hosts",
        ),
        (
            "a.rst",
            "Tides\n=====\n\n.. versionadded:: 3\n   Neaps too.\n",
            "Tides\n\n.. versionadded:: 3\n   Neaps too.",
        ),
        (
            "a.rst",
            ".. glossary::\n\n   neap\n      A small tide.\n",
            ".. glossary::\n\n   neap\n      A small tide.",
        ),
        ("a.rst", "a. Open\nb. Close\n\n- x\n", "a. Open\n\nb. Close\n\n- x"),
        ("a.rst", "See :func:`open` and |tides|.\n", "See :func:`open` and |tides|."),
        ("a.rst", f"{'word ' * 3000}end.\n", f"{'word ' * 3000}end."),
        (
            "a.org",
            "* TODO Tides :sea:\nDEADLINE: <2024-05-01>\n:PROPERTIES:\n:COST: 400\n:END:\nHigh at [[http://a.b][nine]].\n",
            "* TODO Tides :sea:\nDEADLINE: <2024-05-01>\n:PROPERTIES:\n:COST: 400\n:END:\nHigh at nine.",
        ),
        (
            "a.tex",
            "\\documentclass{x}\\begin{document}High at \\emph{nine}: $x^2$.\\end{document}",
            "High at nine: $x^2$.",
        ),
        (
            "a.tex",
            r"\verb|ls| of \mbox{10} \texttt{a} \textsc{files}, \SI{12.5}{\km\per\hour}",
            "ls of 10 a files, 12.5 km per hour",
        ),
        ("a.tex", r"See \href{http://example.org}{the site}.\label{sites}", "See the site."),
        ("a.tex", r"\multirow{2}{*}{North} \multicolumn{2}{c}{Total}", "North Total"),
        (
            "a.tex",
            "\\newcommand{\\fee}{400}%\\def\\fee{300}\nThe fee is \\fee{} or $2\\fee$.",
            "The fee is 400 or $2400$.",
        ),
        (
            "a.tex",
            r"\usepackage[x]{y}\newcommand{\R}[1]{\mathbf{#1}}\newcommand\x[2][a]{#1 #2}\selectlanguage{german}"
            r"\hypersetup{pdftitle={Tides}}\definecolor{mine}{RGB}{1,2,3}"
            r"\newenvironment{e}{\bf}{\rm}\label{a}\setcounter{a}{1}High \textsf{at} nine.",
            "High at nine.",
        ),
        ("a.tex", r"\pounds 5 for 10\textsuperscript{6} of H\textsubscript{2}O", "£ 5 for 10⁶ of H₂O"),
        (
            "a.ipynb",
            '{"cells": [{"cell_type": "markdown", "source": ["# Tides"]}, {"cell_type": "code", "source": "1 + 1", '
            '"outputs": [{"data": {"text/plain": "2"}}]}]}',
            "# Tides\n\n```\n1 + 1\n```\n\n```\n2\n```",
        ),
    ],
)
def test_further_formats(tmp_path, name, content, wanted):
    (tmp_path / name).write_text(content)
    assert text_of(tmp_path / name) == wanted


def test_mail(tmp_path):
    message = EmailMessage()
    message["From"], message["Subject"] = "Ada <ada@example.org>", "Schlüssel"
    message.set_content("It hangs behind the door.")
    message.add_attachment(b"x", maintype="application", subtype="pdf", filename="plan.pdf")
    (tmp_path / "a.eml").write_bytes(message.as_bytes())
    text = (
        "From: Ada <ada@example.org>\nSubject: Schlüssel\nAttachments: plan.pdf\n\nIt hangs behind the door."
    )
    assert parse(tmp_path / "a.eml")["parts"] == [(text, "")]
    (tmp_path / "a.mbox").write_bytes(b"".join(b"From a\n" + message.as_bytes() + b"\n\n" for _ in range(2)))
    assert parse(tmp_path / "a.mbox")["parts"] == [(text, "message 1"), (text, "message 2")]


def test_mail_of_several_texts(tmp_path):
    """The text behind a picture was named as an attachment, of an empty plain text with HTML nothing was read, and what
    is attached to an inner message was not named. Of alternatives without a text only their container was named.
    """
    message = EmailMessage()
    message.set_content("It hangs")
    message.add_attachment(b"x", maintype="image", subtype="png", filename="door.png", disposition="inline")
    message.add_attachment("behind the door.", disposition="inline")
    last = EmailMessage()
    last.set_content(" \n")
    last.add_alternative("<p>The fee is <b>400</b>.", subtype="html")
    message.attach(last)
    inner = EmailMessage()  # as programs forward a message
    inner.set_content("It is new.")
    inner.add_attachment(b"x", maintype="application", subtype="pdf", filename="key.pdf")
    message.attach(inner)
    event = EmailMessage()
    event.set_content("BEGIN:VEVENT", subtype="calendar", filename="tea.ics")
    event.add_alternative(b"x", maintype="application", subtype="pdf", filename="tea.pdf")
    message.attach(event)
    (tmp_path / "a.eml").write_bytes(message.as_bytes())
    texts = ["It hangs", "behind the door.", "The fee is 400.", "It is new."]
    text = "\n\n".join(["Attachments: door.png, key.pdf, tea.ics, tea.pdf", *texts])
    assert parse(tmp_path / "a.eml")["parts"] == [(text, "")]


@pytest.mark.parametrize(
    ("charset", "data", "text", "note"),
    [
        (b"; charset=iso-8859-8-i", "שלום, הנה המפתח למחסן".encode("iso8859-8"), "המפתח", "guessed: Windows-1255"),
        (b"; charset=x-sjis", "鍵はドアの後ろに掛かっている。".encode("cp932"), "鍵はドア", "guessed: CP932"),
        (b"; charset=base64", b"the key", "the key", ""),
        (b"; charset=iso-8859-1", "2010–2015 for 5 €".encode("cp1252"), "2010–2015 for 5 €", ""),
        (b"; charset=us-ascii", "Schlüssel".encode(), "Schlüssel", ""),
        (b"; charset=utf-8", b"Le caf\xe9 de la gare est ferm\xe9.", "café", "guessed: Windows-1252"),
        (b"", "Schlüssel".encode(), "Schlüssel", ""),
        (b"\nContent-Transfer-Encoding: base64", b64encode(bytes(range(256))), "", "fits no encoding"),
    ],
)  # fmt: skip
def test_mail_whose_encoding_is_unknown_missing_or_wrong_is_guessed(tmp_path, charset, data, text, note):
    """One message with an encoding that Python does not know made the whole mailbox unreadable."""
    odd = b"From a\nSubject: odd\nContent-Type: text/plain" + charset + b"\n\n" + data
    (tmp_path / "a.mbox").write_bytes(odd + b"\n\nFrom b\nSubject: next\n\nIt is read.\n")
    (first, _), (second, _) = parse(tmp_path / "a.mbox")["parts"]
    assert text in first and "\ufffd" not in first and second == "Subject: next\n\nIt is read."
    assert note in notes_of(tmp_path / "a.mbox") and bool(note) == bool(notes_of(tmp_path / "a.mbox"))


def test_pdf_form_values_are_read_and_those_that_are_no_text_are_left_out(tmp_path):
    """A signature's bytes stood in the text of signed documents."""
    from pypdf.generic import ArrayObject, DictionaryObject, NameObject, TextStringObject

    writer = PdfWriter(clone_from=write_pdf(tmp_path / "plain.pdf", ["Signed by the harbour master."]))
    signature = DictionaryObject({NameObject("/Contents"): TextStringObject("x82x00")})
    listed = ArrayObject([TextStringObject("oak"), TextStringObject("elm")])
    boat, empty = TextStringObject("Seagull"), TextStringObject("")
    for name, value in (("Boat", boat), ("Signature1", signature), ("Wood", listed), ("Empty", empty)):
        field = {"/Subtype": NameObject("/Widget"), "/T": TextStringObject(name), "/V": value}
        widget = DictionaryObject({NameObject(key): each for key, each in field.items()})
        writer.pages[0].setdefault(NameObject("/Annots"), ArrayObject()).append(widget)
    writer.write(tmp_path / "a.pdf")
    assert text_of(tmp_path / "a.pdf") == "Signed by the harbour master.\nBoat: Seagull\nWood: oak, elm"


def test_pdf_buttons_and_choices_are_read_as_the_page_shows_them(tmp_path):
    """A group of three buttons had its value three times, and a choice its number in the list."""
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(tmp_path / "a.pdf"))
    form = canvas.acroForm
    for at, size in enumerate(("small", "large", "huge")):
        form.radio(name="size", value=size, selected=size == "large", x=50 + 30 * at, y=700)
    form.checkbox(name="agree", checked=True, x=50, y=650)
    form.checkbox(name="news", checked=False, x=80, y=650)
    form.choice(
        name="city", options=[("Oslo", "1"), ("Rome", "2")], value="2", x=50, y=600, width=80, height=20
    )
    canvas.showPage()
    canvas.save()
    assert text_of(tmp_path / "a.pdf") == "size: large\nagree: Yes\ncity: Rome"


TABLE = [
    ["Event", "Excess", "Remarks"],
    ["Fire", "£100", "Scorching without flames\nis excluded"],
    ["Escape of water from burst\nor leaking pipes", "£325", ""],
    ["Returned premium", "-£20", "-"],
]


SPANS = [["Region", "City", "Sales"], ["North", "York", "5"], ["", "Leeds", "6"], ["South", "Bath", "7"]]


def write_table(path, rows, after="Section 4 follows.", **ruled):
    from reportlab.lib.styles import getSampleStyleSheet
    from reportlab.platypus import Paragraph, SimpleDocTemplate, Table, TableStyle

    style = getSampleStyleSheet()["Normal"]
    grid = TableStyle([("GRID", (0, 0), (-1, -1), 0.5, "black")] if ruled.get("grid", True) else [])
    for cells in ruled.get("merged", ()):
        grid.add("SPAN", *cells)
    before, table = (
        Paragraph(ruled.get("before", "The excess is what you bear yourself."), style),
        Table(rows, colWidths=ruled.get("widths"), style=grid),
    )
    SimpleDocTemplate(str(path)).build([before, table, Paragraph(after, style)])
    return path


def test_a_ruled_table_of_a_pdf_is_read_row_by_row(tmp_path):
    """A row of two lines in one cell and one in the next was three lines, in which no cell ended."""
    assert text_of(write_table(tmp_path / "a.pdf", TABLE)) == (
        "The excess is what you bear yourself.\n\n"
        "Event: Fire\nExcess: £100\nRemarks: Scorching without flames is excluded\n\n"
        "Event: Escape of water from burst or leaking pipes\nExcess: £325\n\n"
        "Event: Returned premium\nExcess: -£20\nRemarks: -\n\n"
        "Section 4 follows."
    )


@pytest.mark.parametrize(
    ("rows", "merged", "text"),
    [
        (SPANS, [((0, 1), (0, 2))], rows_as_text([*SPANS[:2], ["North", "Leeds", "6"], SPANS[3]])),
        (
            [
                ["Kind", "2024", "", "Sum"],
                ["", "Q1", "Q2", ""],
                ["Tea", "1", "2", "3"],
                ["Milk", "5", "6", "11"],
            ],
            [((0, 0), (0, 1)), ((1, 0), (2, 0))],
            "Kind: Tea\n2024 Q1: 1\n2024 Q2: 2\nSum: 3\n\nKind: Milk\n2024 Q1: 5\n2024 Q2: 6\nSum: 11",
        ),
        (
            [["Name of the boat", "", "Berth"], ["Gull", "", "12"], ["built", "1921", "wood"]],
            [((0, 0), (1, 0)), ((0, 1), (1, 1))],
            "Name of the boat | | Berth\nGull | | 12\nbuilt | 1921 | wood",
        ),
        (
            [
                ["Tenant", "", "Guarantor", ""],
                ["Name", "Ann", "Name", "Ben"],
                ["Phone", "12345", "Phone", "67890"],
            ],
            [((0, 0), (1, 0)), ((2, 0), (3, 0))],
            "Tenant | | Guarantor\nName | Ann | Name | Ben\nPhone | 12345 | Phone | 67890",
        ),
    ],
    ids=["rows", "names", "form", "pairs"],
)
def test_merged_cells_of_a_pdf(tmp_path, rows, merged, text):
    path = write_table(tmp_path / "a.pdf", rows, merged=merged, before="Before.", after="After.")
    assert text_of(path) == f"Before.\n\n{text}\n\nAfter."


def test_cells_of_one_digit_are_cells(tmp_path):
    """On a page of few words they were read as `Ajax512`."""
    rows = [["Team", "Won", "Lost", "Drawn"], ["Ajax", "5", "1", "2"], ["Bohemia", "12", "3", "4"]]
    text = "Team: Ajax\nWon: 5\nLost: 1\nDrawn: 2\n\nTeam: Bohemia\nWon: 12\nLost: 3\nDrawn: 4"
    assert text in text_of(write_table(tmp_path / "a.pdf", rows, before="Before.", after="After."))


NAMED = [["Kind", "Pack", "Price"], ["Sturon", "250 g", "£3.45"], ["Red Baron", "", "£3.85"]]
NAMED_TEXT = "Kind: Sturon\nPack: 250 g\nPrice: £3.45\n\nKind: Red Baron\nPrice: £3.85"


def lines(*rows):
    return "\n".join(" | ".join(row).rstrip() for row in rows)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (NAMED, NAMED_TEXT),
        ([["EUR", "2024", "2025"], ["Rent", "870", "985"], ["Gas", "60", "71"]],
         "EUR: Rent\n2024: 870\n2025: 985\n\nEUR: Gas\n2024: 60\n2025: 71"),
        ([["Area", "Q1", "Q2"], ["North", "12", "14"], ["South", "9", "8"]],
         "Area: North\nQ1: 12\nQ2: 14\n\nArea: South\nQ1: 9\nQ2: 8"),
        # No names: the table goes on from the page before, or has too few rows or columns.
        (rows := [["E52", "Too hot", "Wait 45 minutes"], ["E61", "Too cold", "Call"], ["E64", "Fault", "Call"]],
         lines(*rows)),
        (rows := [["1", "Book A4", "£11.40"], ["2", "Book A5", "£7.85"], ["3", "Thread", "£3.70"]], lines(*rows)),
        (rows := [["Stop", "1", "2"], ["Mill Lane", "06:09", "06:54"], ["Quay", "06:14", "06:59"]], lines(*rows)),
        (rows := [["Item", "Limit"], ["Cash", "£400"], ["Food", "£300"]], lines(*rows)),
        (rows := [["Kind", "Pack", "Price"], ["Sturon", "250 g", "£3.45"]], lines(*rows)),
        (rows := [["Kind", "Kind", "Price"], ["a", "b", "c"], ["d", "e", "f"]], lines(*rows)),
        # No row of data names columns that share a name: no cell spans them.
        (rows := [["Name", "Phone", "Name", "Phone"], ["Anna", "n/a", "Ben", "n/a"], ["Carl", "123", "Dora", "456"]],
         lines(*rows)),
        (rows := [["-", "-", "-"], ["a", "b", "c"], ["1", "2", "3"]], lines(*rows)),
    ],
)  # fmt: skip
def test_rows_below_a_row_of_names_are_read_with_them(tmp_path, rows, text):
    """Of 20 questions about tables' rows a 0.5B answered 7 right where the names stood above, and 11 with them."""
    assert rows_as_text(rows) == text
    cells = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    (tmp_path / "a.html").write_text(f"<p>Before.</p><table>{cells}</table><p>After.</p>")
    assert text_of(tmp_path / "a.html") == f"Before.\n\n{text}\n\nAfter."


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        (
            "<table><tr><th></th><th>Mon</th><th>Tue</th></tr><tr><td>Ada</td><td>early</td><td></td></tr>"
            "<tr><th>Eve</th><td></td><td>late</td></tr></table>",
            "Ada\nMon: early\n\nEve\nTue: late",
        ),
        (
            "<table><tr><td>Product</td><td>Supplier</td><td>Town</td></tr><tr><td colspan=3>Fruit</td></tr>"
            + "".join(
                f"<tr><td>{a}</td><td>{b} Ltd</td><td>T{a}</td></tr>"
                for a, b in zip("ABC", "DEF", strict=True)
            )
            + "</table>",
            "Product | Supplier | Town\nFruit\nA | D Ltd | TA\nB | E Ltd | TB\nC | F Ltd | TC",
        ),
        (
            "<table><tr><th>Name</th><td>Ada</td><th>Born in</th><td>Oslo</td></tr><tr><th>Height</th><td>170</td>"
            "<th>Weight</th><td>60</td></tr><tr><th>Eyes</th><td>blue</td><th>Hair</th><td>red</td></tr></table>",
            "Name | Ada | Born in | Oslo\nHeight | 170 | Weight | 60\nEyes | blue | Hair | red",
        ),
        ("<table><tr><td><pre>ls -l\n</pre></td><td>lists</td></tr></table>", "ls -l | lists"),
        (
            "<table><tr><th>Task<th>Code<th>Fee" + "<tr><td>Sort<td>a | sort<td>5" * 2 + "</table>",
            "\n\n".join(["Task: Sort\nCode: a | sort\nFee: 5"] * 2),
        ),
        ("<ul>" + "<li>Cook | Inn 1 | York</li>" * 3 + "</ul>", "\n".join(["- Cook | Inn 1 | York"] * 3)),
    ],
    ids=["names", "section rows", "pairs", "pre", "bar", "list"],
)
def test_html_tables(tmp_path, markup, text):
    (tmp_path / "a.html").write_text(markup)
    assert text_of(tmp_path / "a.html") == text


@pytest.mark.parametrize(
    ("head", "rows", "text"),
    [
        (
            "<tr><th rowspan=2>Kind<th colspan=2>Taste<tr><th>cold<th>hot",
            "<tr><td>Tea<td>bitter<td>sweet<tr><td>Milk<td>bland<td>rich",
            "Kind: Tea\nTaste cold: bitter\nTaste hot: sweet\n\nKind: Milk\nTaste cold: bland\nTaste hot: rich",
        ),
        (
            "<tr><th>Item<th>VAT<th>Net",
            "<tr><td>a<td rowspan=2>19%<td>10<tr><td>b<td>20",
            "Item: a\nVAT: 19%\nNet: 10\n\nItem: b\nVAT: 19%\nNet: 20",
        ),
        (
            "<tr><th>Day<th>Early<th>Late",
            "<tr><td>Mon<td>Ada<td>Bo<tr><td>Tue<td colspan=2>closed",
            "Day: Mon\nEarly: Ada\nLate: Bo\n\nDay: Tue\nEarly: closed",
        ),
        ("", "<tr><td rowspan=2>North<td>York<tr><td>Leeds", "North | York\nNorth | Leeds"),
        ("", "<tr><td colspan=3>Head<tr><td>a<td colspan=2>b", "Head\n\na | b"),
        (
            "",
            f"<tr><td rowspan=120>x<td>0{''.join(f'<tr><td>{n}' for n in range(1, 120))}",
            "\n".join(f"x | {n}" for n in range(120)),
        ),
        (
            "<tr><th>Name<th colspan='100%'>Marks",
            "<tr><td>Ada<td>1<td>2<tr><td>Bo<td>3<td>4",
            "Name | Marks\nAda | 1 | 2\nBo | 3 | 4",
        ),
        (
            "",
            "<tr><td rowspan=1000 colspan=2>x<td>y"
            * 40,  # each row was longer than the row above, and filled memory
            "x | | y\nx | | x | y" + "\nx | | x | x | y" * 38,
        ),
        (
            "",
            f"<tr><td rowspan=2><p>{'word ' * 80}end.<p>Second.<td>Title<tr><td>Below",
            f"{'word ' * 80}end.\n\nSecond.\n\nTitle\nBelow",
        ),
    ],
)
def test_cells_that_span_rows_and_columns(tmp_path, head, rows, text):
    """20 stood below `VAT`, and `Leeds` lost its region."""
    (tmp_path / "a.html").write_text(f"<table>{head}{rows}</table>")
    assert text_of(tmp_path / "a.html") == text


@pytest.mark.parametrize(
    ("rows", "is_merged", "wanted"),
    [
        (NAMED, False, NAMED_TEXT),
        (SPANS, True, rows_as_text([*SPANS[:2], ["North", "Leeds", "6"], SPANS[3]])),
    ],
)
def test_tables_of_word_and_slides_have_their_columns_names(tmp_path, rows, is_merged, wanted):
    import docx
    import pptx

    document, slides = docx.Document(), pptx.Presentation()
    slide = slides.slides.add_slide(slides.slide_layouts[6])
    shape = slide.shapes.add_table(len(rows), 3, 0, 0, 99, 99)
    for table in (document.add_table(len(rows), 3), shape.table):
        for row, values in zip(table.rows, rows, strict=True):
            for cell, value in zip(row.cells, values, strict=True):
                cell.text = value
        if is_merged:
            table.cell(1, 0).merge(table.cell(2, 0))
    document.save(tmp_path / "a.docx")
    slides.save(tmp_path / "a.pptx")
    assert text_of(tmp_path / "a.docx") == text_of(tmp_path / "a.pptx") == wanted


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("ls | grep x | wc\n" * 3, "pre"),
        ("Imprint | Terms | Help\nBack | Up | Top", "p"),
        ("a|b|c " * 4, "p"),
    ],
)
def test_other_lines_with_bars_stay(tmp_path, text, tag):
    (tmp_path / "a.html").write_text(f"<{tag}>{text.replace('Help', 'Help<br>')}</{tag}>")
    assert text_of(tmp_path / "a.html") == text.strip()


@pytest.mark.parametrize(
    "rows",
    [
        [["The harbour closes at nine.", "The lamps are lit at six."]],  # one row
        [["The harbour " * 30, "b"], ["c", "The lamps " * 20]],  # a page's layout
        [["a", "", ""], ["", "", ""], ["", "", "b"]],  # a chart's lines
    ],
    ids=["one row", "layout", "empty"],
)
def test_lines_that_make_no_table_leave_a_pdfs_text_as_it_is(tmp_path, rows):
    plain = text_of(write_table(tmp_path / "plain.pdf", rows, grid=False))
    assert text_of(write_table(tmp_path / "a.pdf", rows)) == plain and " | " not in plain


@pytest.mark.parametrize("above", [[], [["", "", ""]]], ids=["", "empty row"])
def test_a_table_that_goes_on_on_the_next_page_is_not_named_by_one_of_its_rows(tmp_path, above):
    rows = [["Fault", "Cause", "Remedy"], *([f"F{n}", f"Valve {n}", "Close it"] for n in range(20))]
    more = [
        ["Leak", "Valve", "Close tap"],
        ["Noise", "Drum 2", "Balance 2"],
        ["Heat", "Sensor 3", "Call 3"],
    ]
    writer = PdfWriter()
    for number, table in enumerate((rows, more)):
        writer.append(write_table(tmp_path / f"{number}.pdf", [*above, *table], widths=[100, 150, 150]))
    writer.write(tmp_path / "a.pdf")
    first, *_, last = [part for part, _ in parse(tmp_path / "a.pdf")["parts"]]
    assert "Fault: F0\nCause: Valve 0" in first and lines(*more) in last
    assert "Leak: Noise" in text_of(tmp_path / "1.pdf"), "alone it has names"


@pytest.mark.parametrize("error", [RuntimeError("damaged"), RecursionError()])
def test_a_page_that_pdfplumber_cannot_read_keeps_its_text(tmp_path, monkeypatch, error):
    def fails(page):
        raise error

    path = write_table(tmp_path / "a.pdf", TABLE)
    monkeypatch.setattr("pdfplumber.page.Page.find_tables", fails)
    assert "Event Excess Remarks\nFire £100\nScorching without flames\nis excluded" in text_of(path)


def page_table(rows):
    return PageTable([list(map(TableCell, row)) for row in rows])


def test_table_rows_replace_only_the_letters_that_they_have():
    table = [["Moles", "12"], ["Quays", "-"]]
    assert (
        with_table_rows("See: Moles 12\nQuays - \nEnd.", [page_table(table)])
        == "See:\n\nMoles | 12\nQuays | -\n\nEnd."
    )
    assert (
        with_table_rows("See: Moles 12\nQuays - \n", [page_table(table)] * 2)
        == "See:\n\nMoles | 12\nQuays | -"
    )
    assert with_table_rows("See: 12 Moles\nQuays", [page_table(table)]) == "See: 12 Moles\nQuays", (
        "in another order"
    )
    bars = [["|x|", "5"], ["Quays", "|y|"]]
    assert (
        with_table_rows("See: |x| 5\nQuays |y|\nEnd.", [page_table(bars)])
        == "See:\n\n|x| | 5\nQuays | |y|\n\nEnd."
    )
    text = "Call 1234 now.\n1 2\n3 4"
    assert with_table_rows(text, [page_table([["1", "2"], ["3", "4"]])]) == text, "at two places"
    assert with_table_rows("p. 12534", [page_table([["12", "5"], ["3", "4"]])]) == "p. 12534", "within a word"


def test_a_hyphen_at_a_pdfs_line_end_stays_before_a_digit_or_capital(tmp_path):
    """COVID-19 was read as COVID19."""
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(tmp_path / "a.pdf"))
    lines = (
        "From the har-",
        "bour to COVID-",
        "19, a T-",
        "Shirt, the non-",
        "EU states, THE OLD HAR-",
        "BOUR.",
    )
    for number, line in enumerate(lines):
        canvas.drawString(72, 700 - 14 * number, line)
    canvas.save()
    assert (
        text_of(tmp_path / "a.pdf")
        == "From the harbour to COVID-19, a T-Shirt, the non-EU states, THE OLD HARBOUR."
    )


@pytest.mark.parametrize("unmapped", ["\x01\x02\r\n\x03", "\x07", "\x0b\x0e", "T h e k e y " * 20])
def test_pdf_page_whose_letters_pdfium_cannot_map_is_read_by_pypdf(tmp_path, monkeypatch, unmapped):
    monkeypatch.setattr("pypdfium2.PdfTextPage.get_text_bounded", lambda page: unmapped)
    path = write_pdf(tmp_path / "a.pdf", ["The key hangs here."])
    assert text_of(path) == "The key hangs here." and "words may be divided on these pages" in notes_of(path)


@pytest.mark.parametrize(
    ("name", "found", "replacement", "wanted"),
    [
        ("b.opf", 'href="1.xhtml"', 'href="1.xhtml" properties="nav"', "Last."),  # a page of contents
        ("b.opf", "application/xhtml+xml", "text/x-oeb1-document", "Tides rise.\nLast."),
        ("b.opf", "application/xhtml+xml", "Application/XHTML+XML", "Tides rise.\nLast."),
        ("1.xhtml", "<title>One</title>", "<title/>", "Tides rise.\nLast."),
        ("1.xhtml", "Tides rise.", "<![CDATA[Tides < rise.]]>", "Tides < rise.\nLast."),
    ],
)
def test_book(tmp_path, name, found, replacement, wanted):
    chapters = [("1.xhtml", "One", "Tides rise."), ("2.xhtml", "Two", "Last.")]
    path = write_epub(tmp_path / "a.epub", chapters)
    with zipfile.ZipFile(path) as archive:
        members = {each: archive.read(each).decode() for each in archive.namelist()}
    assert found in members[f"OEBPS/{name}"]
    members[f"OEBPS/{name}"] = members[f"OEBPS/{name}"].replace(found, replacement)
    with zipfile.ZipFile(path, "w") as archive:
        for each, content in members.items():
            archive.writestr(each, content)
    assert text_of(path) == wanted


def test_every_format_has_a_reader_and_is_named_once():
    assert len(readers.FORMATS) == len({suffix.lower() for suffix in readers.FORMATS}) >= 20


def test_temporary_files_beside_documents_are_skipped_by_a_list(tmp_path):
    documents = ["report.docx", "notes.txt", "Äpfel.pdf"]
    temporary = [
        "~$report.docx",
        ".~lock.report.docx#",
        "report.docx.tmp",
        "film.pdf.part",
        "notes.txt~",
        "desktop.ini",
        ".hidden.txt",
        "__MACOSX",
    ]
    for name in documents + temporary:
        (tmp_path / name).write_text("x")
    found = discover([tmp_path])
    assert sorted(path.name for path in found.files) == sorted(documents)
    assert sorted(path.name for path in found.skipped) == sorted(temporary) and not found.failed
    found = discover([tmp_path], skip="NOTES*, *.tmp")
    assert {path.name for path in found.files} == {"report.docx", "Äpfel.pdf", "~$report.docx", ".hidden.txt"}
    assert discover([tmp_path / "~$report.docx"]).files, "the user's own choice"


@pytest.mark.parametrize(
    ("number", "number_format", "shown"),
    [
        (412.8, "#,##0.00", "412.80"),
        (412.8, "#,##0.00 [$€-407]", "412.80 €"),
        (-3.5, '_-* #,##0.00\\ "EUR"_-;[Red]-* #,##0.00', "-3.50 EUR"),
        (0.195, "0.0%", "19.5%"),
        (21.5, '0.0" °C"', "21.5 °C"),
        (812, "00000", "00812"),
        (2.5, "0.##", "2.5"),
        (2, "0.##", "2"),
        (3.0, "General", "3"),
        (0.25, "# ?/?", "0.25"),
        (1500, "0.00E+00", "1500"),
        (0.1 + 0.2, "General", "0.3"),
        (2.5, "0", "3"),
        (0.285, "0%", "29%"),
        (1.005, "0.00", "1.01"),
        (7, '"INV-"0000', "INV-0007"),
        (3, '"Q"0', "Q3"),
        (3, r"0\x", "3x"),
        (3, r"0\:00", "3"),
        (4.5, "[$CHF-807] #,##0.00", "CHF 4.50"),
        (-4.5, '_("$"* #,##0.00_)', "-$ 4.50"),
        (-0.05, "+0%;-0%", "-5%"),
        (5, '0"%"', "5%"),
        (1.5, "[>=1000]#,##0;0.00", "1.5"),
        (timedelta(hours=30), "[h]:mm", "30:00:00"),
        (0.35416666, "hh:mm", "08:30:00"),
        (0.999997, "hh:mm", "00:00:00"),
        (45352.604166664, "yyyy-mm-dd hh:mm", "2024-03-01 14:30:00"),
        (datetime(2024, 3, 1), "yyyy-mm-dd", "2024-03-01"),
    ],
)
def test_numbers_of_a_sheet_are_read_as_it_shows_them(tmp_path, number, number_format, shown):
    """A tax of 19% was read as 0.19, and 412.80 as 412.8."""
    write_xlsx(tmp_path / "a.xlsx", [["what", "amount"], ["fee", number]], B2=number_format)
    assert parse(tmp_path / "a.xlsx")["parts"] == [(f"what: fee\namount: {shown}", "row 2")]


def test_numbers_that_word_computes_are_read(tmp_path):
    """Statutes had neither `§ 2` nor `b)`: such numbers are in no text, only in the definition of their list."""
    from docx import Document
    from docx.oxml import parse_xml

    w = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'
    levels = (
        '<w:lvl w:ilvl="0"><w:numFmt w:val="decimal"/><w:pStyle w:val="Heading1"/><w:lvlText w:val="§ %1"/></w:lvl>',
        '<w:lvl w:ilvl="1"><w:start w:val="1"/><w:numFmt w:val="upperRoman"/><w:lvlText w:val="%1.%2"/></w:lvl>',
        '<w:lvl w:ilvl="2"><w:numFmt w:val="lowerLetter"/><w:lvlText w:val="%3)"/></w:lvl>',
    )
    document = Document()
    lists = document.part.numbering_part.element
    lists.insert(0, parse_xml(f'<w:abstractNum {w} w:abstractNumId="77">{"".join(levels)}</w:abstractNum>'))
    lists.append(parse_xml(f'<w:num {w} w:numId="77"><w:abstractNumId w:val="77"/></w:num>'))

    def add(text: str, style: str | None = None, level: str = "", list_id: int = 77) -> None:
        properties = document.add_paragraph(text, style=style)._p.get_or_add_pPr()
        properties.append(parse_xml(f'<w:numPr {w}>{level}<w:numId w:val="{list_id}"/></w:numPr>'))

    second, third = '<w:ilvl w:val="1"/>', '<w:ilvl w:val="2"/>'
    add("Name", "Heading 1")
    add("It is called Lindenhof.", level=second)
    add("Members", "Heading 1")
    add("These can be", level=second)
    add("persons", level=third)
    add("firms", level=third)
    add("Entry is by letter.", level=second)
    add("not numbered", "List Number", list_id=0)
    document.add_paragraph("a bullet", style="List Bullet")
    document.save(tmp_path / "a.docx")
    assert [(" ".join(text.split()), heading) for text, heading in parse(tmp_path / "a.docx")["parts"]] == [
        ("§ 1 Name 1.I It is called Lindenhof.", "§ 1 Name"),
        (
            "§ 2 Members 2.I These can be a) persons b) firms 2.II Entry is by letter. not numbered - a bullet",
            "§ 2 Members",
        ),
    ]
