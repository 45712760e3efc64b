"""The one layer loop: compute the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `fused_prefill`; `full` is the policy that keeps every row.
"""

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache, Mode, Peeked
from ragblend.engine.decoder import Decoder, RowState
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Evidence, Policy, joined
from ragblend.engine.trace import Recorder
from ragblend.kvstore.errors import Cancelled

# More rows than this pass through a layer in several goes. That changes nothing they compute (a row sees only what is
# before it, and goes are in order), and keeps activations small beside the KV.
BATCH_ROWS = 1024


@dataclass
class Spent:
    """What the loop did: layer-rows of stored tokens that were computed; rows (R,) of the last layer."""

    stored_layer_rows: float = 0.0
    last_layer_recomputed: int = 0
    rows: Tensor | None = None


@dataclass
class Work:
    """Rows on their way through the layers: rows (R,), hidden (1, R, hidden), and the state of each go."""

    rows: Tensor
    hidden: Tensor
    goes: list[RowState]


@torch.inference_mode()
def fused_prefill(
    decoder: Decoder,
    plan: Plan,
    policy: Policy,
    cache: FusedCache,
    loader: LayerLoader,
    recorder: Recorder,
    cancel: threading.Event | None = None,
) -> tuple[Tensor, Spent]:
    """Fill the cache for the whole prompt and return the last row's logits, (vocab,) float32.

    The loader must have been started for the same cache. Raises Cancelled between layers, LostChunk from the loader.
    """
    spent = Spent()
    with recorder.device_part("select", "device"):
        rows = policy.rows(plan)
    with recorder.device_part("prepare", "device"):
        work = _work(decoder, plan, rows, decoder.embed(plan.token_ids[rows]))
    cache.loader = loader
    try:
        for layer in range(plan.layers):
            if cancel is not None and cancel.is_set():
                raise Cancelled("the prefill was cancelled")
            if policy.peeks(plan, layer):
                spent.stored_layer_rows += plan.attention_share * _stored(plan, work)
                with recorder.device_part("compute", "device", layer):
                    evidence = _run(decoder, layer, work, cache, plan, Mode.PEEK, collect=True)
                with recorder.device_part("select", "device", layer):
                    work = _narrowed(decoder, plan, work, _choose(policy, plan, evidence, layer))
            narrows = policy.narrows(plan, layer)
            with recorder.device_part("compute", "device", layer):
                evidence = _run(decoder, layer, work, cache, plan, Mode.SCATTER, collect=narrows)
            spent.last_layer_recomputed, spent.rows = _stored(plan, work), work.rows
            spent.stored_layer_rows += spent.last_layer_recomputed
            if narrows:
                with recorder.device_part("select", "device", layer):
                    work = _narrowed(decoder, plan, work, _choose(policy, plan, evidence, layer + 1))
        with recorder.device_part("head", "device"):
            return decoder.head(work.hidden[:, -1:])[0], spent
    finally:
        cache.mode, cache.loader, cache.evidence, cache.rows = Mode.APPEND, None, None, None


def _work(decoder: Decoder, plan: Plan, rows: Tensor, hidden: Tensor) -> Work:
    # All rows in one go take attention's own causal path, which is faster than any mask. And where attention looks at
    # the whole buffers under a mask, what later goes will write must not be there as garbage: 0 times NaN is NaN.
    whole = rows.numel() == plan.tokens or not decoder.blocked
    size = plan.tokens if whole else BATCH_ROWS
    return Work(rows, hidden, [decoder.rows(part, plan.tokens, hidden) for part in rows.split(size)])


def _run(
    decoder: Decoder, layer: int, work: Work, cache: FusedCache, plan: Plan, mode: Mode, collect: bool
) -> Evidence | None:
    """Take the rows through one layer; PEEK stops before its attention and leaves them where they were."""
    moved, seen = [], []
    for state, hidden in zip(work.goes, work.hidden.split(_sizes(work), dim=1), strict=True):
        cache.mode, cache.collect = mode, collect
        cache.rows = state.rows if state.rows.numel() < plan.tokens else None
        try:
            moved.append(decoder.run_layer(layer, hidden, state, cache))
        except Peeked:
            assert mode is Mode.PEEK
        if collect:
            assert cache.evidence is not None, f"layer {layer} never called the cache"
            seen.append(cache.evidence)
            cache.evidence = None
    if moved:
        work.hidden = moved[0] if len(moved) == 1 else torch.cat(moved, dim=1)
    return joined(seen) if seen else None


def _sizes(work: Work) -> list[int]:
    return [state.rows.numel() for state in work.goes]


def _choose(policy: Policy, plan: Plan, evidence: Evidence | None, next_layer: int) -> Tensor:
    assert evidence is not None
    return policy.narrow(plan, evidence, next_layer)


def _narrowed(decoder: Decoder, plan: Plan, work: Work, keep: Tensor) -> Work:
    """The same work with only the rows `keep`, ascending positions among the current ones."""
    if keep.numel() == work.rows.numel():
        return work
    hidden = work.hidden.index_select(1, torch.searchsorted(work.rows, keep))
    return _work(decoder, plan, keep, hidden)


def _stored(plan: Plan, work: Work) -> int:
    return work.rows.numel() - plan.always_tokens  # the rows that every policy computes are in every row set
