"""Many rows pass through a layer in several blocks: that changes nothing, with every kind of mask."""

import pytest
import torch
from benches import chat, largest_error, make_prompt, make_text, pairs
from test_prompts import _EmptyIsNaN

from ragblend.engine import cache, fusion
from ragblend.engine.model import attention
from ragblend.engine.selection import METHODS

TEXTS = [make_text(seed) for seed in range(4)]


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
        *(("gemma3", method, ON_ACCELERATORS) for method in METHODS),
    ],
)
def test_blocks_of_20_rows_give_what_one_gives(fresh_bench_for, monkeypatch, masked, name, method, masks):
    """A block must not see the rows of the next one: what they left in the buffers is here NaN."""
    bench = fresh_bench_for(name)
    bench.engine.encode([TEXTS[0], TEXTS[2]])
    monkeypatch.setattr(bench.engine.runtime.background, "add", lambda *chore, **how: None)
    prompt = chat(bench, TEXTS)
    if masks == ON_ACCELERATORS:
        masked(bench)
    monkeypatch.setattr(fusion, "BLOCK_ROWS", 10_000)
    expected = bench.engine.prefill(prompt, method=method, ratio=0.5)
    monkeypatch.setattr(fusion, "BLOCK_ROWS", 20)
    monkeypatch.setattr(cache, "torch", _EmptyIsNaN())
    monkeypatch.setattr(attention, "torch", _EmptyIsNaN())
    found = bench.engine.prefill(prompt, method=method, ratio=0.5)
    assert found.report.tokens == expected.report.tokens
    assert found.report.recomputed_fraction == pytest.approx(expected.report.recomputed_fraction)
    assert largest_error(found.logits, expected.logits) < 1e-4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_position_masks_are_the_model_too(bench_for, masked, name):
    """What an accelerator computes with, on the CPU."""
    bench = bench_for(name)
    bench.engine.encode(TEXTS)
    masked(bench)
    prompt = make_prompt(TEXTS)
    for method in ("full", "recompute", "prefix"):
        found = bench.engine.prefill(prompt, method=method)
        assert largest_error(found.logits, bench.logits(prompt)[-1]) < 1e-4, method
    exact = chat(bench, TEXTS[:1])
    assert largest_error(bench.engine.prefill(exact, "reuse").logits, bench.logits(exact)[-1]) < 1e-4
    start, stop = bench.engine.tokenize(prompt).places[-1]
    keys = bench.engine.prefill(prompt, "reuse").cache.span(0, start, stop)[0]
    assert torch.isfinite(keys).all()
