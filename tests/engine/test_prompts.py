"""Prompts of every shape, by all methods, in one block of rows or many: nothing is read that was not written."""

import threading

import pytest
import torch
from benches import ALWAYS, PREFIX, SUFFIX, EmptyIsNaN, chat, largest_error, make_prompt, make_text, pairs
from tiny_models import reference_kv
from waiting import SOON_S

from ragblend import Chunk, Literal, Prompt
from ragblend.engine import cache, fusion
from ragblend.engine.model import attention
from ragblend.engine.selection import METHODS
from ragblend.kvstore.blob import ChunkReader
from ragblend.kvstore.errors import PromptError, PromptTooLongError, UsageError

TEXTS = [make_text(seed) for seed in range(4)]
PARTLY = [make_text(seed) for seed in range(400, 404)]  # of which the third is stored for no test
ALLOWED = 1e-4
EXACT_METHODS = ("full", "recompute", "prefix")


@pytest.fixture
def nothing_more_is_stored(monkeypatch):
    """nothing_more_is_stored(engine): two runs find the same store."""
    return lambda engine: monkeypatch.setattr(engine.runtime.background, "add", lambda *task, **options: None)


def check_methods(bench, prompt, methods=METHODS):
    """Exact methods are the model; all others give finite logits and tokens that add up."""
    expected = bench.logits(prompt)[-1]
    for method in methods:
        prefilled = bench.engine.prefill(prompt, method=method, ratio=0.3)
        tokens = prefilled.report.tokens
        assert torch.isfinite(prefilled.logits).all(), method
        assert tokens.prompt == len(bench.engine.tokenize(prompt).token_ids)
        assert tokens.reused + tokens.recomputed + tokens.fresh + tokens.missing == tokens.prompt, method
        assert min(tokens.reused, tokens.recomputed, tokens.fresh, tokens.missing) >= 0, method
        if method in EXACT_METHODS:
            assert largest_error(prefilled.logits, expected) < ALLOWED, method
    bench.engine.finish_background()


def test_without_chunks_every_method_is_the_model(stored):
    prompt = Prompt([Literal("who kept the two ledgers?")])
    for method in METHODS:
        prefilled = stored.engine.prefill(prompt, method=method)
        assert largest_error(prefilled.logits, stored.logits(prompt)[-1]) < ALLOWED
        assert prefilled.report.recomputed_fraction == 0


@pytest.mark.parametrize("segment", [Literal("a " * (1 << 18)), Chunk("a " * (1 << 18))])
def test_text_too_long_for_the_window_is_not_tokenized(stored, segment):
    """Sixteen requests of four megabytes took sixteen gigabytes before their length was looked at."""
    with pytest.raises(PromptTooLongError, match=r"524,28\d characters"):
        stored.engine.tokenize(Prompt([Literal("a"), segment]))
    with pytest.raises(PromptTooLongError, match=r"524,28\d characters"):
        stored.engine.control_tokens(segment.text)


@pytest.mark.parametrize(
    ("prompt", "hits"),
    [
        (make_prompt(TEXTS[:1]), 1),
        (Prompt([Literal("a")]), 0),
        (make_prompt(TEXTS[:3], prefix=""), 3),
        (make_prompt(TEXTS[:1], prefix="", suffix=""), 1),
        (Prompt([Literal(PREFIX), *[Chunk(text) for text in TEXTS], Literal(SUFFIX)]), 4),
        (make_prompt([TEXTS[0], "", TEXTS[1]]), 2),
        (make_prompt(TEXTS[:2], suffix=""), 2),
        (make_prompt([TEXTS[0], TEXTS[1], TEXTS[0]]), 3),
    ],
    ids=[
        "one chunk",
        "one token",
        "a chunk first",
        "nothing but one chunk",
        "chunks that touch",
        "an empty chunk",
        "a chunk last",
        "a chunk twice",
    ],
)
def test_prompts_of_every_shape(stored, prompt, hits):
    """The last token gives the logits, so its row is computed even if it is stored."""
    check_methods(stored, prompt)
    report = stored.engine.prefill(prompt, method="reuse").report
    assert (report.hits, report.misses) == (hits, 0) and report.tokens.fresh > 0


def test_a_chunk_that_occurs_twice_is_reused_twice(stored):
    prefilled = stored.engine.prefill(make_prompt([TEXTS[0], TEXTS[1], TEXTS[0]]), method="reuse")
    first, _, second = prefilled.prompt.places
    values = [prefilled.cache.span(2, *place)[1] for place in (first, second)]
    assert torch.equal(values[0], values[1])  # both as stored


