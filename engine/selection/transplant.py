"""The transplant oracle: true KV copied in at the rows that another policy chooses.

If it is far better than computing the same rows again, the trouble is stale neighbours, not the choice (design, section 8).
Only a bench has the true KV, so a policy by that name cannot serve.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Attention, Change, Probed, Shift
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Transplant(Policy):
    """One prompt's. truth: the cache that full prefill of the same prompt filled; by: the policy that chooses."""

    truth: Any = None
    by: Any = None
    name: str = field(default="transplant", kw_only=True)
    _chosen: list[Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        if self.truth is None or self.by is None:
            raise UsageError(
                "transplant copies from a full prefill, which only `ragblend bench quality` has at hand"
            )
        rows: Tensor | None = self.by.probe_rows(plan, probed)
        return rows

    def watches(self, plan: Plan, layer: int) -> bool:
        return bool(self.by.watches(plan, layer))

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        found: Tensor = self.by.look(plan, attention)
        return found

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        chosen = self.by.rows(plan, probed) if self.by is not None else super().rows(plan)
        self._chosen[:] = [chosen[plan.candidates[chosen]]]
        return super().rows(plan)

    def corrects(self, plan: Plan) -> bool:
        return self.by is not None

    def correct(self, plan: Plan, change: Change) -> Shift | None:
        rows = self._chosen[0]
        keys, values = self.truth.span(change.layer, 0, plan.tokens)
        lacking_keys = keys[:, rows].float() - change.stored_keys[:, rows].float()
        lacking_values = values[:, rows].float() - change.stored_values[:, rows].float()
        groups = torch.full((plan.tokens,), -1, device=rows.device)
        groups[rows] = torch.arange(rows.numel(), device=rows.device)
        return Shift(change.still(lacking_keys, rows), lacking_values, groups)
