"""What is reported is what was done, and what is stored stays as it was."""

import hashlib

import pytest
from benches import make_prompt, make_text, watch_lock
from doubles import raising

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.selection import METHODS
from ragblend.kvstore.errors import UnknownChunkError, UsageError
from ragblend.kvstore.layout import value_files

TEXTS = [make_text(seed, words=30) for seed in range(5)]
LOOKING = ("a3", "prophet", "qcfuse", "probe", "probe-shift")
SELECTING = ("random", "epic", "cacheblend", "cacheblend-k", "cacheblend-gradual", *LOOKING)


def digests(store):
    """SHA-256 of every value's file."""
    names = [file.filename for file in value_files(store.root)]
    return {name: hashlib.sha256((store.root / name).read_bytes()).hexdigest() for name in names}


def test_answers_never_change_stored_bytes(engine):
    engine.encode(TEXTS)
    before = digests(engine.store)
    assert len(before) == len(TEXTS)
    names = sorted(METHODS)
    for number in range(2 * len(names)):
        order = TEXTS[number % 5 :] + TEXTS[: number % 5]
        options = {"method": names[number % len(names)], "ratio": 0.4, "max_new_tokens": 3}
        engine.generate(make_prompt(order), **options)
    engine.finish_background()
    assert digests(engine.store) == before
    assert engine.store.check() == []


@pytest.mark.parametrize(
    ("method", "ratio"),
    [
        *(
            (method, ratio)
            for method in ("cacheblend-gradual", "probe-shift")
            for ratio in (0.0, 0.05, 0.3, 0.6, 0.9)
        ),
        *((method, 0.6) for method in SELECTING if method not in ("cacheblend-gradual", "probe-shift")),
    ],
)
def test_the_recomputed_fraction_is_what_was_computed(llama, watch_layers, method, ratio):
    """Counted at the layers themselves; and it is the ratio asked for, where the selection leaves room for that."""
    llama.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    llama.engine.prefill(prompt)  # the gate has been run
    counted = {"run": 0, "peek": 0}  # rows through layers, and rows whose KV alone was computed

    def count(layer, hidden, block, cache, *collect):
        counted["peek" if cache.step.peek else "run"] += hidden.shape[1]

    watch_layers(llama, count)
    report = llama.engine.prefill(prompt, method=method, ratio=ratio).report
    layers, tokens = llama.engine.runtime.decoder.geometry.layers, report.tokens
    stored, share = tokens.reused + tokens.recomputed, llama.engine.runtime.decoder.attention_share
    fresh = tokens.fresh + tokens.missing
    peeked = share * (counted["peek"] - fresh) if counted["peek"] else 0.0
    spent = (counted["run"] - fresh * layers + peeked) / (stored * layers)
    assert report.recomputed_fraction == pytest.approx(spent, abs=1e-6)
    assert report.ratio in (None, report.recomputed_fraction), "of what was done, not of what was asked for"
    computed = counted["run"] + share * counted["peek"]
    assert report.computed_fraction == pytest.approx(computed / (layers * tokens.prompt), abs=1e-6)
    selection = {True: (1 + share) / layers + 0.01, False: 0.0}[method.startswith("cacheblend")]
    if method in LOOKING:  # a probe is as long as what must be computed anyway, at most, and leaves 1%
        selection = 0.01 + fresh / stored
    if selection <= ratio < 1:
        assert report.recomputed_fraction == pytest.approx(ratio, abs=0.02)
    elif ratio == 0:
        assert report.recomputed_fraction == counted["peek"] == 0
    elif ratio < 1:
        assert ratio - 0.005 <= report.recomputed_fraction <= selection + 0.02


def test_encode_skips_what_is_stored_and_says_so(engine):
    seen = []
    first = engine.encode(TEXTS, progress=lambda done, total: seen.append((done, total)))
    assert (first.encoded, first.skipped) == (5, 0)
    assert seen == [(number, 5) for number in range(1, 6)]
    assert first.tokens == sum(engine.count_tokens(text) for text in TEXTS)
    second = engine.encode([*TEXTS, make_text(99)])
    assert (second.encoded, second.skipped) == (1, 5)
    assert second.keys[:5] == first.keys


