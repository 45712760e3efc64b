"""Rows whose KV deviates most in one layer: CacheBlend (EuroSys'25, §4.3), high-KV-deviation tokens.

Deviation is the squared L2 distance between a token's new and stored KV, over heads and dimensions. Layer 0 depends
only on the token, so 1 is the first layer to check: layers before it are computed for all rows, and of the check layer
only keys and values, before its attention (CacheBlend's fork and LMCache compute that whole layer).

The ratio is the total cost, averaged over layers: layers before the check count as 1, the check as the attention's
share of a layer, and the remaining layers get the rest. `ratio` = 15% on 30 layers leaves about 11% of the rows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection import base
from ragblend.engine.selection.base import Evidence, Policy, ProbeResult
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class AfterLayer(Policy):
    """Computes all rows up to the check layer, and then those that deviate most.

    deviation(evidence): (R,) float32; check_layer: the layer whose deviation decides; shares: how the remaining ratio
    is spread over the layers from the check on, as non-increasing numbers, interpolated over the layers. One number:
    rows are selected once. `3/1`: gradual filtering (r1 > r2 > ..., §4.3 and Figure 9): each layer drops the rows whose
    own KV deviates least, from 1.5 times the mean ratio down to half of it.
    """

    deviation: Callable[[Evidence], Tensor]
    check_layer: int = 1
    shares: str = "1"

    def __post_init__(self) -> None:
        if self.check_layer < 0:
            raise UsageError(f"check_layer must be at least 0, not {self.check_layer}")
        self._parsed_shares()

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        # Without a budget nothing can be selected, and the check would only cost time.
        return base.needed_rows(plan) if plan.budget == 0 else base.inexact_rows(plan)

    def passes(self, plan: Plan) -> list[tuple[float, float]]:
        if not base.can_choose(plan):
            return super().passes(plan)
        check, always = self._check_layer(plan), plan.always_tokens
        remaining_rows = always + self.remaining_ratio(plan) * plan.stored_tokens
        every = always + plan.candidate_tokens
        return [(every, check + plan.attention_share), (remaining_rows, plan.layers - check)]

    def peeks(self, plan: Plan, layer: int) -> bool:
        return layer == self._check_layer(plan) and base.can_choose(plan)

    def narrows(self, plan: Plan, layer: int) -> bool:
        is_gradual = len(set(self._parsed_shares())) > 1
        return is_gradual and self._check_layer(plan) <= layer < plan.layers - 1 and base.can_choose(plan)

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        count = round(self.ratio_at(plan, next_layer) * plan.stored_tokens)
        return base.pick_top(plan, evidence.rows, self.deviation(evidence), count)

    def ratio_at(self, plan: Plan, layer: int) -> float:
        """Share of the stored tokens to compute in that layer, the check layer or a later one."""
        mean, check = self.remaining_ratio(plan), self._check_layer(plan)
        shares = _interpolated(self._parsed_shares(), plan.layers - check)
        offsets = [share * len(shares) / sum(shares) - 1 for share in shares]
        # Clipping the first layers would lower the mean, so all offsets shrink instead.
        if mean * (1 + offsets[0]) > base.recomputable_share(plan):
            offsets = [each * (base.recomputable_share(plan) / mean - 1) / offsets[0] for each in offsets]
        return mean * (1 + offsets[layer - check])

    def remaining_ratio(self, plan: Plan) -> float:
        """The remaining ratio per layer from the check layer on; a minimum if none remains."""
        check, most = self._check_layer(plan), base.recomputable_share(plan)
        spent = (check + plan.attention_share) * most
        remaining = (plan.ratio * plan.layers - spent) / (plan.layers - check)
        return min(max(remaining, min(base.FLOOR_RATIO, plan.ratio)), most)

    def _check_layer(self, plan: Plan) -> int:
        return min(self.check_layer, plan.layers - 1)

    def _parsed_shares(self) -> list[float]:
        try:
            shares = [float(share) for share in self.shares.split("/")]
        except ValueError:
            shares = [-1.0]
        is_non_increasing = all(before >= after for before, after in pairwise(shares))
        if not is_non_increasing or not 0 <= shares[-1] <= shares[0] < math.inf or shares[0] == 0:
            raise UsageError(
                "shares are numbers from 0 with / between, the first above 0 and none larger than the one before "
                f"(3/2/1), not {self.shares!r}"
            )
        return shares


def _interpolated(shares: list[float], layers: int) -> list[float]:
    """The shares, linearly interpolated to that many layers; their mean for one layer."""
    positions = np.linspace(0, len(shares) - 1, layers)
    by_layer: list[float] = np.interp(positions, range(len(shares)), shares).tolist()
    return by_layer if layers > 1 else [sum(shares) / len(shares)]


def value_deviation(evidence: Evidence) -> Tensor:
    """(R,) float32: the deviation of each row's values, as in CacheBlend's released code."""
    return _squared_distance(evidence.new_values, evidence.old_values)


def key_deviation(evidence: Evidence) -> Tensor:
    """(R,) float32: the deviation of each row's keys, as in LMCache."""
    return _squared_distance(evidence.new_keys, evidence.old_keys)


def _squared_distance(new: Tensor, old: Tensor) -> Tensor:
    delta = new.float() - old.float()  # (H, R, D)
    return delta.pow_(2).sum(dim=(0, 2))
