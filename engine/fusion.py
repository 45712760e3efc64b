"""The one layer loop: compute the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `fused_prefill`; `full` is the policy that keeps every row.
"""

import threading
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache, Mode, Peeked
from ragblend.engine.decoder import Decoder, RowState
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Evidence, Policy
from ragblend.kvstore.errors import Cancelled


@dataclass
class Spent:
    """What the loop did: layer-rows of stored tokens that were computed, and the time that choosing took."""

    stored_layer_rows: float = 0.0
    last_layer_recomputed: int = 0
    select_ms: float = 0.0


@torch.inference_mode()
def fused_prefill(
    decoder: Decoder,
    plan: Plan,
    policy: Policy,
    cache: FusedCache,
    loader: LayerLoader,
    cancel: threading.Event | None = None,
) -> tuple[Tensor, Spent]:
    """Fill the cache for the whole prompt and return the last row's logits, (vocab,) float32.

    The loader must have been started for the same cache. Raises Cancelled between layers, LostChunk from the loader.
    """
    spent = Spent()
    rows = policy.rows(plan)
    hidden = decoder.embed(plan.token_ids[rows])
    state = decoder.rows(rows, plan.tokens, hidden)
    cache.loader = loader
    try:
        for layer in range(plan.layers):
            if cancel is not None and cancel.is_set():
                raise Cancelled("the prefill was cancelled")
            if policy.peeks(plan, layer):
                spent.stored_layer_rows += plan.attention_share * _stored(plan, state.rows)
                keep = _choose(policy, plan, _peek(decoder, layer, hidden, state, cache, plan), layer, spent)
                hidden, state = _narrowed(decoder, plan, hidden, state, keep)
            narrows = policy.narrows(plan, layer)
            hidden = _run(decoder, layer, hidden, state, cache, plan, collect=narrows)
            spent.last_layer_recomputed = _stored(plan, state.rows)
            spent.stored_layer_rows += spent.last_layer_recomputed
            if narrows:
                assert cache.evidence is not None
                keep = _choose(policy, plan, cache.evidence, layer + 1, spent)
                hidden, state = _narrowed(decoder, plan, hidden, state, keep)
        return decoder.head(hidden[:, -1:])[0], spent
    finally:
        cache.mode, cache.loader, cache.evidence, cache.rows = Mode.APPEND, None, None, None


def _run(
    decoder: Decoder,
    layer: int,
    hidden: Tensor,
    state: RowState,
    cache: FusedCache,
    plan: Plan,
    collect: bool,
) -> Tensor:
    cache.mode, cache.collect = Mode.SCATTER, collect
    cache.rows = state.rows if state.rows.numel() < plan.tokens else None
    return decoder.run_layer(layer, hidden, state, cache)


def _peek(
    decoder: Decoder, layer: int, hidden: Tensor, state: RowState, cache: FusedCache, plan: Plan
) -> Evidence:
    """New KV of these rows in this layer, without the layer's attention or feed-forward."""
    cache.mode, cache.collect = Mode.PEEK, True
    cache.rows = state.rows if state.rows.numel() < plan.tokens else None
    try:
        decoder.run_layer(layer, hidden, state, cache)
    except Peeked:
        assert cache.evidence is not None
        return cache.evidence
    raise AssertionError(f"layer {layer} never called the cache")


def _choose(policy: Policy, plan: Plan, evidence: Evidence, next_layer: int, spent: Spent) -> Tensor:
    begun = time.perf_counter()
    keep = policy.narrow(plan, evidence, next_layer)
    spent.select_ms += (time.perf_counter() - begun) * 1e3
    return keep


def _narrowed(
    decoder: Decoder, plan: Plan, hidden: Tensor, state: RowState, keep: Tensor
) -> tuple[Tensor, RowState]:
    """The same hidden states with only the rows `keep`, ascending positions among the current ones."""
    if keep.numel() == state.rows.numel():
        return hidden, state
    hidden = hidden.index_select(1, torch.searchsorted(state.rows, keep))
    return hidden, decoder.rows(keep, plan.tokens, hidden)


def _stored(plan: Plan, rows: Tensor) -> int:
    return rows.numel() - plan.always_tokens  # the rows that every policy computes are in every row set
