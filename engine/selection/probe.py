"""Our own: recompute what the question looks at in the later layers, and shift the rest as those rows were shifted.

The rows behind the last chunk run once through the reused KV. A token's score is the length (L2) of the vector of what
each of these rows gives it, by head, averaged over heads and over the chosen layers: the earliest look at sinks,
neighbours and separators. L2 favours a token that one row needs much over one that all need a little. What was measured
of sums, of early, middle and late layers, and of several passes: docs/methods.md.

A question that would take more of the budget than PROBE_SHARE is not asked: the first rows of each chunk are computed
then, and with witnesses as many others, evenly spread; that costs no choosing. Of long literals between and behind the
chunks (a conversation) only the end asks.

Cost: as `Asking`. passes: after a first part of the budget is computed, the question looks again through what is better
by then; each pass costs another probe.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.asking import Asking, fresh_rows
from ragblend.engine.selection.base import budget_rows, chooses, one_of, spread_evenly
from ragblend.engine.selection.baselines import nearness_to_beginning
from ragblend.engine.selection.evidence import WATCHED_ROWS, Attention, Change, Probed, Shift
from ragblend.engine.selection.shift import FORMS, shift_of
from ragblend.kvstore.errors import UsageError

NORMS = ("l2", "sum", "max")
# Of the budget, what a probe may take: beyond that, chunks' first rows and a shift came as near (docs/methods.md).
PROBE_SHARE = 1 / 3


@dataclass(frozen=True)
class Probe(Asking):
    """What the question looks at from layer `since` x L to `until` x L.

    norm: over the rows of the question, `l2`, `sum` or `max`; passes: probes in all; shift: what is added to the rows
    that are not computed, one of `shift.FORMS`; strength: how much of that. Of the rows to choose the share `firsts`
    are beginnings of chunks, and `witnesses` rows, at most a quarter, are spread evenly: all that a shift knows of rows
    that nobody looks at.
    """

    since: float = 0.25
    until: float = 1.0
    norm: str = "l2"
    passes: int = 1
    shift: str = "none"
    strength: float = 0.8
    firsts: float = 0.0
    witnesses: int = 0
    name: str = field(default="probe", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self.name, "norm", self.norm, NORMS)
        one_of(self.name, "shift", self.shift, FORMS)
        if not 0 <= self.since < self.until <= 1 or self.passes < 1 or not 0 <= self.strength < math.inf:
            raise UsageError(
                f"method {self.name!r}: 0 <= since < until <= 1, passes at least 1, strength at least 0 and finite"
            )
        if not 0 <= self.firsts <= 0.75 or self.witnesses < 0:
            raise UsageError(f"method {self.name!r}: firsts from 0 to 0.75, witnesses at least 0")

    def watches(self, plan: Plan, layer: int) -> bool:
        first = min(int(self.since * plan.layers), plan.layers - 1)
        return first <= layer < max(round(self.until * plan.layers), first + 1)

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        weights = attention.weights  # (N, W, K)
        if self.norm == "sum":
            return weights.sum(dim=1, dtype=torch.float32).mean(0)
        if self.norm == "max":
            return weights.amax(dim=1).float().mean(0)
        # torch's vector_norm over a middle dimension takes 11 times as long (9 x 48 x 3,766 on a CPU).
        return weights.float().square().sum(dim=1).sqrt_().mean(0)

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        if not chooses(plan) or (probed is not None and probed.passes >= self.passes):
            return None
        if probed is None:
            asking = _asking_rows(plan)
            return asking if self._pays(plan, asking) else None
        # What each other probe will cost is what the first one did: the same rows, through the same layers at least.
        # Of those that the budget cannot pay none is made.
        each = probed.cost_rows / probed.passes
        budget = plan.ratio * plan.stored_tokens - probed.cost_rows
        to_come = min(self.passes - probed.passes, int(budget / each) if each else 0)
        left = budget - to_come * each
        if to_come < 1 or left < 1:
            return None
        again = self.chosen(plan, probed, max(0, round(left / (to_come + 1))))
        missing = plan.always.clone()
        missing[fresh_rows(plan)] = False
        return again[~missing[again]]

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        if not chooses(plan):
            return super().rows(plan, probed)
        count = budget_rows(plan, probed)
        beginnings = nearness_to_beginning(plan)
        if probed is None:
            spread = count // 2 if self.witnesses else 0
            return _chosen(plan, plan.candidates, spread, (beginnings, count - spread))
        left = plan.candidates & ~probed.computed
        spread, firsts = min(self.witnesses, count // 4), round(count * self.firsts)
        best = count - spread - firsts
        return _chosen(plan, left, spread, (self.score(plan, probed), best), (beginnings, firsts))

    def _pays(self, plan: Plan, asking: Tensor) -> bool:
        """Whether a probe leaves enough of the budget for the rows that it chooses."""
        again = int((asking >= plan.settled_tokens).sum()) * self.until
        return again <= PROBE_SHARE * budget_rows(plan)

    def corrects(self, plan: Plan) -> bool:
        return self.shift != "none" and chooses(plan)

    def correct(self, plan: Plan, change: Change) -> Shift | None:
        return shift_of(self.shift, self.strength, plan, change)


def _asking_rows(plan: Plan) -> Tensor:
    """(R,) the literals; where they are long, those that the prompt begins with, and the end of those behind."""
    rows = fresh_rows(plan)
    if int((rows >= plan.settled_tokens).sum()) <= WATCHED_ROWS:
        return rows
    end = max(plan.suffix_start, plan.tokens - WATCHED_ROWS)
    return rows[(rows < plan.settled_tokens) | (rows >= end)]


def _chosen(plan: Plan, left: Tensor, spread: int, *ranked: tuple[Tensor, int]) -> Tensor:
    """(R,) the rows that must be computed, and of those left (T,) bool so many evenly spread over all of them; then for
    each of ranked, scores (T,) and a count, as many of the best of what is left."""
    left, rows = left.clone(), plan.always.clone()

    def take(those: Tensor) -> None:
        rows[those], left[those] = True, False

    take(spread_evenly(left.nonzero().squeeze(1), spread))
    for scores, count in ranked:
        take(scores.masked_fill(~left, -torch.inf).topk(min(count, int(left.sum()))).indices)
    return rows.nonzero().squeeze(1)
