"""Citations: numbers are found where they stand, made-up ones are flagged, and nothing is matched by accident."""

import pytest

from ragblend.app.citations import Citation, SourceRow, cite, snippet


def source(number, text):
    return SourceRow(number, f"n{number}", "d1", "default", "a.txt", "p. 1", 0.5, text)


SKY = source(1, "The sky over the harbour is blue in the morning.")
BOATS = source(2, "Three boats lie at the quay. The red boat belongs to Ada.")


def found(text, *sources):
    return [(c.number, text[c.start : c.stop], c.source, c.by) for c in cite(text, sources).citations]


def test_numbers_of_the_model():
    text = "It is blue [1]. Ada owns one [2][1]."
    assert found(text, SKY, BOATS) == [
        (1, "[1]", SKY, "model"),
        (2, "[2]", BOATS, "model"),
        (1, "[1]", SKY, "model"),
    ]


@pytest.mark.parametrize("text", ["Both say so [1, 2].", "Both say so [1;2]."])
def test_several_numbers_in_one_pair_of_brackets(text):
    assert [c.number for c in cite(text, [SKY, BOATS]).citations] == [1, 2]
    assert [p.number if isinstance(p, Citation) else p for p in cite(text, [SKY, BOATS]).pieces()] == [
        "Both say so ",
        1,
        2,
        ".",
    ]


def test_numbers_that_do_not_exist_are_flagged():
    cited = cite("It is blue [7]. So it is [0] [7].", [SKY])
    assert cited.unknown == (7, 0)
    assert all(citation.source is None for citation in cited.citations)


@pytest.mark.parametrize("text", ["see [a], [], [1 and x[i], 3] and [12345]", "plain", ""])
def test_other_brackets_are_text(text):
    assert cite(text, [SKY]).pieces() == ([text] if text else [])


def test_sentences_without_numbers_are_matched_by_their_words():
    text = "The red boat belongs to Ada. I do not know."
    assert found(text, SKY, BOATS) == [(2, "", BOATS, "match")]
    assert text[: cite(text, [SKY, BOATS]).citations[0].start] == "The red boat belongs to Ada."


def test_no_match_is_better_than_a_guess():
    assert found("Boats are blue.", SKY, BOATS) == [], "too few words stand in either"
    twin = source(3, BOATS.text)
    assert found("The red boat belongs to Ada.", BOATS, twin) == [], "two are as good"
    assert found("The red boat belongs to Ada.") == []
    assert found("The red boat belongs to Ada [9].", BOATS) == [(9, "[9]", None, "model")], "not corrected"


def test_a_run_of_sentences_from_one_source_is_marked_once():
    text = "Three boats lie at the quay. The red boat belongs to Ada."
    assert [(c.number, c.start) for c in cite(text, [SKY, BOATS]).citations] == [(2, len(text))]


def test_a_decimal_point_ends_no_sentence():
    prices = source(4, "The ferry costs 3.50 euros for each passenger and bicycle.")
    text = "The ferry costs 3.50 euros for each passenger."
    assert [(c.number, c.start) for c in cite(text, [prices]).citations] == [(4, len(text))]


@pytest.mark.parametrize(
    "text", ["[1] a [2] b", "a [1]", "The red boat belongs to Ada.", "[1][2]", "x [1, 9]. y"]
)
def test_pieces_lose_no_text(text):
    cited = cite(text, [SKY, BOATS])
    places = {(c.start, c.stop) for c in cited.citations}
    joined = "".join(piece for piece in cited.pieces() if isinstance(piece, str))
    numbers = sum(stop - start for start, stop in places)
    assert len(joined) + numbers == len(text)


def test_json_round_trip_and_unknown_keys_of_later_versions():
    assert SourceRow.from_json({**BOATS.to_json(), "later": 1}) == BOATS
    assert BOATS.plain.document == "a.txt"


def test_the_snippet_is_where_the_questions_words_are():
    text = "Nothing here. " * 40 + "The red boat belongs to Ada. " + "Nothing there. " * 40
    piece = snippet(source(1, text), "Who owns the red boat, Ada?", 60)
    assert "red boat belongs to Ada" in piece and piece.startswith("… ") and piece.endswith(" …")
    assert len(piece) <= 64
    assert snippet(SKY, "anything") == SKY.text
    assert snippet(source(1, "x" * 500), "q", 50).startswith("x")
