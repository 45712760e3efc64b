"""Eviction: keeps what a loop over the model's own attention keeps, and equals masking the rest."""

import pytest
import torch
from benches import chat, largest_error, make_prompt, make_text
from torch import nn
from transformers import AttentionInterface

from ragblend.engine.decoding.eviction import POOLED_TOKENS, WINDOW_ROWS, evict
from ragblend.engine.model.attention import OWN_ATTENTION, OWN_EAGER
from ragblend.engine.model.decoder import FULL
from ragblend.engine.prompts.session import Session
from ragblend.kvstore.errors import UnsupportedModelError, UsageError

TEXTS = [make_text(seed, words=30) for seed in range(3)]
KEEP = 20


@pytest.fixture
def engine(fresh):
    """It has the passages."""
    fresh.engine.encode(TEXTS)
    return fresh.engine


def evicted(bench, prompt, keep_tokens=KEEP):
    """A prefilled prompt, all rows computed, after eviction."""
    prefilled = bench.engine.prefill(prompt, method="recompute")
    lost = evict(bench.engine.runtime.decoder, prefilled.prompt, prefilled.cache, keep_tokens)
    return prefilled, lost


def in_passages(prompt):
    found = torch.zeros(len(prompt.token_ids), dtype=torch.bool)
    for start, stop in prompt.places:
        found[start:stop] = True
    return found


def votes_by_a_loop(bench, prompt, layer):
    """By head, position -> pooled votes, from the attention that transformers alone reports, a number at a time."""
    with torch.inference_mode():
        seen = bench.reference(torch.tensor([prompt.token_ids]), output_attentions=True).attentions[layer][0]
    passages, heads = in_passages(prompt), bench.engine.runtime.decoder.geometry.kv_heads
    group, tokens = seen.shape[0] // heads, len(prompt.token_ids)
    result = []
    for head in range(heads):
        votes = [0.0] * tokens
        for at in range(tokens):
            if passages[at]:
                rows = seen[head * group : (head + 1) * group, max(0, tokens - WINDOW_ROWS) :, at]
                votes[at] = float(rows.sum())
        reach = POOLED_TOKENS // 2
        result.append(
            {at: max(votes[max(0, at - reach) : at + reach + 1]) for at in range(tokens) if passages[at]}
        )
    return result


def close(one, other):
    """(..., D) -> (...): the same up to the rounding of another batch of rows."""
    return (one - other).abs().amax(-1) < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gemma2"])
def test_each_head_keeps_the_tokens_that_the_last_rows_attend_to(bench_for, name):
    bench = bench_for(name)
    prompt = chat(bench, TEXTS)
    before = bench.engine.prefill(prompt, method="recompute").cache
    prefilled, lost = evicted(bench, prompt)
    assert lost == int(in_passages(prefilled.prompt).sum()) - KEEP > 0
    kinds = bench.engine.runtime.decoder.layer_types
    assert FULL in kinds
    for layer, kind in enumerate(kinds):
        held, whole = prefilled.cache.fused[layer], before.fused[layer]
        if kind != FULL:
            assert held.evicted == 0 and bool(close(held.keys, whole.keys).all())
            continue
        for head, votes in enumerate(votes_by_a_loop(bench, prefilled.prompt, layer)):
            kept = positions(held.keys[0, head], whole.keys[0, head])
            assert kept == sorted(set(kept))
            assert bool(close(held.values[0, head], whole.values[0, head, kept]).all())
            assert set(range(len(prefilled.prompt.token_ids))) - votes.keys() <= set(kept)
            # Pooling makes neighbours equal, so it is their votes that are compared.
            found = sorted(votes[at] for at in kept if at in votes)
            assert found == pytest.approx(sorted(votes.values())[-KEEP:], rel=1e-3)


def positions(kept, whole):
    """Where in the whole each kept row stands. Of keys: values of equal tokens may be equal wherever they stand."""
    return torch.cdist(kept, whole).argmin(1).tolist()


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3", "gemma2"])
def test_eviction_equals_masking_the_evicted_tokens(bench_for, monkeypatch, name):
    """Tokens go on at their own positions, and see what their head kept, as under a mask over the whole context."""
    bench = bench_for(name)
    prompt = chat(bench, TEXTS)
    given = [5, 17, 42, 9, 101]
    prefilled, _ = evicted(bench, prompt)
    found = bench.engine.continue_logits(prefilled, given)
    whole = bench.engine.prefill(prompt, method="recompute")
    hidden = [hidden_rows(prefilled.cache.fused[at], held) for at, held in enumerate(whole.cache.fused)]
    unmasked = bench.engine.continue_logits(whole, given)
    attention = OWN_EAGER if bench.engine.runtime.decoder.attention == OWN_EAGER else OWN_ATTENTION
    plain = AttentionInterface()[attention]
    AttentionInterface.register(attention, masked_attention(hidden, len(prefilled.prompt.token_ids)))
    try:
        expected = bench.engine.continue_logits(whole, given)
    finally:
        AttentionInterface.register(attention, plain)
    assert largest_error(found, expected) < 1e-4
    assert largest_error(found, unmasked) > 1e-2, "nothing was lost, so nothing was tested"


