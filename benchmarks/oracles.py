"""Oracles: methods that are given full prefill's KV, for comparison.

    python -m benchmarks.quality --data FILE --methods full,probe-shift,transplant:by=probe-shift

`transplant` copies full prefill's KV at the rows that another policy selects: if it is far better than recomputing
these rows, the problem is stale neighbours, not the selection.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection import METHODS, Policy
from ragblend.engine.selection.base import Attention, ProbeResult
from ragblend.engine.selection.shift import Delta, LayerChange
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.cache import FusedCache


@dataclass(frozen=True)
class Transplant(Policy):
    """Uses true KV at the rows that the method `by` selects before anything is computed.

    truth: the cache of full prefill of the same prompt. Raises UsageError for a method that selects later.
    """

    by: str = "probe"
    truth: Any = None
    name: str = field(default="transplant", kw_only=True)
    _chosen: list[Tensor] = field(default_factory=list, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        able = [
            name
            for name, policy in METHODS.items()
            if name == "recompute" or (policy.fixed_ratio is None and type(policy).narrow is Policy.narrow)
        ]
        if self.by not in able:
            raise UsageError(
                f"by={self.by} is no method that chooses rows before any is computed; there are {', '.join(able)}"
            )

    def given(self, truth: "FusedCache") -> "Transplant":
        """The oracle with the cache of full prefill of its prompt."""
        return replace(self, truth=truth)

    def probe_rows(self, plan: Plan) -> Tensor | None:
        return self._by.probe_rows(plan)

    def attention_layers(self, plan: Plan) -> range:
        return self._by.attention_layers(plan)

    def layer_scores(self, plan: Plan, attention: Attention) -> Tensor:
        return self._by.layer_scores(plan, attention)

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        chosen = self._by.rows(plan, probed)
        self._chosen[:] = [chosen[plan.candidates[chosen]]]
        return super().rows(plan)

    def corrects(self, plan: Plan) -> bool:
        return True

    def deltas(self, plan: Plan, change: LayerChange) -> Iterator[Delta]:
        rows, (keys, values) = self._chosen[0], change.stored(self._chosen[0])
        if rows.numel():
            true_keys, true_values = self.truth.span(change.layer, 0, plan.tokens)
            apart = (
                change.unrotated(true_keys[:, rows].float(), rows) - keys,
                true_values[:, rows].float() - values,
            )
            start, stop = int(rows[0]), int(rows[-1]) + 1
            yield Delta(start, *(_spread(part, rows - start, stop - start) for part in apart))

    @property
    def _by(self) -> Policy:
        if self.truth is None:
            raise UsageError(
                f"method {self.name!r} copies from a full prefill, which only `bench quality` has at hand"
            )
        return METHODS[self.by]


def _spread(part: Tensor, at: Tensor, count: int) -> Tensor:
    """Place rows (H, n, D) at these indices of `count` rows of zeros."""
    return part.new_zeros(part.shape[0], count, part.shape[2]).index_copy_(1, at, part)
