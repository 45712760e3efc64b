"""Splitting a prompt into literals and chunks: no character is lost, and named passages are found first."""

import random

import pytest

from ragblend.engine.prompts.segments import Chunk, Literal
from ragblend.integrations.passages import Passage, PassageRegistry
from ragblend.integrations.resolve import segments, split_at_passages

HARBOUR = "The harbour was dredged in 1921 by the Ems company, who left the crane behind."
CRANE = "The crane on the north mole lifts nine tonnes and is painted green."


def resolve(*pieces_registry_and_named):
    return segments(split_at_passages(*pieces_registry_and_named))


@pytest.fixture
def registry(tmp_path):
    registry = PassageRegistry.open(tmp_path / "home")
    yield registry
    registry.close()


def text(words):
    return Literal(words, verbatim=True)


def test_passages_become_chunks_between_literals(registry):
    registry.add([Passage(HARBOUR, "h"), Passage(CRANE, "c")])
    prompt = f"Notes:\n{HARBOUR}\n\n{CRANE}{HARBOUR}\nWhy?"
    assert resolve([prompt], registry) == (
        text("Notes:\n"),
        Chunk(HARBOUR, "h"),
        text("\n\n"),
        Chunk(CRANE, "c"),
        Chunk(HARBOUR, "h"),
        text("\nWhy?"),
    )
    assert resolve([prompt], None) == (text(prompt),)
    assert resolve([], registry) == resolve(["", Passage("", "x")], registry) == ()


def test_named_passages_are_preferred_to_registered_ones(registry):
    registry.add([Passage(f"{HARBOUR} {CRANE}", "long"), Passage(CRANE, "c")])
    prompt = f"{HARBOUR} {CRANE} {CRANE}"
    assert resolve([prompt], registry)[0] == Chunk(f"{HARBOUR} {CRANE}", "long")
    named = [Passage(HARBOUR, "mine"), Passage("not in there, wherever one looks", "x"), Passage("", "empty")]
    assert resolve([prompt], registry, named) == (
        Chunk(HARBOUR, "mine"),
        text(" "),
        Chunk(CRANE, "c"),
        text(" "),
        Chunk(CRANE, "c"),
    )


def test_of_overlapping_and_nested_passages_the_longest_are_found(registry):
    text_of_both = f"{HARBOUR} {CRANE}"
    left, right, inside = text_of_both[:90], text_of_both[60:], text_of_both[95:120]
    for named in ([left, right, inside], [inside, right, left]):
        found = resolve([text_of_both], None, [Passage(each) for each in named])
        assert [each.text for each in found] == [left, text_of_both[90:95], inside, text_of_both[120:]]
    registry.add([Passage(f"{CRANE}\n" * count, f"{count} lines") for count in (1, 2, 1000)])
    found = resolve([f"{CRANE}\n" * 1003 + "Why?"], registry)
    assert [getattr(each, "node_id", None) for each in found] == ["1000 lines", "2 lines", "1 lines", None]


def test_short_named_passages_are_ignored(registry):
    prompt = "An answer is wanted, and an explanation of it."
    registry.add([Passage("an", "a")])
    assert resolve([prompt], registry, [Passage("an", "a"), Passage("is wanted", "b")]) == (text(prompt),)
    assert resolve([prompt], None, [Passage("answer is wanted", "c")])[1] == Chunk("answer is wanted", "c")


@pytest.mark.parametrize("seed", range(20))
def test_named_and_registered_passages_are_split_alike_and_no_character_is_lost(registry, seed):
    """They are found by different searches, which must agree."""
    chance = random.Random(seed)
    whole = "".join(chance.choices("ab\U0001f600\ud800", k=400))
    if seed % 2:
        whole = (whole[: chance.randint(1, 30)] * 400)[:400]
    starts = [chance.randrange(380) for _ in range(25)]
    passages = {whole[at : at + chance.randint(16, 60)]: str(n) for n, at in enumerate(starts)}
    known = [Passage(words, name) for words, name in passages.items() if len(words) >= 16]
    registry.add(known)
    cuts = sorted(chance.sample(range(400), 3))
    pieces = [
        whole[: cuts[0]],
        whole[cuts[0] : cuts[1]],
        Passage(whole[cuts[1] : cuts[2]], "p"),
        whole[cuts[2] :],
    ]
    segments = resolve(pieces, registry)
    assert "".join(segment.text for segment in segments) == whole
    assert sum(isinstance(segment, Chunk) for segment in segments) > 1
    assert all(segment.verbatim for segment in segments if isinstance(segment, Literal))
    assert resolve(pieces, None, known) == segments
    assert resolve(pieces, registry, known[::2] + known[1::2]) == segments
