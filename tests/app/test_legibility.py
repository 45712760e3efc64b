"""Text that is no language is noticed, and everything else is left alone."""

import base64
import json
import random
from pathlib import Path

import pytest

from ragblend.app.library import readers
from ragblend.app.library.legibility import is_garbled
from ragblend.app.library.readers import read_document
from ragblend.app.library.text_recognition import TextRecognition
from ragblend.kvstore.errors import install_hint

# The Universal Declaration of Human Rights, article 1.
ENGLISH = (
    "All human beings are born free and equal in dignity and rights. They are endowed with reason and conscience and "
    "should act towards one another in a spirit of brotherhood. "
)
PROSE = {
    "english": ENGLISH,
    "german": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "czech": "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv. Jsou nadáni rozumem a svědomím a "
    "mají spolu jednat v duchu bratrství. Strč prst skrz krk.",
    "welsh": "Genir pawb yn rhydd ac yn gydradd â'i gilydd mewn urddas a hawliau. Fe'u cynysgaeddir â rheswm a "
    "chydwybod, a dylai pawb ymddwyn y naill at y llall mewn ysbryd cymodlon.",
    "vietnamese": "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền lợi. Mọi con người đều "
    "được tạo hóa ban cho lý trí và lương tâm và cần phải đối xử với nhau trong tình bằng hữu.",
    "russian": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и совестью "
    "и должны поступать в отношении друг друга в духе братства.",
    "greek": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. "
    "وقد وهبوا عقلاً وضميرًا وعليهم أن يعامل بعضهم بعضًا بروح الإخاء.",
    "hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है। "
    "उन्हें बुद्धि और अन्तरात्मा की देन प्राप्त है।",
    "thai": "มนุษย์ทั้งปวงเกิดมามีอิสระและเสมอภาคกันในศักดิ์ศรีและสิทธิ "
    "ต่างในตนมีเหตุผลและมโนธรรม และควรปฏิบัติต่อกันด้วยเจตนารมณ์แห่งภราดรภาพ",
    "chinese": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "japanese": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。"
    "PDFファイルをUSBメモリにコピーする。",
    "korean": "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다. "
    "인간은 천부적으로 이성과 양심을 부여받았다.",
}
DRAW = random.Random(7)
OTHER = {
    "code": Path(__file__).read_text(encoding="utf-8").partition("PROSE")[0]
    + Path(readers.__file__).read_text(),
    "C": "static int strncpy_s(char *dst, size_t n) { while (*dst++ && n--) printf(fmt, dst); return strcmp(x, y); }\n",
    "numbers": "\n".join(f"{n} {n * 37 % 1000 / 10:.2f} {n * n}" for n in range(100)),
    "csv": "id;qty;prc;sku\n" + "\n".join(f"{n};{n % 7};{n / 4};KXR-{n:05}" for n in range(100)),
    "base64": base64.encodebytes(DRAW.randbytes(3000)).decode(),
    "base64 in one line": base64.b64encode(DRAW.randbytes(3000)).decode(),
    "hexadecimal": DRAW.randbytes(2000).hex(),
    "genes": "".join(DRAW.choice("acgt") for _ in range(2000)),
    "formulas": "ΔE = ℏω − μ·B, ∂²u/∂t² = c²∇²u, α + β ≤ γ, ∑ᵢ xᵢ² ≈ 4π ε₀ kΩ, x ∈ ℝⁿ; 𝑎𝑥² + 𝑏𝑥 + 𝑐 = 0; λ = 500 nm. ",
    "TeX": r"\begin{align} \frac{\partial f}{\partial x_{ij}} &= \sum_{k} w_{k} \mathbb{R} \end{align} ",
    "a table of contents": "\n".join(f"{n}.{n} Chapter {n} {'. ' * 60}{n}" for n in range(30)),
    "addresses": "https://example.org/a/very/long/path?with=parameters&and=more#fragments\n",
    "German compounds": "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz und ähnliche Wörter. ",
    "bullets of a symbol font": "\uf0b7 The first of the points, in words.\n\uf0b7 The second one, which is longer.\n",
    "keys": json.dumps({f"key_{n}": {"id": n, "tz": "UTC", "xs": [n]} for n in range(60)}),
    "one word": "Hm.",
    "nothing": "",
}


def shifted(text, by):
    """As the glyph numbers of a TrueType font without a map: a constant from ASCII."""
    return "".join(chr(ord(letter) + by) for letter in text)


