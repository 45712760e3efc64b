"""The one layer loop: compute the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `fused_prefill`; `full` is the policy that keeps every row. A policy may have some rows run
first, through the KV as it was stored, to see what they look at (a probe, design section 5); the loop is the same.
"""

import threading
from functools import partial

import torch
from torch import Tensor

from ragblend.engine.attention import Watch
from ragblend.engine.cache import FusedCache, Mode, Peeked
from ragblend.engine.decoder import Decoder
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import WATCHED_ROWS, Attention, Evidence, Probed
from ragblend.engine.trace import Recorder
from ragblend.engine.work import Run, Spent, Waiting, Work, begin_work, make_work, narrowed, take_through


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
    run = Run(decoder, plan, policy, cache, recorder, cancel)
    cache.loader = loader
    try:
        probed = _probes(run)
        with recorder.device_part("select", "device"):
            rows = policy.rows(plan, probed)
        with recorder.device_part("prepare", "device"):
            work = begin_work(run, rows)
        for layer in range(plan.layers):
            run.check_cancelled()
            work = _layer(run, layer, _joined(run, layer, work))
        run.spent.recomputed += work.stored
        run.spent.rows = work.rows
        if run.computed is not None:
            run.spent.rows = torch.cat([run.computed.nonzero().squeeze(1), work.rows])
        with recorder.device_part("head", "device"):
            return decoder.head(work.hidden[:, -1:])[0], run.spent
    finally:
        cache.mode, cache.loader, cache.evidence, cache.rows, cache.correction = (
            Mode.APPEND,
            None,
            None,
            None,
            None,
        )


def _layer(run: Run, layer: int, work: Work) -> Work:
    """Take the rows through one layer, and leave behind those that the policy does not keep."""
    policy, plan, spent, record = run.policy, run.plan, run.spent, run.recorder.device_part
    if policy.peeks(plan, layer):
        spent.stored_layer_rows += plan.attention_share * work.stored
        spent.layer_rows += plan.attention_share * work.rows.numel()
        with record("compute", "device", layer):
            evidence = take_through(run, layer, work, Mode.PEEK, collect=True)
        with record("select", "device", layer):
            work = narrowed(run, work, _choose(run, evidence, layer))
    narrows = policy.narrows(plan, layer)
    with record("compute", "device", layer):
        evidence = take_through(run, layer, work, Mode.SCATTER, collect=narrows)
    spent.stored_layer_rows += work.stored
    spent.layer_rows += work.rows.numel()
    if not narrows:
        return work
    with record("select", "device", layer):
        return narrowed(run, work, _choose(run, evidence, layer + 1))


def _probes(run: Run) -> Probed | None:
    """Run what the policy wants to see before it chooses."""
    policy, probed = run.policy, None
    while (rows := policy.probe_rows(run.plan, probed)) is not None:
        assert run.decoder.watches, f"{policy.name} must see attention, which this model does not show"
        probed = _probe(run, rows, probed)
    return probed


def probe_size(plan: Plan, policy: Policy) -> tuple[int, int, int, float]:
    """Of the first probe, zeros if there is none: its rows, its layers, rows that nothing can change, rows watched.

    Those watched are the mean over all layers.
    """
    rows = policy.probe_rows(plan, None)
    if rows is None or not rows.numel():
        return 0, 0, 0, 0.0
    stored = int((plan.kinds[rows] > Kind.MISSING).sum())
    first = int((rows < plan.settled_tokens).sum())
    settled = first if first == int(plan.always[: plan.settled_tokens].sum()) else 0
    share = sum(policy.watches(plan, layer) for layer in range(plan.layers)) / plan.layers
    return rows.numel(), _probe_layers(plan, policy, stored), settled, _watched_rows(plan, rows) * share


def _watched_rows(plan: Plan, rows: Tensor) -> int:
    """How many of a probe's rows are watched: those behind the last chunk, not too many."""
    return min(int((rows >= plan.suffix_start).sum()), WATCHED_ROWS)


