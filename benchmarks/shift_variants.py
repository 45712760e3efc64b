"""`probe-shift` with parts changed, to measure the effect of each part on figures (docs/methods.md).

    python -m benchmarks.shift_variants --figures --methods full,probe-shift,variant:keys=0 --ratios 0.15

Takes the options of `ragblend bench quality`, and `--fresh` after a change here. Parameters of `variant`:

    keys, values    what the shift of each is multiplied by
    first, last     the share of the layers from and up to which anything is shifted
    spared          rows that are not shifted: `figures`, or `looked-at` (those that the question attends to most)
    scope           where a row's shift comes from: `all` recomputed rows, those of its own `passage`, or the `mean`
                    change of its own passage, as AgentKVShift has it (arXiv 2607.21604)
    figure_gain     as in `probe-shift`
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from unittest.mock import patch

import torch
from torch import Tensor

from ragblend.app.cli.main import main
from ragblend.engine.plan import Plan
from ragblend.engine.selection import (
    METHODS,
    ByAttention,
    Delta,
    KernelShift,
    LayerChange,
    Policy,
    by_attention,
)
from ragblend.engine.selection.base import ProbeResult
from ragblend.engine.selection.shift import (
    NEAR_GAIN,
    NEAR_TOKENS,
    NOISE,
    SHRINK_PER_DIMENSION,
    STRENGTH,
    RowScale,
)
from ragblend.kvstore.errors import UsageError

LOOKED_AT = 0.3  # share of the stored rows
SCOPES, SPARED = ("all", "passage", "mean"), ("", "figures", "looked-at")


@dataclass(frozen=True)
class ShiftVariant(ByAttention):
    """`probe-shift` with parts changed."""

    keys: float = field(default=1.0, kw_only=True)
    values: float = field(default=1.0, kw_only=True)
    first: float = field(default=0.0, kw_only=True)
    last: float = field(default=1.0, kw_only=True)
    spared: str = field(default="", kw_only=True)
    scope: str = field(default="all", kw_only=True)
    _scores: list[Tensor] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value, known in (("scope", self.scope, SCOPES), ("spared", self.spared, SPARED)):
            if value not in known:
                raise UsageError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        self._scores[:] = [] if probed is None else [self.scores(probed)]
        return super().rows(plan, probed)

    def deltas(self, plan: Plan, change: LayerChange) -> Iterable[Delta]:
        if not self.first * plan.layers <= change.layer < self.last * plan.layers:
            return
        shifted = torch.ones(plan.tokens, dtype=change.context.dtype, device=plan.token_ids.device)
        if self.spared == "figures" and plan.figures is not None:
            shifted[plan.figures.is_figure] = 0
        if self.spared == "looked-at" and self._scores:
            seen = self._scores[0].masked_fill(~plan.candidates, -torch.inf)
            shifted[seen.topk(round(LOOKED_AT * plan.stored_tokens)).indices] = 0
        found = KernelShift().deltas(change) if self.scope == "all" else self._passage_deltas(change)
        for delta in found:
            factors = shifted[delta.start : delta.start + delta.keys.shape[1]][None, :, None]
            yield Delta(delta.start, self.keys * factors * delta.keys, self.values * factors * delta.values)

    def _passage_deltas(self, change: LayerChange) -> Iterable[Delta]:
        run, heads = change.context, change.keys.shape
        observed = torch.cat([each.transpose(0, 1).flatten(1) for each in (change.keys, change.values)], 1)
        for begin, end in run.chunks:
            own = (run.computed >= begin) & (run.computed < end)
            if int(own.sum()) < 2:
                continue
            added = self._correction(change, observed[own], run.computed[own], slice(begin, end)).to(
                run.dtype
            )
            keys, values = added[:, : heads[0] * heads[2]], added[:, heads[0] * heads[2] :]
            by_head = [each.unflatten(1, (heads[0], -1)).transpose(0, 1) for each in (keys, values)]
            yield Delta(begin, *by_head)

    def _correction(self, change: LayerChange, observed: Tensor, computed: Tensor, chunk: slice) -> Tensor:
        """(n, F): the correction of one chunk's rows from the observed changes (C, F) of its computed rows."""
        count = len(observed)
        trust = STRENGTH * count / (count + SHRINK_PER_DIMENSION * change.keys.shape[-1])
        if self.scope == "mean":
            return (trust * observed.mean(0, keepdim=True)).expand(chunk.stop - chunk.start, -1)
        known = change.stored(computed)
        scale = RowScale.of(*known)
        fitted, every = scale.scaled(*known).float(), scale.scaled(*change.stored(chunk)).float()
        system = _similarity(fitted, fitted, computed, computed)
        system.diagonal().add_(NOISE)
        near = _similarity(
            every, fitted, torch.arange(chunk.start, chunk.stop, device=computed.device), computed
        )
        return near @ torch.linalg.solve(system, trust * observed)


def _similarity(rows: Tensor, others: Tensor, at: Tensor, others_at: Tensor) -> Tensor:
    size = rows.shape[1] - 4  # the last four columns are squared lengths
    apart = torch.cdist(rows[:, :size], others[:, :size])
    gain = 1 + NEAR_GAIN * (-(at[:, None] - others_at).abs() / NEAR_TOKENS).exp()
    return gain / (1 + apart.square()).sqrt()


def _variant() -> Policy:
    ours = METHODS["probe-shift"]
    assert isinstance(ours, ByAttention)
    return ShiftVariant(
        by_attention.later_layers,
        by_attention.rooted_squares,
        probe=by_attention.question_rows,
        cheaper_layers=by_attention.second_quarter,
        shift=KernelShift(),
        figure_gain=ours.figure_gain,
        name="variant",
    )


VARIANT = _variant()

if __name__ == "__main__":
    with patch.dict(METHODS, {VARIANT.name: VARIANT}):
        sys.exit(main(["bench", "quality", *sys.argv[1:]]))
