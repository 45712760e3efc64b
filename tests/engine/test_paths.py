"""`exact` and `auto`: prompts in the knowledge tree. What is read from it is, bit for bit, what would be computed."""

import os
import random

import pytest
import torch
from benches import PREFIX, chat, largest_error, make_prompt, make_text

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.prompts.paths import JOINT_TOKENS
from ragblend.engine.prompts.session import Session
from ragblend.engine.scheduling import queue as scheduler
from ragblend.engine.selection import METHODS
from ragblend.kvstore.blob import open_verified
from ragblend.kvstore.keys import ChunkKey

TEXTS = [make_text(seed, words=8 + 5 * (seed % 4)) for seed in range(7)]
CHAIN = TEXTS[:3]


def read(bench, prompt, method="exact", **options):
    """The prompt, read, with what it leaves to do done."""
    prefilled = bench.engine.prefill(prompt, method=method, **options)
    assert prefilled.report.warning is None
    bench.engine.finish_background()
    return prefilled


def nodes(bench):
    """Key and parent of all that the store has behind something else."""
    found = {}
    for file in (bench.engine.home / "kv").glob("values/*/*.kv"):
        with open_verified(file, ChunkKey(file.name.partition("-")[0]), None, lambda what: None) as reader:
            if reader.header.parent is not None:
                found[reader.header.key] = reader.header.parent
    return found


@pytest.mark.parametrize(
    ("kind", "count", "codec"),
    [
        ("llama", 40, "raw"), ("llama", 20, "int4"), ("phi3-partial", 20, "int8"), ("gemma3", 20, "int4"),
        ("gemma2", 20, "raw"),
    ],
)  # fmt: skip
def test_logits_are_the_same_bits_whatever_is_stored(fresh_bench_for, monkeypatch, kind, count, codec):
    """Random sequences of shared chunks, a store that has room for a few of them, chunks encoded alone or in place."""
    monkeypatch.setattr(scheduler, "PAUSE_S", 0)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    seeded, depths = random.Random(kind), set()
    nothing = fresh_bench_for(kind, store_budget_bytes=1)  # so that nothing enters
    tree = fresh_bench_for(kind, store_budget_bytes=(90 if codec == "raw" else 40) * 4096, kv_codec=codec)
    tree.engine.encode(TEXTS[::2])
    for number in range(count):
        texts = seeded.choices(TEXTS, weights=[8, 5, 3, 2, 1, 1, 1], k=seeded.randint(1, 4))
        prompt = chat(tree, texts, question=f"which is number {number % 9}?")
        expected, found = nothing.engine.prefill(prompt, method="exact"), read(tree, prompt)
        assert expected.report.hits == 0
        assert torch.equal(found.logits, expected.logits), (number, found.report)
        if number % 10 == 0:
            one_pass = nothing.engine.prefill(prompt, method="full")
            assert largest_error(expected.logits, one_pass.logits) < 1e-4
        depths.add(found.report.hits)
    assert depths >= {0, 1, 2} and tree.engine.store.stats().evictions > 2
    assert tree.engine.store.check() == []


def test_the_first_level_of_the_tree_is_kv_encoded_alone(fresh_bench_for):
    """Stored once, whoever computes it, under one key and with the same bits."""
    encoded, computed = fresh_bench_for(), fresh_bench_for()
    (key,) = encoded.engine.encode(TEXTS[:1]).keys
    read(computed, chat(computed, TEXTS[:1]))
    one, other = (
        each.engine.store.get(key, each.engine.runtime.tokenizing.passage_ids(TEXTS[0]))
        for each in (encoded, computed)
    )
    assert one is not None and other is not None and one.start == other.start
    for a, b in zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True):
        assert torch.equal(a, b)
    assert read(encoded, chat(encoded, TEXTS[:1])).report.hits == 1
    assert encoded.engine.store.stats().entries == 1