def test_a_prompt_may_have_130_chunks(stored):
    texts = [f"{number}: {make_text(number, words=3)}" for number in range(130)]
    stored.engine.encode(texts)
    check_methods(stored, make_prompt(texts), ("recompute", "probe-shift"))
    assert stored.engine.prefill(make_prompt(texts)).report.hits == 130


@pytest.mark.parametrize("segments", [[], [Literal("")]])
def test_an_empty_prompt_is_refused(stored, segments):
    with pytest.raises((PromptError, UsageError)):
        stored.engine.prefill(Prompt(segments))


def test_token_ids_are_the_segments_ids_concatenated(stored):
    """Never decoded and encoded again: tokens do not merge over a boundary."""
    prompt = Prompt([Literal("the har"), Chunk("bour mas"), Literal("ter")])
    tokenized = stored.engine.tokenize(prompt)
    encode = stored.engine.tokenizer.encode
    assert list(tokenized.token_ids) == encode("the har") + encode("bour mas") + encode("ter")
    assert list(tokenized.token_ids) != encode("the harbour master")
    assert tokenized.offsets == [0, len(encode("the har")), len(encode("the har") + encode("bour mas"))]


@pytest.mark.parametrize("method", ["recompute", "reuse", "cacheblend-gradual", "a3", "probe-shift"])
def test_missing_chunks_are_computed_in_place_and_encoded_alone_later(fresh, method):
    """What is stored in the end is the chunk read alone, never what came out of the fused context."""
    engine = fresh.engine
    engine.encode([TEXTS[0], TEXTS[2]])
    prompt = make_prompt(TEXTS[:3])
    before = engine.prefill(prompt, method=method, ratio=0.3)
    missing = engine.tokenize(Prompt([Chunk(TEXTS[1])])).token_ids
    assert (before.report.hits, before.report.misses) == (2, 1)
    assert before.report.tokens.missing == len(missing)
    assert engine.finish_background(60)
    after = engine.prefill(prompt, method=method, ratio=0.3)
    assert (after.report.hits, after.report.misses, after.report.tokens.missing) == (3, 0, 0)
    if method in EXACT_METHODS:
        assert largest_error(before.logits, fresh.logits(prompt)[-1]) < ALLOWED
    assert_stored_alone(fresh, TEXTS[1])


def assert_stored_alone(bench, text):
    """The stored KV of that text is what transformers computes for it behind the canonical prefix."""
    engine = bench.engine
    ids = tuple(engine.tokenize(Prompt([Chunk(text)])).token_ids)
    prefix = engine.chat_prompt(None, [Chunk(text)], "q")
    prefix_ids = engine.tokenize(prefix).prefix_ids
    key = engine.encode([text]).keys[0]
    assert engine.encode([text]).encoded == 0
    chunk = engine.store.get(key, ids)
    assert chunk is not None
    assert chunk.start == len(prefix_ids)
    for layer, (keys, values) in enumerate(reference_kv(bench.reference, [*prefix_ids, *ids])):
        assert largest_error(chunk.keys[layer], keys[:, chunk.start :]) < ALLOWED
        assert largest_error(chunk.values[layer], values[:, chunk.start :]) < ALLOWED


def test_missing_chunks_after_exact_rows_are_exact(fresh):
    """A missing chunk behind the prefix is computed in place, so it and its KV are exact in every layer."""
    fresh.engine.encode(TEXTS[1:])
    prompt = make_prompt(TEXTS)
    for method in ("reuse", "cacheblend", "cacheblend-gradual", "epic"):
        prefilled = fresh.engine.prefill(prompt, method=method, ratio=0.4)
        start, stop = prefilled.prompt.places[0]
        fresh.assert_exact(prefilled.cache, prefilled.prompt, start, stop)
        fresh.engine.finish_background()
        fresh.engine.store.delete([fresh.engine.encode(TEXTS[:1]).keys[0]])


@pytest.mark.parametrize("method", ["reuse", "cacheblend-gradual", "probe-shift"])
def test_layers_that_come_late_are_waited_for(stored, watch_layers, monkeypatch, method):
    """Each is read only once the layer before it is being computed."""
    prompt = make_prompt(TEXTS)
    expected = stored.engine.prefill(prompt, method=method, ratio=0.5)
    begun = [threading.Event() for _ in range(stored.engine.runtime.decoder.geometry.layers)]
    watch_layers(stored, lambda layer, *more: begun[layer].set())
    read_layer = ChunkReader.read_layer

    def late(reader, layer, *to):
        assert layer == 0 or begun[layer - 1].wait(SOON_S)
        return read_layer(reader, layer, *to)

    monkeypatch.setattr(ChunkReader, "read_layer", late)
    found = stored.engine.prefill(prompt, method=method, ratio=0.5)
    assert torch.equal(found.logits, expected.logits) and all(each.is_set() for each in begun)


