"""Damaged values are counted misses: the answer is as right as if the chunk had never been stored."""

import gc
import weakref

import pytest
import torch
from benches import StagedTransfers, largest_error, make_prompt, make_text

from ragblend.engine import fusion
from ragblend.engine.cache import FusedCache
from ragblend.kvstore.layout import value_files

TEXTS = [make_text(seed, words=30) for seed in range(3)]
ALLOWED = 1e-4


def spoil(store, key, how):
    """Damage the one file of that key."""
    (name,) = [file.filename for file in value_files(store.root) if file.digest == key.digest]
    path = store.root / name
    raw = bytearray(path.read_bytes())
    path.unlink()
    if how is not None:
        how(raw)
        path.write_bytes(raw)


def flip(share):
    """Flip one bit, that far into the file: 0.99 is in the last layer, found when the others have been computed."""

    def change(raw):
        raw[int(len(raw) * share)] ^= 16

    return change


def truncate(raw):
    del raw[len(raw) // 2 :]


DAMAGES = {
    "header": flip(0.001),
    "first layer": flip(0.15),
    "last layer": flip(0.99),
    "truncated": truncate,
    "deleted": None,
}


IN_GROUPS = ("first layer", "last layer", "truncated")  # of layers that are read together, for an accelerator


@pytest.mark.parametrize(
    ("damage", "staged"), [*((each, False) for each in DAMAGES), *((each, True) for each in IN_GROUPS)]
)
def test_a_damaged_value_is_a_miss_and_heals(fresh, damage, staged, monkeypatch):
    engine = fresh.engine
    if staged:
        monkeypatch.setattr(engine.runtime, "transfers", StagedTransfers())
    keys = engine.encode(TEXTS).keys
    prompt = make_prompt(TEXTS)
    sound = engine.prefill(prompt, "reuse")
    spoil(engine.store, keys[1], DAMAGES[damage])
    found = engine.prefill(prompt, "recompute")
    assert largest_error(found.logits, fresh.logits(prompt)[-1]) < ALLOWED
    assert (found.report.hits, found.report.misses) == (2, 1)
    start, stop = found.prompt.places[1]
    assert found.report.tokens.missing == stop - start
    assert engine.store.stats().quarantined == 1
    assert engine.finish_background(60)
    healed = engine.prefill(prompt, "reuse")
    assert (healed.report.hits, healed.report.misses) == (3, 0)
    assert largest_error(healed.logits, sound.logits) < ALLOWED
    assert [p for p in engine.store.check() if p.key == keys[1]] == []


@pytest.mark.parametrize("method", ["reuse", "naive", "cacheblend-gradual", "a3", "probe-shift"])
def test_damage_found_in_the_middle_of_a_prefill(fresh, method):
    """The damaged chunk, right behind the prefix, is computed in place: exact in all layers, whatever the method."""
    engine = fresh.engine
    keys = engine.encode(TEXTS).keys
    prompt = make_prompt(TEXTS)
    spoil(engine.store, keys[0], DAMAGES["last layer"])
    found = engine.prefill(prompt, method=method, ratio=0.3)
    start, stop = found.prompt.places[0]
    assert (found.report.hits, found.report.misses) == (2, 1)
    assert found.report.tokens.missing == stop - start
    assert torch.isfinite(found.logits).all()
    for layer, (key, value) in enumerate(fresh.kv(found.prompt.token_ids)):
        held = found.cache.span(layer, 0, stop)
        assert largest_error(held[0], key[:, :stop]) < ALLOWED
        assert largest_error(held[1], value[:, :stop]) < ALLOWED


def test_all_chunks_damaged_at_once_and_one_of_them_twice(fresh):
    engine = fresh.engine
    keys = engine.encode(TEXTS).keys
    for key in keys:
        spoil(engine.store, key, DAMAGES["last layer"])
    prompt = make_prompt([*TEXTS, TEXTS[0]])
    found = engine.prefill(prompt, "reuse")
    assert (found.report.hits, found.report.misses) == (0, 4)
    assert largest_error(found.logits, fresh.logits(prompt)[-1]) < ALLOWED
    assert engine.store.stats().quarantined == 3
    assert engine.finish_background(60)
    assert engine.prefill(prompt, "reuse").report.hits == 4


def test_a_store_that_evicts_needed_chunks_still_answers(fresh_bench_for):
    """A budget for two values: encoding a third evicts one, and asking for all three still works."""
    whole = fresh_bench_for("llama")
    size = whole.engine.encode(TEXTS) and whole.engine.store.stats().bytes // 3
    small = fresh_bench_for("llama", store_budget_bytes=int(size * 2.5))
    small.engine.encode(TEXTS)
    prompt = make_prompt(TEXTS)
    for _ in range(3):
        found = small.engine.prefill(prompt, "recompute")
        assert found.report.hits + found.report.misses == 3
        assert largest_error(found.logits, small.logits(prompt)[-1]) < ALLOWED
        assert small.engine.finish_background(60)
        assert small.engine.store.stats().bytes <= int(size * 2.5)


def test_a_store_too_small_for_a_missing_chunk_still_answers(fresh_bench_for):
    small = fresh_bench_for("llama", store_budget_bytes=1000)
    prompt = make_prompt(TEXTS)
    for _ in range(2):
        found = small.engine.generate(prompt, "cacheblend", max_new_tokens=5)
        assert list(found.token_ids) == small.answer(prompt, 5)
        assert small.engine.finish_background(60)


def test_the_cache_of_a_restarted_prefill_is_freed(engine, monkeypatch):
    """Whatever its errors hold: on a full device the second one would not fit beside the first."""
    keys, made = engine.encode(TEXTS).keys, []

    class Watched(FusedCache):
        def __init__(self, *given):
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(fusion, "FusedCache", Watched)
    for key in keys[:2]:
        spoil(engine.store, key, flip(0.6))
    gc.disable()
    try:
        found = engine.prefill(make_prompt(TEXTS))
        assert found.report.misses == 2 and len(made) > 1
        assert [each() for each in made if each() is not None] == [found.cache]
    finally:
        gc.enable()