GARBAGE = {
    "no map: private use": "".join(chr(0xE000 + ord(letter)) for letter in ENGLISH * 2),
    "no map: numbers of glyphs": shifted(ENGLISH * 2, -29),
    "shifted letters with spaces": " ".join(shifted(word, 3) for word in (ENGLISH * 3).split()),
    "letters of another order": (ENGLISH * 3)
    .lower()
    .translate(str.maketrans("abcdefghijklmnopqrstuvwxyz", "qwertyuiopasdfghjklzxcvbnm")),
    "numbers taken for Unicode": "".join(chr(0x300 + DRAW.randrange(0x900)) for _ in range(400)),
    "replaced": "Die M\ufffd\ufffdwen \ufffd\ufffd\ufffdber dem \ufffd\ufffd\ufffd Flu\ufffd\ufffd. " * 5,
    "control characters": "\x02\x0f\x11 \x13\x14 words \x05\x06\x07" * 10,
    "no spaces": (ENGLISH * 4).replace(" ", ""),
    "no spaces, Russian": (PROSE["russian"] * 4).replace(" ", ""),
    "unassigned": "".join(chr(0x0C80 + DRAW.randrange(0x400)) for _ in range(300)),
}


@pytest.mark.parametrize("text", [*PROSE.values(), *OTHER.values()], ids=[*PROSE, *OTHER])
def test_no_language_and_no_notation_is_called_garbled(text):
    assert not is_garbled(text) and not is_garbled(text * 5)


@pytest.mark.parametrize("text", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_noticed(text):
    assert is_garbled(text)


@pytest.fixture
def pdf(tmp_path):
    """Three pages: text, text whose font has no map to letters and shows other ones, and nothing."""
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(tmp_path / "a.pdf"), pagesize=(500, 250))
    for text in (ENGLISH, GARBAGE["shifted letters with spaces"], ""):
        lines = canvas.beginText(20, 200)
        lines.textLines([text[at : at + 60] for at in range(0, len(text), 60)])
        canvas.drawText(lines)
        canvas.showPage()
    canvas.save()
    return tmp_path / "a.pdf"


def test_a_garbled_page_is_kept_and_noted_without_text_recognition(pdf, monkeypatch):
    monkeypatch.setattr(readers, "can_recognise", lambda: False)
    found = read_document(pdf)
    assert [part.location for part in found.parts] == ["p. 1", "p. 2"]
    assert found.notes == (
        "the text of these pages may be unreadable, as their fonts are broken: p. 2",
        f"these pages have no text, and were left out; if they are scans, `{install_hint('ocr')}`: p. 3",
    )


@pytest.mark.parametrize(
    ("picture", "says"), [("What a person sees.", "recognised from pictures"), ("", "unreadable")]
)
def test_a_garbled_page_is_read_from_its_picture_if_that_has_text(pdf, monkeypatch, picture, says):
    asked = []

    class Recognition(TextRecognition):
        def pages(self, path, numbers, on_page):
            asked.append((path, numbers))
            return [(2, picture), (3, "")]

    monkeypatch.setattr(readers, "can_recognise", lambda: True)
    found = read_document(pdf, recognition=Recognition())
    assert asked == [(pdf, [2, 3])]
    assert [part.location for part in found.parts] == ["p. 1", "p. 2"]
    assert (found.parts[1].text == picture) == bool(picture)
    (note,) = found.notes
    assert says in note and note.endswith(": p. 2")


@pytest.mark.parametrize("picture", ["What a person sees.", ""])
def test_a_scan_with_a_remark_is_read_from_its_picture_too(tmp_path, monkeypatch, picture):
    """A page with one remark was taken for a page of text: the rest of it was neither read nor noted."""
    from reportlab.pdfgen.canvas import Canvas

    canvas = Canvas(str(tmp_path / "a.pdf"))
    canvas.rect(50, 50, 100, 100)
    canvas.textAnnotation("Checked.", Rect=[50, 700, 70, 720])
    canvas.save()

    class Recognition(TextRecognition):
        def pages(self, path, numbers, on_page):
            return [(number, picture) for number in numbers]

    monkeypatch.setattr(readers, "can_recognise", lambda: bool(picture))
    found = read_document(tmp_path / "a.pdf", recognition=Recognition())
    assert [part.text for part in found.parts] == [f"{picture}\nNote: Checked.".strip()]
    assert found.notes[0].startswith(
        "the text of these pages was recog" if picture else "of these pages only remarks"
    )


def test_a_garbled_document_of_another_kind_is_noted(tmp_path):
    (tmp_path / "a.txt").write_text(GARBAGE["shifted letters with spaces"])
    assert read_document(tmp_path / "a.txt").notes == (
        "its text may be unreadable: it is not like that of any language",
    )
