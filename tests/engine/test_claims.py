"""What the queue is told of a request: what is loaded for it, and what it must compute."""

import pytest
from benches import make_prompt, make_text

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.prompts.session import Session
from ragblend.engine.request import Request, claim_of
from ragblend.engine.selection import policy_named

TEXTS = [make_text(seed, words=30) for seed in range(3)]


def claim(bench, prompt, method, session=None):
    """Of that prompt at a ratio of a quarter."""
    request = Request(bench.engine.tokenize(prompt), policy_named(method), 0.25, "default", session=session)
    return claim_of(bench.engine.runtime, request)


@pytest.fixture
def fresh(fresh_bench_for):
    bench = fresh_bench_for()
    assert bench.engine.gate.passed
    return bench


def test_recomputed_tokens_count_as_much_as_they_cost(fresh):
    prompt = make_prompt(TEXTS)
    tokens = len(fresh.engine.tokenize(prompt).token_ids)
    assert claim(fresh, prompt, "probe-shift").new_tokens == tokens
    fresh.engine.encode(TEXTS)
    stored = sum(map(fresh.engine.count_tokens, TEXTS))
    found = {method: claim(fresh, prompt, method) for method in ("full", "reuse", "probe-shift", "exact")}
    assert found["full"].new_tokens == found["exact"].new_tokens == tokens
    assert found["reuse"].new_tokens == tokens - stored
    assert found["probe-shift"].new_tokens == round(tokens - 0.75 * stored)
    assert sum(found["probe-shift"].cached.values()) == stored


def test_repeated_and_partial_chunks_count_as_they_are_computed(fresh):
    fresh.engine.encode(TEXTS[:1])
    whole = fresh.engine.tokenize(make_prompt(TEXTS[:1])).chunks[0].token_ids
    for chunks, stored in (
        ([Chunk(TEXTS[0])] * 5, 5 * len(whole)),
        ([Chunk(token_ids=whole[10:], whole=whole, skipped=10)], len(whole) - 10),
    ):
        prompt = fresh.engine.tokenize(Prompt([Literal("Passages: "), *chunks, Literal(" Where?")]))
        found = claim(fresh, prompt, "reuse")
        assert found.new_tokens == len(prompt.token_ids) - stored
        assert sum(found.cached.values()) == len(whole), "it is loaded once"


def test_tokens_of_a_session_are_counted_once(fresh):
    fresh.engine.encode(TEXTS)
    prompt, session = make_prompt(TEXTS), Session()
    with fresh.engine.stream(prompt, session=session, max_new_tokens=2) as stream:
        held = stream.result and session.tokens
    longer = make_prompt(TEXTS, suffix="\n\nQuestion: who kept the ledgers, and where were they? Why?")
    common = session.common_tokens(fresh.engine.tokenize(longer).token_ids)
    assert 0 < common <= held
    tokens = len(fresh.engine.tokenize(longer).token_ids)
    assert claim(fresh, longer, "probe-shift", session).new_tokens == tokens - common
    assert claim(fresh, longer, "full", session).new_tokens == tokens