def test_a_long_prefix_or_passage_passes_in_the_same_blocks(fresh_bench_for, monkeypatch):
    for module in ("fusion", "encode"):
        monkeypatch.setattr(f"ragblend.engine.{module}.BLOCK_ROWS", 20)
    encoded, nothing = fresh_bench_for(), fresh_bench_for()
    encoded.engine.encode(CHAIN)
    prompt = chat(encoded, CHAIN)
    expected = nothing.engine.prefill(prompt, method="exact").logits
    assert torch.equal(read(encoded, prompt).logits, expected)
    assert torch.equal(read(encoded, prompt).logits, expected)


def test_a_path_is_loaded_as_far_as_it_is_stored(fresh):
    """Another order, another passage in between, and nothing behind that is the same."""
    read(fresh, chat(fresh, CHAIN))
    for texts, hits in (
        (CHAIN, 3),
        (CHAIN[:2], 2),
        ([*CHAIN[:2], TEXTS[5]], 2),
        ([CHAIN[0], CHAIN[2]], 1),
        (CHAIN[::-1], 0),
    ):
        assert fresh.engine.prefill(chat(fresh, texts), method="exact").report.hits == hits, texts


def test_a_prompt_that_ends_with_a_passage_computes_all_of_it(fresh):
    """Its last row gives the logits: computed alone it has other bits than among the others."""
    prefix = fresh.engine.runtime.canonical_prefix
    prompt = Prompt([Literal(token_ids=prefix), Chunk(TEXTS[0]), Literal("\n\n"), Chunk(TEXTS[1])])
    first = read(fresh, prompt)
    again = read(fresh, prompt)
    assert again.report.hits == 1
    assert torch.equal(first.logits, again.logits)


@pytest.mark.parametrize("method", ["exact", "auto"])
def test_a_path_ends_before_an_empty_passage(fresh, caplog, method):
    """It has no KV: the background task that was to store some failed with a traceback after each answer."""
    prefix = Literal(token_ids=fresh.engine.runtime.canonical_prefix)
    for passages, stored in (["", TEXTS[0]], 0), ([TEXTS[1], "", TEXTS[2]], 1):
        prompt = Prompt([prefix, *map(Chunk, passages), Literal("?")])
        for _ in range(3):
            found = read(fresh, prompt, method)
        assert method == "auto" or found.report.hits == stored
    assert caplog.records == [] and nodes(fresh) == {}


# --- what enters, and what does not


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"exact", "auto"}))
def test_kv_computed_by_other_methods_is_not_stored_in_the_tree(fresh, method):
    """Not even full prefill's: in one pass its rows have other bits."""
    fresh.engine.encode(TEXTS[1:3])
    for _ in range(3):
        read(fresh, chat(fresh, CHAIN), method, ratio=0.5 if METHODS[method].fixed_ratio is None else 0.15)
    assert nodes(fresh) == {}


def test_computed_kv_is_stored_while_others_have_the_device(fresh, monkeypatch):
    """Where one request follows the other, nothing would ever be learnt."""
    monkeypatch.setattr(scheduler, "PAUSE_S", 3600)
    fresh.engine.prefill(chat(fresh, CHAIN), method="exact")
    with fresh.engine.runtime.queue.turn():
        assert fresh.engine.finish_background(timeout_s=60)
        assert len(nodes(fresh)) == 2


def test_kv_of_a_session_is_not_exact(fresh):
    """Its KV was fused, and its answers were computed by another loop."""
    session, prompt = Session(), chat(fresh, CHAIN)
    fresh.engine.encode(CHAIN)
    fresh.engine.generate(prompt, method="reuse", session=session, max_new_tokens=4)
    assert session.tokens
    report = fresh.engine.generate(prompt, method="exact", session=session, max_new_tokens=2).report
    assert report.hits == 1
    fresh.engine.finish_background()
    assert len(nodes(fresh)) == 2


def test_text_between_passages_is_not_stored(fresh):
    """What somebody wrote between two questions' passages would be stored beside a passage that others share."""
    prefix = fresh.engine.runtime.canonical_prefix
    for count, entered in ((JOINT_TOKENS, 1), (JOINT_TOKENS + 1, 1)):
        words = Literal(token_ids=tuple(range(10, 10 + count)))
        prompt = Prompt([Literal(token_ids=prefix), Chunk(TEXTS[0]), words, Chunk(TEXTS[1]), Literal("?")])
        read(fresh, prompt)
        assert len(nodes(fresh)) == entered


