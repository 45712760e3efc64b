"""Fused prefill against transformers alone, for every supported kind of model, in float32."""

import pytest
import torch
from benches import PREFIX, EveryThird, chat, in_turn, largest_error, make_prompt, make_text, pairs

from ragblend.engine.prompts.segments import Chunk, Literal, Prompt
from ragblend.engine.selection import METHODS, Policy
from ragblend.kvstore.errors import PromptError

TEXTS = [make_text(seed) for seed in range(4)]
ALLOWED = 1e-4
SELECTING = sorted(METHODS.keys() - {"full", "prefix", "exact", "recompute", "reuse", "naive"})


def test_attention_is_not_flat(bench):
    """With flat attention the other tests would hardly notice a wrong mask or a wrong rotation."""
    ids = torch.tensor([bench.engine.tokenize(make_prompt(TEXTS)).token_ids])
    with torch.inference_mode():
        maps = bench.reference(ids, output_attentions=True).attentions
    for weights in maps:
        rows = weights[0, :, 64:]  # (heads, R, T): rows that have much to choose from
        assert float(rows.amax(dim=-1).mean()) > 5 / min(rows.shape[-1], 64)


@pytest.mark.parametrize(("kind", "method"), pairs(("full", "recompute", "prefix"), always=("recompute",)))
def test_computing_every_row_equals_the_model(stored_for, kind, method):
    stored = stored_for(kind)
    prompt = make_prompt(TEXTS)
    expected = stored.logits(prompt)[-1]
    prefilled = stored.engine.prefill(prompt, method=method)
    assert prefilled.report.warning is None and prefilled.report.hits == len(TEXTS)
    assert largest_error(prefilled.logits, expected) < ALLOWED
    stored.assert_exact(prefilled.cache, prefilled.prompt, 0, len(prefilled.prompt.token_ids))


def test_scattered_rows_over_exact_kv_equal_the_model(each_stored):
    """Rows in many blocks against stored KV: with one chunk, right behind its prefix, nothing deviates."""
    long = make_text(7, words=90)
    each_stored.engine.encode([long])
    prompt = chat(each_stored, [long])
    for method in ("reuse", "cacheblend", EveryThird(name="third")):
        found = each_stored.engine.prefill(prompt, method=method).logits
        assert largest_error(found, each_stored.logits(prompt)[-1]) < ALLOWED


def test_moved_keys_of_layer_0_equal_keys_computed_there(each_stored):
    prompt = each_stored.engine.tokenize(make_prompt(TEXTS))
    cache = each_stored.engine.prefill(prompt, method="reuse").cache
    keys, values = each_stored.kv(prompt.token_ids)[0]
    for start, stop in prompt.places:
        found_keys, found_values = cache.span(0, start, stop)
        assert largest_error(found_keys, keys[:, start:stop]) < ALLOWED
        assert largest_error(found_values, values[:, start:stop]) < ALLOWED


def test_naive_does_not_move_keys(each_stored):
    """Or the comparison above proves nothing."""
    prompt = each_stored.engine.tokenize(make_prompt(TEXTS))
    cache = each_stored.engine.prefill(prompt, method="naive").cache
    keys, _ = each_stored.kv(prompt.token_ids)[0]
    start, stop = prompt.places[-1]
    assert largest_error(cache.span(0, start, stop)[0], keys[:, start:stop]) > 0.5


@pytest.mark.parametrize(
    ("kind", "method"), pairs(METHODS.keys() - {"full", "prefix", "exact", "recompute", "naive"})
)
def test_the_first_chunk_after_its_prefix_is_exact_in_all_layers(stored_for, kind, method):
    stored = stored_for(kind)
    prompt = chat(stored, TEXTS)
    prefilled = stored.engine.prefill(prompt, method=method, ratio=0.5)
    start, stop = prompt.places[0]
    stored.assert_exact(prefilled.cache, prompt, 0, stop)
    assert prefilled.report.tokens.reused >= stop - start  # and nothing was spent on it


def test_a_custom_prefix_makes_the_first_chunk_exact(bench):
    """Also where the tokenizer puts a begin token before the prompt, which belongs to the encoding prefix."""
    text = make_text(11)
    bench.engine.encode([text], prefix=PREFIX)
    prompt = make_prompt([text])
    prefilled = bench.engine.prefill(prompt, method="reuse")
    assert (prefilled.report.hits, prefilled.report.misses) == (1, 0)
    assert largest_error(prefilled.logits, bench.logits(prompt)[-1]) < ALLOWED


