"""Rows on their way through the layers: what a request carries with it, and what takes its rows through one layer."""

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache, Mode, Peeked
from ragblend.engine.correction import Correction
from ragblend.engine.decoder import Decoder, RowState, See
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Evidence, joined
from ragblend.engine.trace import Recorder
from ragblend.kvstore.errors import Cancelled

# More rows than this pass through a layer in several goes. That changes nothing they compute (a row sees only what is
# before it, and goes are in order), and keeps activations small beside the KV.
BATCH_ROWS = 1024


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
    # settled: whether a probe has computed the rows that the prompt begins with and nothing can change; waiting: these
    # rows, where that probe ended before the last layer.
    settled: bool = False
    waiting: Waiting | None = None

    def check_cancelled(self) -> None:
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("the prefill was cancelled")


def begin_work(run: Run, rows: Tensor, watched: int = 0, absent: Tensor | None = None) -> Work:
    """Rows (R,) before the first layer, but for those that a probe has settled."""
    if run.settled:
        rows = rows[rows >= run.plan.settled_tokens]
    hidden = run.decoder.embed(run.plan.token_ids[rows])
    return make_work(run, rows, hidden, watched, absent)


def make_work(run: Run, rows: Tensor, hidden: Tensor, watched: int = 0, absent: Tensor | None = None) -> Work:
    """Rows (R,) before a layer, cut into goes, with the correction that they bring about."""
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


def take_through(
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


def narrowed(run: Run, work: Work, keep: Tensor) -> Work:
    """The same work with only the rows `keep`, ascending positions among the current ones."""
    if keep.numel() == work.rows.numel():
        return work
    hidden = work.hidden.index_select(1, torch.searchsorted(work.rows, keep))
    return make_work(run, keep, hidden)
