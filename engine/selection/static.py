"""Policies whose rows are known from the plan: baselines, random rows, and EPIC."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, Span
from ragblend.engine.selection.base import Policy, ProbeResult, budget_rows, every_row, pick_top
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Static(Policy):
    """Computes the same rows in all layers.

    choose(plan): (R,) ascending positions; loads(span): whether to use the span's stored KV, by default always.
    """

    choose: Callable[[Plan], Tensor]
    loads: Callable[[Span], bool] | None = None

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        return self.choose(plan)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        return tuple(span for span in super().spans(plan) if self.loads is None or self.loads(span))


def random_rows(plan: Plan) -> Tensor:
    """Random rows, as many as the budget allows, by the plan's seed: the control for all policies."""
    scores = torch.rand(plan.tokens, generator=torch.Generator().manual_seed(plan.seed))
    return pick_top(plan, every_row(plan), scores.to(plan.token_ids.device), budget_rows(plan))


@dataclass(frozen=True)
class Beginnings:
    """The first tokens of each chunk, equally many, because encoding a chunk alone makes them an attention sink.

    first: tokens per chunk, within the budget; 0: as many as the budget allows. Source: EPIC's LegoLink (arXiv
    2410.15332, ICML'25), section 4, which takes 16 or 32 for any question. Cost: these rows.
    """

    first: int = 0

    def __post_init__(self) -> None:
        if self.first < 0:
            raise UsageError(f"first must be at least 0, not {self.first}")

    def __call__(self, plan: Plan) -> Tensor:
        scores, count = nearness_to_beginning(plan), budget_rows(plan)
        if self.first:
            scores = scores.masked_fill(scores <= -self.first, -torch.inf)
            count = min(count, int((plan.candidates & scores.isfinite()).sum()))
        return pick_top(plan, every_row(plan), scores, count)


def nearness_to_beginning(plan: Plan) -> Tensor:
    """(T,) float32: minus each row's index in its chunk; 0 outside chunks."""
    scores = torch.zeros(plan.tokens)
    for span in plan.spans:
        scores[span.start : span.stop] = -torch.arange(span.length, dtype=torch.float32)
    return scores.to(plan.token_ids.device)