def test_no_path_begins_after_another_prefix(fresh):
    """It may hold a conversation. Where passages were encoded behind it on purpose, paths go on from there."""
    prompt = make_prompt(CHAIN)
    read(fresh, prompt)
    assert fresh.engine.store.stats().entries == 0
    fresh.engine.encode(CHAIN[:1], prefix=PREFIX)
    first = read(fresh, prompt)
    assert (first.report.hits, len(nodes(fresh))) == (1, 2)
    again = read(fresh, prompt)
    assert again.report.hits == 3
    assert torch.equal(first.logits, again.logits)


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_beside_packed_kv_a_path_that_is_asked_for_again_is_stored_unpacked(fresh_bench_for, codec):
    """A packed passage is not what it was; the copy below it is."""
    packed, plain = fresh_bench_for(kv_codec=codec), fresh_bench_for()
    prompt, hits = chat(packed, CHAIN), []
    packed.engine.encode(CHAIN)
    for _ in range(4):
        found = read(packed, prompt)
        assert torch.equal(found.logits, plain.engine.prefill(prompt, method="exact").logits)
        hits.append(found.report.hits)
    assert hits == [0, 0, 3, 3]
    passages = set(packed.engine.encode(CHAIN).keys)
    assert len(nodes(packed)) == 3 and passages & set(nodes(packed).values())


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_passage_that_was_never_stored_is_packed_before_its_copy(fresh_bench_for, codec):
    bench = fresh_bench_for(kv_codec=codec)
    for hits in (0, 0, 3):
        assert read(bench, chat(bench, CHAIN)).report.hits == hits
    assert read(bench, chat(bench, CHAIN[:1]), method="reuse").report.hits == 1


def test_the_copy_goes_with_its_passage(fresh_bench_for):
    bench = fresh_bench_for(kv_codec="int4")
    prompt = Prompt(
        [Literal(token_ids=bench.engine.runtime.canonical_prefix), Chunk(TEXTS[0], "a"), Literal("?")]
    )
    for _ in range(3):
        read(bench, prompt)
    assert len(nodes(bench)) == 1
    bench.engine.forget(["a"])
    assert bench.engine.store.stats().entries == 0


def test_a_full_store_takes_nodes_that_are_asked_for_again(fresh_bench_for):
    size = fresh_bench_for().engine.token_bytes
    bench = fresh_bench_for(store_budget_bytes=400 * size)
    bench.engine.encode([make_text(seed) for seed in range(50, 60)])  # more than there is room for
    bench.engine.encode(CHAIN[:1])
    read(bench, chat(bench, CHAIN[:2]))
    assert nodes(bench) == {}
    read(bench, chat(bench, CHAIN[:2]))
    assert len(nodes(bench)) == 1


def test_on_a_busy_device_one_context_waits_to_be_stored(fresh):
    """Each is held in memory until somebody has time for it."""
    engine = fresh.engine
    prompts = [chat(fresh, texts) for texts in (TEXTS[:2], TEXTS[1:3], TEXTS[2:4], TEXTS[3:5], TEXTS[4:6])]
    held = [engine.prefill(prompts[0], method="exact")]
    engine.finish_background()
    with engine.runtime.store_lock:  # what is entered waits for it
        for prompt in prompts[1:]:
            held.append(engine.prefill(prompt, method="exact"))
    assert all(each.computed for each in held)
    engine.finish_background()
    assert 2 <= len(nodes(fresh)) < len(prompts)


# --- whose it is


