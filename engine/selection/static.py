"""Rows known from the plan alone: the ends of the scale, the control, and EPIC."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, Span
from ragblend.engine.selection.base import Policy, ProbeResult, budget_rows, every_row, pick_top
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Static(Policy):
    """choose(plan): (R,) ascending positions to compute in all layers; loads(span): whether its stored KV is used."""

    choose: Callable[[Plan], Tensor]
    loads: Callable[[Span], bool] | None = None

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        return self.choose(plan)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        return tuple(span for span in super().spans(plan) if self.loads is None or self.loads(span))


def random_rows(plan: Plan) -> Tensor:
    """As many rows as the ratio pays for, drawn with the plan's seed: what any judgement must beat."""
    scores = torch.rand(plan.tokens, generator=torch.Generator().manual_seed(plan.seed))
    return pick_top(plan, every_row(plan), scores.to(plan.token_ids.device), budget_rows(plan))


@dataclass(frozen=True)
class Beginnings:
    """The beginnings of chunks, evenly many, for there each has made an attention sink of its own.

    first: so many tokens of each chunk, at most what the ratio pays for; 0: as many as that. Source: EPIC's LegoLink
    (arXiv 2410.15332, ICML'25), section 4, which takes 16 or 32 whatever the question. Cost: these rows alone.
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
    """(T,) float32: minus the place of each row in its chunk; 0 in no chunk."""
    scores = torch.zeros(plan.tokens)
    for span in plan.spans:
        scores[span.start : span.stop] = -torch.arange(span.length, dtype=torch.float32)
    return scores.to(plan.token_ids.device)
