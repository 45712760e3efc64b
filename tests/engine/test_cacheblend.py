"""CacheBlend's selection against the paper (§4.3), row by row and head by head, on a tiny model."""

import pytest
import torch
from benches import Unread, make_prompt, make_text

from ragblend.engine.plan import Span, make_plan
from ragblend.engine.selection import AfterLayer, policy_named
from ragblend.kvstore.errors import UsageError

TEXTS = [make_text(seed, words=20) for seed in range(4)]


@pytest.fixture
def narrowed(llama, monkeypatch):
    """narrowed(method, ratio): the evidence and the rows that were kept of each choice, the prompt, and the cache."""
    llama.engine.encode(TEXTS)

    def prefilled(method, ratio):
        choices, narrow = [], AfterLayer.narrow

        def watching(self, plan, evidence, next_layer):
            kept = narrow(self, plan, evidence, next_layer)
            choices.append((evidence.layer, evidence.rows.tolist(), kept.tolist()))
            return kept

        monkeypatch.setattr(AfterLayer, "narrow", watching)
        prompt = llama.engine.tokenize(make_prompt(TEXTS))
        cache = llama.engine.prefill(prompt, method=method, ratio=ratio).cache
        return choices, prompt, cache

    return prefilled


def deviations(new, stale, rows):
    """{row: squared distance}, one number at a time."""
    return {
        row: sum(
            (float(new[head, row, at]) - float(stale[head, row, at])) ** 2
            for head in range(new.shape[0])
            for at in range(new.shape[2])
        )
        for row in rows
    }


def assert_the_most_deviating_are_kept(deviating, kept):
    left = [value for row, value in deviating.items() if row not in kept]
    assert 0 < len(left) < len(deviating)
    assert min(value for row, value in deviating.items() if row in kept) > max(left)


@pytest.mark.parametrize(("method", "kind"), [("cacheblend", 1), ("cacheblend-k", 0)])
def test_rows_with_the_largest_kv_deviation_are_selected(llama, narrowed, method, kind):
    """What is new there is full prefill's own, because all rows went through layer 0."""
    [(layer, rows, kept)], prompt, _ = narrowed(method, 0.6)
    tokens = len(prompt.token_ids)
    moved = [row for start, stop in prompt.places[1:] for row in range(start, stop)]
    assert layer == 1 and set(moved) <= set(rows)
    stale = llama.engine.prefill(prompt, method="reuse").cache.span(1, 0, tokens)[kind]
    new = llama.kv(prompt.token_ids)[1][kind]
    assert_the_most_deviating_are_kept(deviations(new, stale, moved), kept)


def test_gradual_filtering_drops_the_least_deviating_rows_in_each_layer(llama, narrowed):
    choices, prompt, cache = narrowed("cacheblend-gradual", 0.6)
    tokens = len(prompt.token_ids)
    stale = llama.engine.prefill(prompt, method="reuse").cache
    moved = {row for start, stop in prompt.places[1:] for row in range(start, stop)}
    assert [layer for layer, _, _ in choices] == [
        1,
        *range(1, llama.engine.runtime.decoder.geometry.layers - 1),
    ]
    for layer, rows, kept in choices[1:]:  # the first is the check, as above
        new, old = (each.span(layer, 0, tokens)[1] for each in (cache, stale))
        assert_the_most_deviating_are_kept(deviations(new, old, [row for row in rows if row in moved]), kept)
    counts = [len(kept) for _, _, kept in choices]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[-1]


def plan_of(ratio):
    return make_plan(torch.arange(120), (Span(10, 50, Unread()), Span(60, 50, Unread())), 10, ratio, 0.25)


def course(method, ratio=0.4):
    """Each layer's ratio from the check on, and their mean."""
    plan, policy = plan_of(ratio), policy_named(method)
    return [policy.ratio_at(plan, layer) for layer in range(1, plan.layers)], policy.remaining_ratio(plan)


FALLING = [1.5, 1.375, 1.25, 1.125, 1.0, 0.875, 0.75, 0.625, 0.5]


@pytest.mark.parametrize(
    ("shares", "expected"),
    [("3/2/1", FALLING), ("30/10", FALLING), ("2", [1.0] * 9), ("2/0/0", [4, 3, 2, 1, 0, 0, 0, 0, 0])],
)
def test_shares_spread_the_ratio_over_the_layers(shares, expected):
    ratios, mean = course(f"cacheblend-gradual:shares={shares}", ratio=0.3)
    scale = sum(expected) / len(expected)
    assert ratios == pytest.approx([mean * each / scale for each in expected])
    assert ratios != [mean] * 9 or shares == "2"


def test_a_minimum_ratio_remains_if_the_check_costs_all():
    assert course("cacheblend", 0.02) == ([0.01] * 9, 0.01)


@pytest.mark.parametrize("shares", ["1/2", "0", "3/x", "2/-1", "nan", "inf", "/"])
def test_invalid_shares_are_refused(shares):
    with pytest.raises(UsageError, match="none larger"):
        policy_named(f"cacheblend-gradual:shares={shares}")
