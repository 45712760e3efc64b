"""Cutting documents: passages fit, have all text once, and have locations."""

import random
import re

import pytest

from ragblend.app.library import chunking
from ragblend.app.library.chunking import cut_document
from ragblend.app.library.readers import DocumentPart
from ragblend.kvstore.errors import OversizedDocumentError


def words(text):
    return len(text.split())


def cut(parts, chunk_tokens, count=words):
    return cut_document("d", parts, count, chunk_tokens)


def sentences(tag, count):
    return " ".join(f"This is sentence {tag}{n} of the text." for n in range(count))


@pytest.mark.parametrize(
    ("parts", "tokens", "found"),
    [
        ([("Same words here again.", f"p. {n}") for n in range(4)], 5, [f"p. {n}" for n in range(4)]),
        ([(sentences("a", 10), "")], 40, ["part 1 of 2", "part 2 of 2"]),
        # One from "Notes" over "Prices" to other "Notes" named one of them only.
        ([(f"{place} of it.", place) for place in ("Notes", "Prices", "Notes")], 40, ["Notes – Prices"]),
        # What also stands within the passage before it was located there, on the page before its own.
        (
            [("The bell rings. It is eight. The bell rings.", "p. 1"), ("The bell rings.", "p. 2")],
            9, ["p. 1", "p. 2"],
        ),
    ],
    ids=["repeated", "without a location", "over several sections", "repeated in longer text"],
)  # fmt: skip
def test_passages_are_located(parts, tokens, found):
    passages = cut([DocumentPart(*part) for part in parts], tokens)
    assert [passage.location for passage in passages] == found


def test_node_ids_survive_an_edit_elsewhere():
    before = cut([DocumentPart(sentences("a", 20), "")], 40)
    after = cut([DocumentPart(sentences("a", 20).replace("a19", "zz"), "")], 40)
    assert [p.node_id for p in before[:-1]] == [p.node_id for p in after[:-1]]
    assert before[-1].node_id != after[-1].node_id


@pytest.mark.parametrize("border", ["\n\n", "\n", " ", ""])
def test_long_text_is_split_in_blocks(monkeypatch, border):
    """What is tokenized and split at once does not grow with the text, which has no sentence that ends."""
    monkeypatch.setattr(chunking, "BLOCK_CHARACTERS", 200)
    monkeypatch.setattr(chunking, "MAX_TOKEN_CHARACTERS", 2)
    texts = {page: border.join(f"word{n:03}" for n in range(page, page + 60)) for page in (0, 60)}
    parts = [DocumentPart(text, f"p. {page}") for page, text in texts.items()]
    seen = []

    def count(piece):
        seen.append(len(piece))
        return len(piece) // 4 + 1

    passages = cut(parts, 20, count=count)
    assert max(seen) <= 40
    whole, found = ("".join("".join(each.text for each in one).split()) for one in (parts, passages))
    assert found == whole
    assert {"p. 0", "p. 60"} <= {passage.location for passage in passages}
    assert all(count(passage.text) <= 20 for passage in passages)


def test_the_passages_of_one_document_are_bounded(monkeypatch):
    monkeypatch.setattr(chunking, "MAX_PASSAGES", 3)
    with pytest.raises(OversizedDocumentError, match="more than 3 passages"):
        cut([DocumentPart(sentences("a", 40), "")], 40)


def test_sentence_splitting_has_no_deadline(monkeypatch):
    """NLTK's regular expressions give up after five seconds of the clock, with an OSError that ended the whole run."""
    redos = pytest.importorskip("nltk.redos")
    monkeypatch.setattr(redos, "DEFAULT_TIMEOUT", 1e-6)
    assert len(cut([DocumentPart(sentences("a", 2000), "")], 40)) > 300
    assert redos.DEFAULT_TIMEOUT == 1e-6, "for others it is as it was"


HEADER = "Boat | Berth | Owner"


def rows(count):
    return [f"Gull{n} | quay {n} | Ada Berg the {n}th" for n in range(count)]


@pytest.mark.parametrize("dashes", ["", "\n---|---|---"])
def test_rows_of_a_long_table_keep_their_header(dashes):
    """Only the passage with the first rows said what the columns are."""
    header = HEADER + dashes
    table = "\n".join(["All boats of the harbour", header, *rows(40)])
    text = f"{sentences('a', 3)}\n\n{table}\n\n{sentences('b', 3)}"
    passages = cut([DocumentPart(text, "Boats")], 60)
    of_table = [passage.text for passage in passages if "Gull" in passage.text]
    assert len(of_table) > 5 and all(words(text) <= 60 for text in of_table)
    assert all(text.index(header) < text.index("Gull") for text in of_table)
    found = [line for text in of_table for line in text.split("\n") if line.startswith("Gull")]
    assert found == rows(40), "each row once, in order"


def test_each_part_of_a_long_row_has_the_header():
    row = "Gull | " + " ".join(f"berth{n}" for n in range(200)) + " | Ada"
    passages = cut([DocumentPart("\n".join([HEADER, *rows(2), row]), "")], 60)
    assert len(passages) >= 4 and all(passage.text.startswith(HEADER) for passage in passages)
    assert [each for p in passages for each in re.findall(r"berth\d+", p.text)] == [
        f"berth{n}" for n in range(200)
    ]