@pytest.mark.parametrize(
    ("bench", "method", "ratio"),
    in_turn(("full", 0.3), ("epic", 0.3), ("cacheblend", 1.0), (EveryThird(name="third"), 0.3)),
    indirect=["bench"],
)
def test_editing_a_later_chunk_changes_no_earlier_row(each_stored, method, ratio):
    """With a mask aligned to the corner, scattered rows see the future. cacheblend at 1: its choice may change."""
    prompt = each_stored.engine.tokenize(make_prompt(TEXTS))
    start, stop = prompt.places[-1]
    segments = list(prompt.segments)
    segments[-2] = type(segments[-2])(token_ids=tuple(reversed(segments[-2].token_ids)))
    edited = type(prompt)(segments)
    each_stored.engine.prefill(edited, "reuse")
    each_stored.engine.finish_background()  # what is stored decides what the ratio pays for
    one, two = (each_stored.engine.prefill(p, method=method, ratio=ratio).cache for p in (prompt, edited))
    for layer in range(one.geometry.layers):
        for a, b in zip(one.span(layer, 0, start), two.span(layer, 0, start), strict=True):
            assert largest_error(a, b) < 1e-6, f"layer {layer}"
    assert largest_error(one.span(0, start, stop)[0], two.span(0, start, stop)[0]) > 0.1


@pytest.mark.parametrize(("kind", "method"), pairs(SELECTING))
def test_ratio_1_computes_every_row_and_ratio_0_is_reuse(stored_for, kind, method):
    stored, prompt = stored_for(kind), make_prompt(TEXTS)
    prefilled = stored.engine.prefill(prompt, method=method, ratio=1.0)
    assert prefilled.report.tokens.reused == 0
    assert largest_error(prefilled.logits, stored.logits(prompt)[-1]) < ALLOWED
    reuse = stored.engine.prefill(prompt, method="reuse")
    found = stored.engine.prefill(prompt, method=method, ratio=0.0)
    assert torch.equal(found.logits, reuse.logits)  # not even a check is computed, to choose nothing
    assert found.report.tokens == reuse.report.tokens


class Fixed(Policy):
    """Computes the given rows in every layer."""

    def rows(self, plan, probed=None):
        return self.chosen


@pytest.mark.parametrize(("bench", "name"), in_turn(("cacheblend",), ("cacheblend-k",)), indirect=["bench"])
def test_narrowed_rows_equal_the_same_rows_computed_from_layer_0(each_stored, monkeypatch, name):
    """Up to the check all KV is right, so which other rows went along so far cannot matter."""
    policy, chosen = METHODS[name], []
    narrow = type(policy).narrow
    monkeypatch.setattr(type(policy), "narrow", lambda *a: chosen.append(narrow(*a)) or chosen[-1])
    prompt = make_prompt(TEXTS)
    narrowed = each_stored.engine.prefill(prompt, method=policy, ratio=0.6)
    assert len(chosen) == 1
    assert 0 < narrowed.report.tokens.recomputed < narrowed.report.tokens.prompt
    fixed = Fixed(name="fixed")
    object.__setattr__(fixed, "chosen", chosen[0])
    alone = each_stored.engine.prefill(prompt, method=fixed)
    assert largest_error(narrowed.logits, alone.logits) < ALLOWED
    for layer in range(narrowed.cache.geometry.layers):
        for a, b in zip(narrowed.cache.span(layer, 0, 99), alone.cache.span(layer, 0, 99), strict=True):
            assert largest_error(a, b) < ALLOWED


def test_reuse_is_far_from_the_model(each_stored):
    """So that all of the above could fail."""
    prompt = make_prompt(TEXTS)
    found = each_stored.engine.prefill(prompt, method="reuse").logits
    assert largest_error(found, each_stored.logits(prompt)[-1]) > 0.1


def test_part_of_a_chunk_reuses_its_tokens_of_the_whole(each_stored):
    """Right behind its prefix it is exact; elsewhere reuse of a part gives what stands there of reuse of the whole."""
    engine = each_stored.engine
    prompt = engine.tokenize(make_prompt(TEXTS[:2]))
    spans = [n for n, segment in enumerate(prompt.segments) if isinstance(segment, Chunk)]
    for number, (skipped, cut) in zip(spans, ((0, 3), (4, 2)), strict=True):
        whole = prompt.segments[number].token_ids
        kept = whole[skipped : len(whole) - cut]
        part = Chunk(token_ids=kept, whole=whole, skipped=skipped)
        pieces = [Literal("", whole[:skipped]), part, Literal("", whole[len(whole) - cut :])]
        parts = Prompt([*prompt.segments[:number], *pieces, *prompt.segments[number + 1 :]])
        assert parts.token_ids == prompt.token_ids
        found, expected = (engine.prefill(each, method="reuse") for each in (parts, prompt))
        assert found.report.hits == 2
        assert found.report.tokens.reused == expected.report.tokens.reused - skipped - cut
        start = parts.places[spans.index(number)][0]
        for layer in range(engine.runtime.decoder.geometry.layers):
            pairs_of = zip(
                *(each.cache.span(layer, start, start + len(kept)) for each in (found, expected)), strict=True
            )
            assert all(torch.equal(one, other) for one, other in pairs_of)
    whole = prompt.segments[spans[0]].token_ids
    with pytest.raises(PromptError, match="whole"):
        Chunk(token_ids=whole[1:], whole=whole)