def hidden_rows(kept, whole):
    """(H, T) bool: rows of the whole layer that are not in the kept one."""
    there = close(whole.keys[0][:, :, None], kept.keys[0][:, None]).any(2)
    return ~there


def masked_attention(hidden, tokens):
    """Attention in plain steps, with some keys of the prompt hidden from some heads."""

    def attend(module, query, key, value, attention_mask, scaling=None, softcap=None, **kwargs):
        group, rows, keys = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
        scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * scaling
        if softcap is not None:
            scores = (scores / softcap).tanh() * softcap
        mask = torch.arange(keys)[None] > torch.arange(keys - rows, keys)[:, None]
        if attention_mask is not None:
            given = attention_mask[..., :keys]
            mask = mask | (~given if given.dtype == torch.bool else given < 0)
        gone = nn.functional.pad(hidden[module.layer_idx], (0, keys - tokens)).repeat_interleave(group, 0)
        scores = scores.masked_fill(mask | gone[None, :, None], -torch.inf)
        shares = scores.softmax(-1)
        return (shares @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), shares

    return attend


def test_answers_continue_after_eviction_and_report_it(engine):
    prompt = make_prompt(TEXTS)
    whole = engine.generate(prompt, max_new_tokens=8)
    less = engine.generate(prompt, max_new_tokens=8, keep_tokens=KEEP)
    lost = int(in_passages(whole.prompt).sum()) - KEEP
    assert (whole.report.evicted_tokens, less.report.evicted_tokens) == (0, lost)
    assert less.token_ids[0] == whole.token_ids[0], "the first token comes before anything is lost"
    assert less.report.tokens.prompt == whole.report.tokens.prompt


def test_an_evicted_prompt_is_not_decoded_as_if_it_were_whole(engine):
    """It was answered from what was left, without a word."""
    prefilled = engine.prefill(make_prompt(TEXTS))
    short = engine.decode(prefilled, max_new_tokens=3, keep_tokens=KEEP)
    assert engine.decode(prefilled, max_new_tokens=3, keep_tokens=KEEP).token_ids == short.token_ids
    with pytest.raises(UsageError, match="Prefill the prompt again"):
        engine.decode(prefilled, max_new_tokens=3)


def test_a_large_keep_tokens_evicts_nothing(engine):
    prompt = make_prompt(TEXTS)
    whole = engine.generate(prompt, max_new_tokens=8, method="full")
    tokens = int(in_passages(whole.prompt).sum())
    same = engine.generate(prompt, max_new_tokens=8, method="full", keep_tokens=tokens)
    assert same.token_ids == whole.token_ids and same.report.evicted_tokens == 0
    alone = engine.generate(make_prompt([], suffix="who kept them?"), max_new_tokens=4, keep_tokens=1)
    assert alone.report.evicted_tokens == 0


def test_eviction_frees_memory(engine):
    prefilled = engine.prefill(make_prompt(TEXTS), method="recompute")
    cache = prefilled.cache
    lost = evict(engine.runtime.decoder, prefilled.prompt, cache, KEEP)
    assert [held.evicted for held in cache.fused] == [lost] * len(cache.fused)
    assert cache.get_seq_length() == len(prefilled.prompt.token_ids)
    held = cache.fused[0]
    assert held.keys.shape[2] == len(prefilled.prompt.token_ids) - lost
    assert held.key_buffer.shape[2] < len(prefilled.prompt.token_ids) + 256
    assert evict(engine.runtime.decoder, prefilled.prompt, cache, KEEP) == lost, "once is enough"


def test_sessions_do_not_reuse_evicted_caches(engine):
    session = Session()
    with engine.stream(make_prompt(TEXTS), session=session, max_new_tokens=4) as stream:
        assert stream.result.report.evicted_tokens == 0
    assert session.tokens > 0
    with engine.stream(make_prompt(TEXTS), session=session, max_new_tokens=4, keep_tokens=3) as stream:
        assert stream.result.report.evicted_tokens > 0
    assert session.tokens == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many"])
def test_invalid_keep_tokens_is_refused(engine, wrong):
    with pytest.raises(UsageError, match="keep_tokens"):
        engine.generate(make_prompt(TEXTS[:1]), keep_tokens=wrong)


def test_keep_tokens_is_refused_for_unfused_models(bench_for):
    with pytest.raises(UnsupportedModelError, match="keep_tokens"):
        bench_for("gpt2").engine.generate(make_prompt(TEXTS), max_new_tokens=4, keep_tokens=KEEP)
