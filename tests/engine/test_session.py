"""A conversation's context: a second question reads only what is new, and reads it as if all had been read again."""

import pytest
from benches import largest_error, make_text

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.prompts.session import Session

TEXTS = [make_text(seed, words=30) for seed in range(4)]
FIRST = [Literal("Passages: read them all.\n\n"), Chunk(TEXTS[0]), Literal("\n\n"), Chunk(TEXTS[1])]
QUESTION, NEXT = Literal("\n\nwho kept the ledgers?"), Literal("\n\nand where?")


def answered(bench, segments, session, **options):
    """The result of a streamed answer of a few tokens."""
    with bench.engine.stream(Prompt(segments), session=session, max_new_tokens=6, **options) as stream:
        return stream.result


def follow_up(first, *more):
    """The prompt of the first result, its answer, and what comes after."""
    ids = first.token_ids[:-1] if first.stopped else first.token_ids
    return [*first.prompt.segments, Literal("", ids), *more, NEXT]


def test_exact_context_goes_on_exactly(fresh):
    """With nothing approximate in it, a context that was kept gives the tokens of one that is read again."""
    session = Session()
    first = answered(
        fresh, [Literal("The harbour master kept two ledgers."), QUESTION], session, method="reuse"
    )
    second = follow_up(first)
    again = answered(fresh, second, session, method="reuse")
    assert list(again.token_ids) == fresh.answer(Prompt(second), 6)
    kept = len(first.prompt.token_ids) + len(first.token_ids) - 1
    assert again.report.tokens.reused == kept
    assert again.report.tokens.fresh == again.report.tokens.prompt - kept
    assert largest_error(fresh.engine.prefill(Prompt(second)).logits, fresh.logits(Prompt(second))[-1]) < 1e-3


def test_only_new_tokens_are_computed(fresh):
    fresh.engine.encode(TEXTS)
    session = Session()
    first = answered(fresh, [*FIRST, QUESTION], session)
    assert session.tokens > len(first.prompt.token_ids) - 1
    second = answered(fresh, follow_up(first, Literal("\n\nMore:\n"), Chunk(TEXTS[2])), session, ratio=0.2)
    served = second.report.served
    assert set(served[: len(first.prompt.token_ids)]) == {"r"}
    assert (second.report.hits, second.report.misses) == (1, 0)
    assert second.report.ratio == pytest.approx(0.2, abs=0.02), "of the new chunk"
    new = len(fresh.engine.tokenize(Prompt([Chunk(TEXTS[2])])).token_ids)
    assert served.count("c") <= 0.2 * new + 1, "the share is of the new chunk, not of all that is held"
    assert second.report.recomputed_fraction < 0.2


def test_a_ratio_of_one_computes_all_of_a_new_chunk_whatever_is_held(fresh):
    """The share that is new, 1 - held / stored, and (stored - held) / stored differ for a fifth of all lengths: what
    was meant to be every row was a choice, and left up to a quarter as stored.
    """
    texts = [make_text(40 + words, words=words) for words in range(20, 36)]
    fresh.engine.encode(texts)
    for one, other in zip(texts[::2], texts[1::2], strict=True):
        session = Session()
        first = answered(fresh, [FIRST[0], Chunk(one), QUESTION], session, ratio=1.0)
        again = follow_up(first, Literal("\n\nMore:\n"), Chunk(other))
        second = answered(fresh, again, session, ratio=1.0)
        new = len(fresh.engine.tokenize(Prompt([Chunk(other)])).token_ids)
        assert second.report.served.count("c") == new
        assert second.report.tokens.recomputed == new


def test_a_prompt_that_is_all_held_gets_the_same_answer(fresh):
    session = Session()
    for segments in ([Literal("", (5,))], [Literal("The harbour master kept two ledgers."), QUESTION]):
        first = answered(fresh, segments, session)
        assert answered(fresh, segments, session).token_ids == first.token_ids
        session.forget()


def test_a_context_is_used_as_far_as_it_is_the_same(fresh):
    fresh.engine.encode(TEXTS)
    session = Session()
    answered(fresh, [*FIRST, QUESTION], session)
    other = [*FIRST[:3], Chunk(TEXTS[2]), QUESTION]
    prompt = fresh.engine.tokenize(Prompt(other))
    served = answered(fresh, other, session, method="reuse").report.served
    assert set(served[: prompt.offsets[3]]) == {"r"}, "up to the chunk that differs"
    assert served[prompt.offsets[4] :] == "f" * len(prompt.segments[4].token_ids)
    assert answered(fresh, [Literal("Something else."), QUESTION], Session()).report.tokens.reused == 0


