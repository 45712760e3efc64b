"""The transplant oracle: true KV copied in at the rows that another policy chooses.

If it is far better than computing the same rows again, the trouble is stale neighbours, not the choice (design,
section 8). Only a bench has the true KV, so a policy by that name cannot serve.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Attention, Change, Probed, Shift
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.cache import FusedCache


@dataclass(frozen=True)
class Transplant(Policy):
    """True KV at the rows that the policy named `by` chooses, before anything is computed.

    truth: the cache that full prefill of the same prompt filled, and chooser: that policy, come from `given`.
    """

    by: str = "probe"
    truth: Any = None
    chooser: Policy | None = None
    name: str = field(default="transplant", kw_only=True)
    _chosen: list[Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    def check(self, known: Mapping[str, Policy]) -> None:
        """Raises UsageError unless `by` is one of the known policies that settle their rows before any is computed."""
        able = [
            name
            for name, policy in known.items()
            if policy.fixed_ratio is None and type(policy).narrow is Policy.narrow
        ]
        if self.by not in able:
            raise UsageError(
                f"method {self.name!r}: by={self.by} is no method that chooses rows before any is computed; there are "
                f"{', '.join(able)}"
            )

    def given(self, truth: "FusedCache", chooser: Policy) -> "Transplant":
        """The policy for one prompt."""
        return replace(self, truth=truth, chooser=chooser)

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        return self._by.probe_rows(plan, probed)

    def watches(self, plan: Plan, layer: int) -> bool:
        return self._by.watches(plan, layer)

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        return self._by.look(plan, attention)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        chosen = self._by.rows(plan, probed)
        self._chosen[:] = [chosen[plan.candidates[chosen]]]
        return super().rows(plan)

    def corrects(self, plan: Plan) -> bool:
        return True

    def correct(self, plan: Plan, change: Change) -> Shift | None:
        rows = self._chosen[0]
        at = rows - change.start
        true_keys, true_values = self.truth.span(change.layer, 0, plan.tokens)
        keys, values = (
            torch.zeros_like(change.stored_keys, dtype=torch.float32),
            torch.zeros_like(change.stored_values, dtype=torch.float32),
        )
        keys[:, at] = change.still(true_keys[:, rows].float(), rows) - change.stored_keys[:, at]
        values[:, at] = true_values[:, rows].float() - change.stored_values[:, at]
        return Shift(keys, values)

    @property
    def _by(self) -> Policy:
        if self.chooser is None:
            raise UsageError(
                f"method {self.name!r} copies from a full prefill, which only `ragblend bench quality` has at hand"
            )
        return self.chooser