def test_an_interrupted_encode_keeps_what_is_done(engine):
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.encode(TEXTS, progress=interrupt)
    assert engine.store.stats().entries == 2
    again = engine.encode(TEXTS)
    assert (again.encoded, again.skipped) == (3, 2)


def test_node_ids_name_chunks(engine):
    engine.encode(TEXTS[:2], node_ids=["one", "two"])
    by_id = Prompt([Literal("read: "), Chunk(node_id="two"), Literal(" who?")])
    by_text = Prompt([Literal("read: "), Chunk(TEXTS[1]), Literal(" who?")])
    assert engine.tokenize(by_id).token_ids == engine.tokenize(by_text).token_ids
    assert engine.prefill(by_id, "reuse").report.hits == 1
    with pytest.raises(UnknownChunkError, match="three"):
        engine.generate(Prompt([Chunk(node_id="three"), Literal("?")]))
    with pytest.raises(UsageError, match="node ids"):
        engine.encode(TEXTS, node_ids=["one"])


def test_an_empty_node_is_known(engine):
    """A document may split into an empty passage; asking with it is no reason to fail."""
    engine.encode(["", TEXTS[0]], node_ids=["empty", "full"])
    prompt = Prompt([Literal("read: "), Chunk(node_id="empty"), Chunk(node_id="full"), Literal("?")])
    assert engine.prefill(prompt).report.hits == 1


def test_forget_frees_kv_that_no_other_node_shares(engine):
    engine.encode([TEXTS[0], TEXTS[0], TEXTS[1]], node_ids=["a", "b", "c"])
    assert engine.store.stats().entries == 2
    assert engine.forget(["a"]) == 0  # b has the same text
    assert engine.prefill(Prompt([Chunk(node_id="b"), Literal("?")]), "reuse").report.hits == 1
    with pytest.raises(UnknownChunkError):
        engine.tokenize(Prompt([Chunk(node_id="a")]))
    before = engine.store.stats().bytes
    freed = engine.forget(["b", "unheard of"])
    assert freed > 0
    assert engine.store.stats().bytes == before - freed
    assert engine.store.stats().entries == 1


@pytest.mark.parametrize("how", ["forget", "encode"])
def test_after_a_kill_the_next_call_deletes_the_kv(engine, monkeypatch, how):
    """The rows were gone by then, so that nothing could name the KV, and a second `docs rm` freed nothing."""
    engine.encode([make_text(1)], node_ids=["a"])
    with monkeypatch.context() as killed:
        killed.setattr(engine.store, "delete", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            engine.forget(["a"]) if how == "forget" else engine.encode([make_text(2)], node_ids=["a"])
    assert engine.store.stats().entries == 1
    assert engine.forget([]) > 0
    assert engine.store.stats().entries == 0 and engine.forget([]) == 0


def test_kv_is_deleted_in_batches_and_what_has_a_node_again_stays(engine, monkeypatch):
    """Who asks a question waits for one part: one document's passages, each in a change of its own, took seconds."""
    parts, turns = [], []
    nodes, store, delete = engine.runtime.nodes, engine.store, engine.store.delete
    keys = engine.encode(TEXTS, node_ids=[f"n{number}" for number in range(5)]).keys
    last = max(range(5), key=lambda number: keys[number].digest)  # deleted in order of the keys
    ids = engine.tokenize(Prompt([Chunk(TEXTS[last])])).chunks[0].token_ids
    kept = store.get(keys[last], ids)

    def deleted(some, still):
        parts.append(len(some))
        return delete(some, still)

    def locked():
        turns.append(len(parts))
        if parts == [2] and turns.count(1) == 1:
            nodes.put_many(engine.runtime.scope("default"), [("again", ids, keys[last])])
            store.put(keys[last], kept)

    monkeypatch.setattr("ragblend.engine.nodes.BATCH_NODES", 2)
    monkeypatch.setattr(store, "delete", deleted)
    watch_lock(monkeypatch, engine.runtime, locked)
    assert engine.forget([f"n{number}" for number in range(5)]) > 0
    assert parts == [2, 2] and turns[:3] == [0, 0, 1]
    assert [key for key in keys if store.contains(key)] == [keys[last]] and nodes.outbox() == {}
    assert engine.prefill(Prompt([Chunk(node_id="again"), Literal("?")]), "reuse").report.hits == 1
    engine.forget(["again"])
    assert store.stats().entries == 0