def test_a_chunk_is_never_cut_in_two(fresh):
    session = Session()
    answered(fresh, [*FIRST[:3], Literal(TEXTS[1][:40]), QUESTION], session, method="reuse")
    prompt = fresh.engine.tokenize(Prompt([*FIRST, QUESTION]))
    report = answered(fresh, [*FIRST, QUESTION], session, method="reuse").report
    assert report.misses == 1 and report.served[prompt.offsets[3] :][:3] == "mmm"


@pytest.mark.parametrize("options", [{"method": "full"}, {"method": "recompute"}])
def test_the_reference_reads_everything(fresh, options):
    session = Session()
    first = answered(fresh, [*FIRST, QUESTION], session)
    second = follow_up(first)
    assert list(answered(fresh, second, session, **options).token_ids) == fresh.answer(Prompt(second), 6)


def test_a_stopped_answer_keeps_its_prompt_in_the_session(engine):
    session = Session()
    stream = engine.stream(Prompt([*FIRST, QUESTION]), session=session, max_new_tokens=500)
    for _ in stream:
        break
    stream.close()
    assert session.tokens == len(engine.tokenize(Prompt([*FIRST, QUESTION])).token_ids)
    session.forget()
    assert session.tokens == 0


def test_another_models_context_is_not_used(fresh_bench_for):
    session = Session()
    answered(fresh_bench_for("llama"), [*FIRST, QUESTION], session)
    other = fresh_bench_for("qwen3")
    assert answered(other, [*FIRST, QUESTION], session).report.tokens.reused == 0


def test_nothing_of_a_session_is_stored(fresh):
    session = Session()
    answered(fresh, [*FIRST, QUESTION], session)
    fresh.engine.finish_background()
    before = fresh.engine.store.stats()
    answered(fresh, [*FIRST, QUESTION, NEXT], session)
    fresh.engine.finish_background()
    assert before.entries == 2 and fresh.engine.store.stats().entries == 2


def test_a_chunk_of_another_collection_is_found_there(fresh):
    from ragblend import Engine

    other = Engine.open(
        str(fresh.folder), home=fresh.engine.home, device="cpu", dtype="float32", collection="other"
    )
    other.encode([TEXTS[0]], ["one"])
    fresh.engine.encode([TEXTS[1]], ["one"])
    for collection, text in (("other", TEXTS[0]), (None, TEXTS[1])):
        named, told = Chunk(node_id="one", collection=collection), Chunk(text, collection=collection)
        assert (
            fresh.engine.tokenize(Prompt([named])).token_ids
            == fresh.engine.tokenize(Prompt([told])).token_ids
        )
    both = [Chunk(node_id="one", collection="other"), QUESTION, Chunk(node_id="one")]
    assert fresh.engine.prefill(Prompt([Literal("Passages: "), *both])).report.hits == 2
    mine = Prompt([Literal("Passages: "), Chunk(TEXTS[0]), QUESTION])
    theirs = Prompt([Literal("Passages: "), Chunk(TEXTS[0], collection="other"), QUESTION])
    assert fresh.engine.prefill(theirs).report.hits == 1
    assert fresh.engine.prefill(mine).report.misses == 1
    assert len(fresh.engine.prefill(theirs).report.served) == len(fresh.engine.tokenize(theirs).token_ids)


@pytest.mark.parametrize(
    "method", ["full", "reuse", "cacheblend", "cacheblend-gradual", "probe-shift", "prefix", "exact"]
)
def test_served_counts_what_is_reported(fresh, method):
    fresh.engine.encode(TEXTS[:2])
    prompt = Prompt([*FIRST, Literal("\n\n"), Chunk(TEXTS[3]), QUESTION])
    report = fresh.engine.prefill(prompt, method=method, ratio=0.3).report
    counts = {letter: report.served.count(letter) for letter in "rcfm"}
    tokens = report.tokens
    assert counts == {"r": tokens.reused, "c": tokens.recomputed, "f": tokens.fresh, "m": tokens.missing}