def test_each_part_of_a_long_cell_has_its_name():
    """The second passage of a long text in a CSV file was without a column."""
    text = "\n".join(["Guest: Ada Berg", f"What they said: {sentences('a', 40)}", "Stars: 4"])
    passages = cut([DocumentPart("Guest: Bo\nStars: 3", "row 2"), DocumentPart(text, "row 3")], 60)
    said = [passage.text for passage in passages if "sentence" in passage.text]
    assert len(said) >= 4 and all(0 <= each.find("What they said: ") < each.find("sentence") for each in said)
    found = [each for passage in passages for each in re.findall(r"sentence a(\d+)", passage.text)]
    assert found == [str(n) for n in range(40)] and all(words(passage.text) <= 60 for passage in passages)


@pytest.mark.parametrize(
    "text",
    [
        "\n".join([HEADER, *rows(4)]),  # fits
        "\n".join(["cat a | grep b", *(f"line {n} of a program that has one pipe" for n in range(40))]),
        "\n".join([" | ".join(f"column{n}" for n in range(16)), *rows(20)]),  # a header of most of a passage
    ],
)
def test_no_header_is_repeated_where_none_is_needed(text):
    first = text.split("\n")[0]
    assert sum(first in passage.text for passage in cut([DocumentPart(text, "")], 60)) == 1


def blank_counts(text):
    """Tokens as of byte-pair encodings: a long word with a blank before it is one token, without one it is two."""
    return sum(
        2 if len(piece) > 4 and not piece.startswith(" ") else 1
        for piece in re.findall(r" ?\w+|\s|[^\w\s]", text)
    )


def random_part(chance, number):
    """Prose, tables, endless words, scripts without blanks, odd white space: a part of a document."""
    prose = [
        "boat",
        "harbour",
        "ledgers.",
        "storm",
        "2,410",
        "Ferry!",
        "«quay»",
        "x" * 60,
        "(so)",
        "and",
        "  ",
        "\n",
    ]
    unspaced = "渡し船は港を出た。北の岸壁で待つ。ท่าเรืออยู่ทางเหนือ"

    def block():
        kind = chance.randrange(4)
        if kind == 0:
            return "\n".join([HEADER, *rows(chance.randrange(1, 60))])
        if kind == 1:
            return "".join(chance.choices(unspaced, k=chance.randrange(1, 200)))
        if kind == 2:
            return "".join(chance.choices("ab \t\n|.é\u0301", k=chance.randrange(1, 300)))
        return " ".join(chance.choices(prose, k=chance.randrange(1, 200)))

    return DocumentPart(
        "\n\n".join(block() for _ in range(chance.randrange(1, 5))).strip() or "x", f"p. {number}"
    )


@pytest.mark.parametrize("count", [words, len, blank_counts])
def test_no_passage_of_any_document_is_too_long(count):
    """Some had 513 of 512 tokens: a passage loses the blank before it, and its first word then was two tokens."""
    chance = random.Random(20)
    for _ in range(25):
        parts = [random_part(chance, number) for number in range(1, chance.randrange(2, 5))]
        limit = chance.randrange(40, 120)
        passages = cut(parts, limit, count)
        assert max(count(passage.text) for passage in passages) <= limit
        assert [passage.index for passage in passages] == list(range(len(passages)))
        known = {part.location for part in parts}
        assert all(set(passage.location.split(" – ")) <= known for passage in passages)
        letters, found = (
            "".join("".join(each.text.split()) for each in texts).replace("".join(HEADER.split()), "")
            for texts in (parts, passages)
        )
        assert found == letters, "all text once, and no other"


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("am 9.", "Januar 2025"),
        ("in die Garage Nr.", "23"),
        ("zu Dr.", "Reinders"),
        ("in 2 Std.", "30 Min. an"),
    ],
)
def test_no_passage_ends_within_a_date_or_behind_an_abbreviation(begun, rest):
    """`am 9.` ended a passage, and the next one began with `Januar 2025`."""
    before = "Das Guthaben wird mit der Miete für April verrechnet."
    text = f"{before} Herr Kowalski kam {begun} {rest}. Er war nur einmal da."
    found = cut([DocumentPart(text, "")], words(f"{before} Herr Kowalski kam {begun}"))
    assert found[1].text.startswith(f"Herr Kowalski kam {begun} {rest}.")


def test_no_passage_ends_within_a_number_or_row():
    """What has no sentences, as a PDF's table, was cut at every comma and dot: `8.` and `412,60 EUR`."""
    rows = [f"Kosten {n} 8.412,{n} EUR 1.240,00 m²" for n in range(10, 40)]
    found = cut([DocumentPart("\n".join(rows), "p. 1")], 50)
    assert [row for passage in found for row in passage.text.split("\n")] == rows and len(found) > 3


@pytest.mark.parametrize("heading", ["Lifts", "## Lifts"])
def test_no_passage_ends_with_a_heading(heading):
    """The heading of the next passage's text was the end of the one before, which was located there, too."""
    parts = [("Minutes\n\nAll members were welcomed by the chair.", "Minutes")]
    parts += [(f"{heading}\n\nA lift for the house at the corner is built in May.", "Lifts")]
    found = cut([DocumentPart(*part) for part in parts], 14)
    assert found[1].text.startswith(f"{heading}\n\nA lift") and found[0].location == "Minutes"
