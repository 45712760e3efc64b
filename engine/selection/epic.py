"""EPIC's LegoLink: recompute where chunks begin, for there each chunk has made an attention sink of its own.

Source: EPIC (arXiv 2410.15332, ICML'25), section 4: a fixed number of tokens at the beginning of each chunk (16 or 32),
whatever the question. Cost: these tokens in all layers; nothing is looked at.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Policy, budget_rows, pick_top
from ragblend.engine.selection.evidence import Probed
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Epic(Policy):
    """The first and last tokens of each chunk.

    first, last: so many of each chunk, at most what the ratio pays for (those nearest to a chunk's ends go first);
    both 0: as many as the ratio pays for, the share last_share of them at the ends.
    """

    first: int = 0
    last: int = 0
    last_share: float = 0.0
    name: str = field(default="epic", kw_only=True)

    def __post_init__(self) -> None:
        if self.first < 0 or self.last < 0 or not 0 <= self.last_share < 1:
            raise UsageError(
                f"method {self.name!r}: first and last must be at least 0, last_share from 0 to below 1"
            )

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        everything = torch.arange(plan.tokens, device=plan.token_ids.device)
        scores = torch.full((plan.tokens,), -torch.inf)
        for span in plan.spans:
            scores[span.start : span.stop] = self._nearness(span.length)
        scores = scores.to(everything.device)
        wanted = int((scores.isfinite() & plan.candidates).sum())
        return pick_top(plan, everything, scores, min(budget_rows(plan), wanted))

    def _nearness(self, length: int) -> Tensor:
        """(length,) minus the rank of each token of a chunk; -inf for those that are never taken."""
        place = torch.arange(length, dtype=torch.float32)
        head, tail = place, place.flip(0)
        if self.first or self.last:
            head = torch.where(head < self.first, head, torch.inf)
            tail = torch.where(tail < self.last, tail, torch.inf)
            return -torch.minimum(head, tail)
        if self.last_share == 0:
            return -head
        return -torch.minimum(head / (1 - self.last_share), tail / self.last_share)
