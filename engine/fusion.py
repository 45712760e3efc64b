"""The one layer loop: compute the chosen rows against the fused KV (CacheBlend §4.2, §5).

Every method runs through `fused_prefill`; `full` is the policy that keeps every row. A policy may have some rows run
first, through the KV as it was stored, to see what they look at (a probe, design section 5); the loop is the same.
"""

import threading
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ragblend.engine.attention import Watch
from ragblend.engine.cache import FusedCache, Mode, Peeked
from ragblend.engine.correction import Correction
from ragblend.engine.decoder import Decoder, RowState, See
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Attention, Evidence, Probed, joined
from ragblend.engine.trace import Recorder
from ragblend.kvstore.errors import Cancelled, UnsupportedModelError

# More rows than this pass through a layer in several goes. That changes nothing they compute (a row sees only what is
# before it, and goes are in order), and keeps activations small beside the KV.
BATCH_ROWS = 1024
# Of the rows behind the last chunk at most so many, the last ones, are watched: their weights are (N, W, T) numbers.
WATCHED_ROWS = 128


@dataclass
class Spent:
    """What the loop did: layer-rows that were computed.


    layer_rows: all; stored_layer_rows: of stored tokens; again_layer_rows: of fresh tokens, in probes, that were
    computed again after them. recomputed: stored tokens computed through the last layer. probe_rows: of all probes.
    rows: (R,) those that the last layer or a probe's computed.
    """

    layer_rows: float = 0.0
    stored_layer_rows: float = 0.0
    again_layer_rows: float = 0.0
    recomputed: int = 0
    probe_rows: int = 0
    rows: Tensor | None = None


@dataclass
class Work:
    """Rows on their way through the layers: rows (R,), hidden (1, R, hidden), and the state of each go.

    stored: how many of the rows are of stored tokens; watched: how many, the last ones, can be watched; absent (T,)
    bool: what they must not look at.
    """

    rows: Tensor
    hidden: Tensor
    goes: list[RowState]
    stored: int
    watched: int
    absent: Tensor | None


@dataclass
class Waiting:
    """Rows (R,) that are done up to a layer, and hidden (1, R, hidden), which goes into it."""

    layer: int
    rows: Tensor
    hidden: Tensor


