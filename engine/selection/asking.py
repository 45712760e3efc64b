"""Base of the policies that recompute what the question looks at: they run the fresh rows first, and watch them."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy, budget_rows, chooses, pick_top
from ragblend.engine.selection.evidence import Probed


@dataclass(frozen=True)
class Asking(Policy):
    """Probes once with all literals, and takes the rows with the highest `score`.

    Missing chunks are left out of the probe: they would cost as much again as they do anyway. The question does not see
    them there, and needs no advice about them. Cost: the rows of the probe that are computed again (all but what the
    prompt begins with), times the share of the layers that the probe runs through; the budget pays for them.
    """

    looks: bool = field(default=True, kw_only=True)

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        return None if probed is not None or not chooses(plan) else fresh_rows(plan)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        if probed is None:  # the ratio pays for none, or for all
            return (
                super().rows(plan)
                if plan.ratio == 0
                else (plan.always | plan.candidates).nonzero().squeeze(1)
            )
        return self.chosen(plan, probed, budget_rows(plan, probed))

    def chosen(self, plan: Plan, probed: Probed, count: int) -> Tensor:
        """The fresh rows, and `count` of the stored rows that no probe has computed yet."""
        everything = torch.arange(plan.tokens, device=plan.token_ids.device)
        left = plan.candidate_tokens - int(probed.computed.sum())
        scores = self.score(plan, probed).masked_fill(probed.computed, -torch.inf)
        return pick_top(plan, everything, scores, min(count, left))

    def score(self, plan: Plan, probed: Probed) -> Tensor:
        """(T,) float32 from what was seen: the mean over the watched layers."""
        return torch.stack(list(probed.scores.values())).mean(0)


def fresh_rows(plan: Plan) -> Tensor:
    """(R,) positions of the literals."""
    return (plan.kinds == Kind.FRESH).nonzero().squeeze(1)