def _probe_layers(plan: Plan, policy: Policy, stored: int) -> int:
    """All layers if stored rows are among the probe's, for they are computed for good; else up to the last watched."""
    return plan.layers if stored else max(n for n in range(plan.layers) if policy.watches(plan, n)) + 1


def _probe(run: Run, rows: Tensor, before: Probed | None) -> Probed:
    """One probe: rows through the layers up to the last one that is watched, or all if stored rows are among them."""
    policy, plan, spent = run.policy, run.plan, run.spent
    there = torch.zeros_like(plan.always)
    there[rows] = True
    first = int(there[: plan.settled_tokens].sum())
    absent = plan.always & ~there
    if run.settled:
        absent[: plan.settled_tokens] = False
    gone = absent.nonzero().squeeze(1)
    watched = _watched_rows(plan, rows)
    with run.recorder.device_part("prepare", "device"):
        work = begin_work(run, rows, watched, absent if gone.numel() else None)
    layers = _probe_layers(plan, policy, work.stored)
    scores: dict[int, Tensor] = {}
    for layer in range(layers):
        run.check_cancelled()
        work = _joined(run, layer, work)
        if gone.numel():
            run.cache.blank(layer, gone)
        leave = layer == layers - 1 < plan.layers - 1
        see = partial(_see, run, scores, leave) if policy.watches(plan, layer) else None
        with run.recorder.device_part("probe", "device", layer):
            take_through(run, layer, work, Mode.SCATTER, see=see)
        spent.layer_rows += work.rows.numel()
        spent.stored_layer_rows += work.stored
    settles = run.settled or first == int(plan.always[: plan.settled_tokens].sum())
    again = rows.numel() - work.stored - (first if settles else 0)
    again_layer_rows = again * layers
    if settles:
        run.settled, run.waiting = True, _left(run, work, layers)
        again_layer_rows += (
            run.waiting.rows.numel() if run.waiting is not None else 0
        )  # in the layer that was left
    spent.again_layer_rows += again_layer_rows
    spent.probe_rows += rows.numel()
    spent.recomputed += work.stored
    computed = there & (plan.kinds > Kind.MISSING)
    cost = (again_layer_rows + work.stored * layers) / plan.layers
    if before is not None:
        computed, cost = computed | before.computed, cost + before.cost_rows
    run.computed = computed
    return Probed(scores, computed, before.passes + 1 if before is not None else 1, cost)


def _left(run: Run, work: Work, layers: int) -> Waiting | None:
    """The rows that nothing can change, after so many layers; None where these were all."""
    if layers == run.plan.layers:
        return None
    count = int((work.rows < run.plan.settled_tokens).sum())
    return Waiting(layers - 1, work.rows[:count], work.hidden[:, :count])  # the last one was left early


def _joined(run: Run, layer: int, work: Work) -> Work:
    """The work, with the rows that wait for this layer, which stand before all others."""
    waiting = run.waiting
    if waiting is None or waiting.layer != layer or not waiting.rows.numel():
        return work
    run.waiting = None
    rows = torch.cat([waiting.rows, work.rows])
    hidden = torch.cat([waiting.hidden, work.hidden], dim=1)
    return make_work(run, rows, hidden, work.watched, work.absent)


def _see(
    run: Run,
    scores: dict[int, Tensor],
    leave: bool,
    layer: int,
    watch: Watch,
    queries: Tensor,
    keys: Tensor,
    scaling: float,
    weights: Tensor,
) -> None:
    """Have the policy sum up one layer's attention. leave: nothing of the layer is wanted but that."""
    attention = Attention(layer, watch.first_key, queries, keys, scaling, watch.mask, weights)
    found = run.policy.look(run.plan, attention)
    scores[layer] = torch.nn.functional.pad(found, (watch.first_key, 0))
    if leave:
        raise Peeked


def _choose(run: Run, evidence: Evidence | None, next_layer: int) -> Tensor:
    assert evidence is not None
    return run.policy.narrow(run.plan, evidence, next_layer)