@dataclass
class Run:
    """One request on its way: what every step of the loop needs."""

    decoder: Decoder
    plan: Plan
    policy: Policy
    cache: FusedCache
    recorder: Recorder
    cancel: threading.Event | None
    spent: Spent = field(default_factory=Spent)
    computed: Tensor | None = None  # (T,) bool: stored rows that probes have computed for good
    settled: bool = (
        False  # whether a probe has computed the rows that the prompt begins with and nothing can change
    )
    waiting: "Waiting | None" = None  # these rows, where that probe ended before the last layer

    def check_cancelled(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("the prefill was cancelled")


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

    The loader must have been started for the same cache. Raises Cancelled between layers, LostChunk from the loader,
    UnsupportedModelError where a policy must see attention that the model does not show.
    """
    run = Run(decoder, plan, policy, cache, recorder, cancel)
    cache.loader = loader
    try:
        probed = _probes(run)
        with recorder.device_part("select", "device"):
            rows = policy.rows(plan, probed)
        with recorder.device_part("prepare", "device"):
            work = _begin(run, rows)
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
            evidence = _run(run, layer, work, Mode.PEEK, collect=True)
        with record("select", "device", layer):
            work = _narrowed(run, work, _choose(run, evidence, layer))
    narrows = policy.narrows(plan, layer)
    with record("compute", "device", layer):
        evidence = _run(run, layer, work, Mode.SCATTER, collect=narrows)
    spent.stored_layer_rows += work.stored
    spent.layer_rows += work.rows.numel()
    if not narrows:
        return work
    with record("select", "device", layer):
        return _narrowed(run, work, _choose(run, evidence, layer + 1))


def _probes(run: Run) -> Probed | None:
    """Run what the policy wants to see before it chooses."""
    policy, probed = run.policy, None
    while (rows := policy.probe_rows(run.plan, probed)) is not None:
        if not run.decoder.watches:
            raise UnsupportedModelError(
                f"the method {policy.name!r} must see what rows look at, which this model's layers do not show; "
                "use `cacheblend`"
            )
        probed = _probe(run, rows, probed)
    return probed


def probe_size(plan: Plan, policy: Policy) -> tuple[int, int, int]:
    """Rows of the first probe, its layers, and how many of the rows nothing can change; zeros where there is none."""
    rows = policy.probe_rows(plan, None)
    if rows is None or not rows.numel():
        return 0, 0, 0
    stored = int((plan.kinds[rows] > Kind.MISSING).sum())
    first = int((rows < plan.settled_tokens).sum())
    settled = first if first == int(plan.always[: plan.settled_tokens].sum()) else 0
    return rows.numel(), _probe_layers(plan, policy, stored), settled


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
    watched = min(int((rows >= plan.suffix_start).sum()), WATCHED_ROWS)
    with run.recorder.device_part("prepare", "device"):
        work = _begin(run, rows, watched, absent if gone.numel() else None)
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
            _run(run, layer, work, Mode.SCATTER, see=see)
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
    return _work(run, rows, hidden, work.watched, work.absent)


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


def _begin(run: Run, rows: Tensor, watched: int = 0, absent: Tensor | None = None) -> Work:
    if run.settled:
        rows = rows[rows >= run.plan.settled_tokens]
    hidden = run.decoder.embed(run.plan.token_ids[rows])
    return _work(run, rows, hidden, watched, absent)


def _work(run: Run, rows: Tensor, hidden: Tensor, watched: int = 0, absent: Tensor | None = None) -> Work:
    decoder, plan = run.decoder, run.plan
    corrects = watched == 0 and run.policy.corrects(plan)
    # All rows in one go take attention's own causal path, which is faster than any mask. And where attention looks at
    # the whole buffers under a mask, what later goes will write must not be there as garbage: 0 times NaN is NaN. A
    # correction must know of all changes before the first row attends to it.
    whole = rows.numel() == plan.tokens or not decoder.blocked or corrects
    sizes = [rows.numel()] if whole else _go_sizes(rows.numel(), watched)
    ends = [0] * (len(sizes) - 1) + [watched]
    goes = [
        decoder.rows(part, plan.tokens, hidden, end, absent)
        for part, end in zip(rows.split(sizes), ends, strict=True)
    ]
    run.cache.correction = (
        Correction(decoder, plan, run.policy, run.cache, rows, run.computed) if corrects else None
    )
    return Work(rows, hidden, goes, int((plan.kinds[rows] > Kind.MISSING).sum()), watched, absent)


def _go_sizes(rows: int, watched: int) -> list[int]:
    """Sizes of the goes; the watched rows are all in the last one."""
    sizes = [BATCH_ROWS] * (rows // BATCH_ROWS) + ([rows % BATCH_ROWS] if rows % BATCH_ROWS else [])
    if len(sizes) > 1 and sizes[-1] < watched:
        last = sizes.pop()
        sizes[-1] += last
    return sizes or [0]


def _run(
    run: Run, layer: int, work: Work, mode: Mode, collect: bool = False, see: See | None = None
) -> Evidence | None:
    """Take the rows through one layer. Where that is left early (PEEK, or by `see`) they stay where they were."""
    moved, seen, cache = [], [], run.cache
    for state, hidden in zip(work.goes, work.hidden.split(_sizes(work), dim=1), strict=True):
        cache.mode, cache.collect = mode, collect
        cache.rows = state.rows if state.rows.numel() < run.plan.tokens else None
        try:
            moved.append(run.decoder.run_layer(layer, hidden, state, cache, see if state.watched else None))
        except Peeked:
            assert mode is Mode.PEEK or see is not None
        if collect:
            assert cache.evidence is not None, f"layer {layer} never called the cache"
            seen.append(cache.evidence)
            cache.evidence = None
    if len(moved) == len(work.goes):
        work.hidden = moved[0] if len(moved) == 1 else torch.cat(moved, dim=1)
    return joined(seen) if seen else None


def _sizes(work: Work) -> list[int]:
    return [state.rows.numel() for state in work.goes]


def _choose(run: Run, evidence: Evidence | None, next_layer: int) -> Tensor:
    assert evidence is not None
    return run.policy.narrow(run.plan, evidence, next_layer)


def _narrowed(run: Run, work: Work, keep: Tensor) -> Work:
    """The same work with only the rows `keep`, ascending positions among the current ones."""
    if keep.numel() == work.rows.numel():
        return work
    hidden = work.hidden.index_select(1, torch.searchsorted(work.rows, keep))
    return _work(run, keep, hidden)