def test_two_collections_share_no_node(fresh, fresh_bench_for):
    """Their salts are in every key of a path: neither learns by the clock what the other has asked."""
    other = fresh_bench_for(home=fresh.engine.home, collection="bob").engine
    prompt = chat(fresh, CHAIN)
    read(fresh, prompt)
    assert other.prefill(prompt, method="exact").report.hits == 0
    other.finish_background()
    assert other.prefill(prompt, method="exact").report.hits == 3
    assert len(nodes(fresh)) == 4
    bobs = [Chunk(s.text, token_ids=s.token_ids, collection="bob") for s in prompt.segments]
    mixed = Prompt([b if s.text == CHAIN[1] else s for s, b in zip(prompt.segments, bobs, strict=True)])
    assert fresh.engine.prefill(mixed, method="exact").report.hits == 1


@pytest.mark.parametrize("forgotten", [0, 1, 2])
def test_forgetting_a_node_deletes_all_paths_through_it(fresh, forgotten):
    named = [f"node {number}" for number in range(3)]
    fresh.engine.encode(CHAIN, named)
    chunks = [Chunk(text, name, entered=True) for text, name in zip(CHAIN, named, strict=True)]
    prompt = fresh.engine.tokenize(fresh.engine.chat_prompt(None, chunks, "who?"))
    read(fresh, prompt)
    assert len(nodes(fresh)) == 2
    fresh.engine.forget([named[forgotten]])
    assert len(nodes(fresh)) == max(0, forgotten - 1)
    read(fresh, prompt)  # it was asked for again, but is there no more
    assert len(nodes(fresh)) == max(0, forgotten - 1)
    assert fresh.engine.store.check() == []


# --- what goes wrong


@pytest.mark.parametrize("place", ["header", "layer"])
def test_a_damaged_node_is_computed_again(fresh, place):
    prompt = chat(fresh, CHAIN)
    expected = read(fresh, prompt).logits
    (middle,) = set(nodes(fresh)) & set(nodes(fresh).values())
    (file,) = (fresh.engine.home / "kv").glob(f"values/*/{middle.digest}-*.kv")
    raw = bytearray(file.read_bytes())
    raw[40 if place == "header" else -9] ^= 8
    file.write_bytes(raw)
    report = read(fresh, prompt)
    assert torch.equal(report.logits, expected)
    assert report.report.hits == (1 if place == "header" else 2)
    again = read(fresh, prompt)
    assert (again.report.hits, fresh.engine.store.check()) == (3, [])
    assert torch.equal(again.logits, expected)


# --- auto


def test_auto_is_exact_as_far_as_the_path_is_stored(fresh):
    """Then it fuses: nearer to full prefill than without the path, at the same ratio."""
    fresh.engine.encode(TEXTS)
    known, prompt = chat(fresh, CHAIN), chat(fresh, [*CHAIN, *TEXTS[4:6]])
    read(fresh, known)
    full = fresh.engine.prefill(prompt, method="full")
    blended = fresh.engine.prefill(prompt, method="probe-shift", ratio=0.2)
    auto = fresh.engine.prefill(prompt, method="auto", ratio=0.2)
    stop = prompt.places[2][1]
    for layer in range(4):
        for found, expected in zip(
            auto.cache.span(layer, 0, stop), full.cache.span(layer, 0, stop), strict=True
        ):
            assert largest_error(found, expected) < 1e-4
    assert auto.report.hits == blended.report.hits == 5
    assert largest_error(auto.logits, full.logits) < largest_error(blended.logits, full.logits)
    assert auto.report.computed_fraction <= blended.report.computed_fraction + 0.02


def test_auto_stores_a_path_that_is_asked_for_again(fresh):
    """A node a time, computed when nobody needs the device; what was fused does not enter."""
    fresh.engine.encode(CHAIN)
    prompt, entered = chat(fresh, CHAIN), []
    for _ in range(5):
        read(fresh, prompt, "auto")
        entered.append(len(nodes(fresh)))
    assert entered == [0, 1, 2, 2, 2]
    nothing = chat(fresh, CHAIN)
    found = read(fresh, nothing, "exact")
    assert found.report.hits == 3
    fresh.engine.store.gc([])
    assert torch.equal(read(fresh, nothing, "exact").logits, found.logits)
