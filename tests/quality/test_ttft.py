"""The parts of `bench ttft`: exact chunk lengths, alternating methods, cold reads, peak memory."""

import threading

import pytest

from ragblend.engine.config import Timings
from ragblend.kvstore.errors import PromptTooLongError, RagBlendError
from ragblend.measuring import ttft
from ragblend.measuring.memory import peak_bytes
from ragblend.measuring.ttft import TtftPlan, cut_texts
from ragblend.measuring.variants import Variant

SOURCE = (
    "A keeper counted forty lamps; naïve visitors — some from 東京 — asked why, and nobody answered. " * 3
)


@pytest.mark.parametrize(("chunks", "tokens"), [(1, 1), (4, 30), (3, 64)])
def test_chunks_have_the_exact_token_count_and_differ(engine, chunks, tokens) -> None:
    texts = cut_texts(engine, SOURCE, chunks, tokens)
    assert len(set(texts)) == len(texts) == chunks
    assert [engine.count_tokens(text) for text in texts] == [tokens] * chunks


def test_variants_alternate_and_none_is_always_first(engine, monkeypatch) -> None:
    order = []
    timed_prefill = ttft.timed_prefill
    monkeypatch.setattr(
        ttft,
        "timed_prefill",
        lambda engine, prompt, variant: order.append(variant) or timed_prefill(engine, prompt, variant),
    )
    variants = (Variant("full"), Variant("reuse"), Variant("random", 0.5))
    rows = ttft.run(engine, SOURCE, TtftPlan(variants, (2,), (20,), ("warm",), repeats=3))
    rounds = [order[start : start + 3] for start in range(0, 12, 3)]
    assert all(set(each) == set(variants) for each in rounds)
    assert {each[0] for each in rounds} == set(variants)
    assert [(row["method"], row["repeats"]) for row in rows] == [("full", 3), ("reuse", 3), ("random", 3)]


def test_memory_cases_read_no_disk_and_disk_cases_do(engine, monkeypatch) -> None:
    from ragblend.kvstore.blob import ChunkReader
    from ragblend.kvstore.memory import MemoryTier

    monkeypatch.setattr(engine.store, "tiers", (MemoryTier("memory", 1 << 30),))
    by_prefills = []
    read_layer = ChunkReader.read_layer

    def noted(self, layer, *to) -> None:
        if threading.current_thread().name.startswith("ragblend-loader"):
            by_prefills.append(layer)
        read_layer(self, layer, *to)

    monkeypatch.setattr(ChunkReader, "read_layer", noted)
    layers = engine.runtime.decoder.geometry.layers
    for cache, reads in (("memory", 0), ("warm", 2 * 3 * layers)):
        by_prefills.clear()
        (row,) = ttft.run(engine, SOURCE, TtftPlan((Variant("reuse"),), (2,), (20,), (cache,), repeats=2))
        assert len(by_prefills) == reads, cache
        assert row["predicted_ttft_ms"] is None  # nothing was profiled


def test_parts_are_medians_and_compute_is_the_rest() -> None:
    timings = [Timings(stall_ms=s, move_ms=2, select_ms=1, first_token_ms=3, load_ms=50) for s in (1, 2, 90)]
    parts = ttft.part_medians_ms(list(zip([20, 21, 100], timings, strict=True)))
    assert parts == {"stall": 2, "move": 2, "select": 1, "compute": 13, "first_token": 3}


def test_too_many_chunks_for_the_window_are_refused(engine) -> None:
    source = " ".join(str(number) for number in range(3000))
    with pytest.raises(PromptTooLongError, match="fewer --chunks"):
        ttft.run(engine, source, TtftPlan((Variant("reuse"),), (60,), (40,), ("warm",), repeats=1))
    assert list(engine.store.keys()) == []


def test_peak_memory_is_measured_in_a_child_process(engine, model_folder, home) -> None:
    how = {"device": "cpu", "dtype": "float32", "collection": "bench"}
    opened = how | {"model": str(model_folder), "home": str(home)}
    with ttft.encoded_prompt(engine, cut_texts(engine, SOURCE, 4, 400)) as stored:
        reuse = opened, stored.prompt, Variant("reuse")
        peak = peak_bytes(*reuse)
    if peak is None:
        pytest.skip("this system does not say how much memory was resident at the peak")
    # It is all in memory at the end; a process with torch in it is several times the other end: the baseline is off.
    assert stored.fused_kv_bytes <= peak < 100 << 20
    with pytest.raises(RagBlendError, match="4 chunks were not in the store"):
        peak_bytes(*reuse)