@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    [
        *((*pair, "float32") for pair in pairs(METHODS, kinds=("gemma3",))),
        ("mistral", "reuse", "float32"),
        *(("llama", method, "bfloat16") for method in (*ALWAYS, "exact")),
    ],
)
def test_no_method_reads_unwritten_memory(
    bench_for, nothing_more_is_stored, monkeypatch, name, method, dtype
):
    """Buffers are not cleared. An exact, a stored, a missing chunk and one at the end; prefill and decoding; in 16 bits
    by products, in several blocks of rows: a mean over keys that later blocks write made answers NaN.
    """
    engine = bench_for(name, dtype).engine
    engine.encode([PARTLY[0], PARTLY[1], PARTLY[3]])
    assert engine.gate.passed
    if dtype == "bfloat16":
        monkeypatch.setattr(attention, "products_are_faster", lambda dtype: True)
        monkeypatch.setattr(fusion, "BLOCK_ROWS", 32)
    nothing_more_is_stored(engine)
    prompts = [make_prompt(PARTLY, suffix=""), engine.chat_prompt(None, [*map(Chunk, PARTLY)], "who?")]

    def outcome(prompt):
        prefilled = engine.prefill(prompt, method=method, ratio=0.4)
        assert prefilled.cache is not None, "the model is fused"
        return prefilled.logits, engine.continue_logits(prefilled, [5, 6, 7])

    clean = [outcome(prompt) for prompt in prompts]
    monkeypatch.setattr(cache, "torch", EmptyIsNaN())
    monkeypatch.setattr(attention, "torch", EmptyIsNaN())
    for prompt, (logits, continued) in zip(prompts, clean, strict=True):
        found = outcome(prompt)
        assert torch.equal(found[0], logits)
        assert torch.equal(found[1], continued)


# --- many rows pass through a layer in several blocks: that changes nothing, with every kind of mask

ON_ACCELERATORS = "position masks"


@pytest.fixture
def masked(monkeypatch):
    """masked(bench): with the masks that accelerators get, instead of the CPU's own attention."""

    def use(bench):
        assert bench.engine.gate.passed
        monkeypatch.setattr(bench.engine.runtime.decoder, "tiles", False)

    return use


@pytest.mark.parametrize(
    ("name", "method", "masks"),
    [
        *((*pair, "tiles") for pair in pairs(METHODS, kinds=("llama", "mistral", "qwen2"))),
        *(("gemma3", method, ON_ACCELERATORS) for method in (*ALWAYS, "exact")),
    ],
)
def test_blocks_of_20_rows_give_what_one_gives(
    bench_for, nothing_more_is_stored, monkeypatch, masked, name, method, masks
):
    """A block must not see the rows of the next one: what they left in the buffers is here NaN."""
    bench = bench_for(name)
    texts = [make_text(seed) for seed in range(410, 414)]
    bench.engine.encode([texts[0], texts[2]])
    nothing_more_is_stored(bench.engine)
    prompt = chat(bench, texts)
    if masks == ON_ACCELERATORS:
        masked(bench)
    monkeypatch.setattr(fusion, "BLOCK_ROWS", 10_000)
    expected = bench.engine.prefill(prompt, method=method, ratio=0.5)
    monkeypatch.setattr(fusion, "BLOCK_ROWS", 20)
    monkeypatch.setattr(cache, "torch", EmptyIsNaN())
    monkeypatch.setattr(attention, "torch", EmptyIsNaN())
    found = bench.engine.prefill(prompt, method=method, ratio=0.5)

    assert found.report.tokens == expected.report.tokens
    assert found.report.recomputed_fraction == pytest.approx(expected.report.recomputed_fraction)
    assert largest_error(found.logits, expected.logits) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_position_masks_are_the_model_too(stored_for, masked, name):
    """What an accelerator computes with, on the CPU."""
    bench, prompt = stored_for(name), make_prompt(TEXTS)
    masked(bench)
    for method in EXACT_METHODS:
        found = bench.engine.prefill(prompt, method=method)
        assert largest_error(found.logits, bench.logits(prompt)[-1]) < ALLOWED, method
    exact = chat(bench, TEXTS[:1])
    assert largest_error(bench.engine.prefill(exact, "reuse").logits, bench.logits(exact)[-1]) < ALLOWED
    start, stop = bench.engine.tokenize(prompt).places[-1]
    keys = bench.engine.prefill(prompt, "reuse").cache.span(0, start, stop)[0]
    assert torch.isfinite(keys).all()
