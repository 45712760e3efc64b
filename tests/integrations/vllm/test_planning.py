"""Whether fusing pays, the salts of prompts, and the slots of tokens."""

import pytest

from ragblend.engine.config import DEFAULT_RATIO
from ragblend.engine.prompts.segments import Chunk
from ragblend.integrations.vllm.finder import Match
from ragblend.integrations.vllm.planning import (
    MAX_ENCODED,
    FusionPlan,
    SaltCache,
    mark_boundaries,
    prompt_of,
    slots_of,
)
from ragblend.integrations.vllm.settings import ConnectorSettings, RequestOptions

PASSAGES = (Match(100, 500, tuple(range(400)), 0), Match(500, 900, tuple(range(400, 800)), 0))
ENCODE, RECOMPUTE = {"encode": True}, {"method": "recompute"}


def plan(*stored, given=None, matches=PASSAGES):
    spaces = tuple("default" if each else None for each in stored)
    return FusionPlan(RequestOptions.of(ConnectorSettings(), given, 1000), matches, spaces, 1000)


@pytest.mark.parametrize(
    ("stored", "given", "computed", "minimum", "should_fuse"),
    [
        ((True, True), None, 0, 64, True),
        ((False, False), None, 0, 64, False),
        ((True, True), None, 900, 64, False),  # vLLM has nearly all of it
        ((True, True), None, 0, 801, False),  # less is stored than required
        ((False, False), ENCODE, 0, 64, True),  # else nothing would be encoded
        ((False, False), ENCODE, 999, 64, True),  # though vLLM has all of it
        ((True, True), ENCODE, 900, 64, False),  # there is nothing to encode
        ((True, True), RECOMPUTE, 0, 64, True),  # a chosen method is used even where it saves nothing
        ((True, True), RECOMPUTE, 999, 64, False),  # the last token is vLLM's
    ],
)
def test_fusing_pays_where_it_saves_rows_or_was_asked_for(stored, given, computed, minimum, should_fuse):
    assert plan(*stored, given=given).should_fuse(computed, minimum) == should_fuse


def test_rows_of_a_step_are_those_of_the_prompt_and_of_passages_that_are_encoded():
    assert plan(True, True).step_rows == plan(True, True).computed_tokens == 1000 - 800 * (1 - DEFAULT_RATIO)
    assert plan(True, True, given=RECOMPUTE).computed_tokens == 1000
    assert plan(True, False, given=ENCODE).step_rows == 400 + 1000 - 800 * (1 - DEFAULT_RATIO)
    assert plan(True, True, given=ENCODE).saves_rows(0) and not plan(False, False, given=ENCODE).saves_rows(0)
    many = plan(*[False] * 20, given=ENCODE, matches=(Match(0, 40, tuple(range(40)), 0),) * 20)
    assert len(many.to_encode) == MAX_ENCODED and many.step_rows == 40 * 8 + 1000 - 40 * 8 * (
        1 - DEFAULT_RATIO
    )


def test_a_prompt_is_split_into_passages_and_literals():
    ids = list(range(3000, 3060))
    whole = (1, 2, *ids[10:40], 3)
    prompt = prompt_of(ids, [Match(10, 40, whole, 2)], ["mine"])
    assert list(prompt.token_ids) == ids and prompt.places == [(10, 40)]
    assert prompt.chunks == [Chunk(token_ids=tuple(ids[10:40]), collection="mine", whole=whole, skipped=2)]
    assert prompt.chunks[0].encoded_ids == whole
    (chunk,) = prompt_of(ids, [Match(10, 40, tuple(ids[10:40]), 0)], ["mine"]).chunks
    assert chunk.whole is None, "no part: it may be a node of a path"
    (chunk,) = prompt_of(ids, [Match(10, 40, whole, 2, "p1")], ["mine"]).chunks
    assert (chunk.node_id, chunk.entered) == ("p1", True), "its KV goes when the node does"


def test_only_the_same_prompt_fused_alike_has_the_same_salt():
    ids = list(range(100))
    first = SaltCache().salt_of(ids, "probe-shift 0.15")
    assert SaltCache().salt_of(ids, "probe-shift 0.15") == first
    others = [
        (ids, "probe-shift 0.3"),
        (ids, "reuse"),
        ([*ids[:-1], 7], "probe-shift 0.15"),
        (ids[:-1], "probe-shift 0.15"),
    ]
    assert first not in {SaltCache().salt_of(*other) for other in others}


def test_other_passages_in_the_same_prompt_give_another_salt():
    ids = list(range(100))

    def salt(*places, **more):
        return SaltCache().salt_of(
            mark_boundaries(ids, [Match(a, b, more.get("whole", tuple(ids[a:b])), 0) for a, b in places]), "m"
        )

    several = [
        salt(),
        salt((10, 40)),
        salt((10, 20), (20, 40)),
        salt((10, 39)),
        salt((10, 40), whole=(*ids[10:40], 1)),
    ]
    assert len({found for found, _ in several}) == 5 and salt((10, 40)) == several[1]
    longer, matches = [*ids, 7, 8], [Match(10, 40, tuple(ids[10:40]), 0), Match(100, 102, (7, 8), 0)]
    assert mark_boundaries(longer, matches)[:100] == mark_boundaries(ids, matches[:1]), (
        "so a conversation can go on"
    )


def test_a_continued_conversation_has_the_salt_of_its_beginning():
    salts, turn = SaltCache(), list(range(50))
    salt, lent = salts.salt_of(turn, "m")
    assert not lent and salts.salt_of(turn, "m") == (salt, 0)
    assert salts.salt_of([*turn, 1, 2, 3], "m") == (salt, 50) == salts.salt_of([*turn, 1, 2, 3, 4, 5], "m")
    assert salts.salt_of([*turn[:-1], 9, 1, 2, 3], "m")[0] != salt, (
        "another question behind the same passages"
    )
    assert salts.salt_of([*turn, 1, 2, 3], "other")[0] != salt


def test_a_prompt_that_is_fused_itself_has_its_own_salt_and_lends_it():
    salts, turn, asked = SaltCache(), list(range(50)), []
    first, _ = salts.salt_of(turn, "m")
    own, lent = salts.salt_of([*turn, 1, 2, 3], "m", lambda *lent: asked.append(lent) or False)
    assert asked == [(first, 50)] and own != first and not lent
    assert salts.salt_of([*turn, 1, 2, 3, 4], "m") == (own, 53)


def test_the_least_recently_used_salts_are_forgotten():
    salts = SaltCache(max_prompts=2)
    salt, _ = salts.salt_of([1, 2], "m")
    salts.salt_of([3, 4], "m")
    assert salts.salt_of([1, 2, 5], "m") == (salt, 2), "and asking keeps it"
    salts.salt_of([6, 7], "m")
    assert salts.salt_of([3, 4, 8], "m")[0] != salts.salt_of([3, 4], "m")[0]


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 9), (5, 5)])
def test_tokens_have_slots_in_their_blocks_and_none_in_the_null_block(start, stop):
    positions, slots = slots_of([7, 0, 2], 4, start, stop)
    expected = {p: 7 * 4 + p for p in range(4)} | {p: 2 * 4 + p - 8 for p in range(8, 12)}
    assert dict(zip(positions, slots, strict=True)) == {
        p: s for p, s in expected.items() if start <= p < stop
    }
