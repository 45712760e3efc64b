"""Rows narrowed from what one layer shows: CacheBlend (EuroSys'25, §4.3), high-KV-deviation tokens.

Deviation is the squared L2 distance between a token's new and stored KV, over heads and sizes. Layer 0 depends on the
token alone, so the first layer that can deviate is 1: layers before it are computed for every row, and of the check
layer only keys and values, before its attention (the fork and LMCache compute that layer whole as well).

The ratio is what is spent in all, averaged over layers: the layers before the check count as 1, the check itself as the
attention's share of a layer, and the rest gets what is left. `ratio` = 15% on 30 layers leaves about 11% of the rows.
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
    """All rows up to the check layer, from there on those that deviate most.

    deviation(evidence): (R,) float32; check_layer: the layer whose deviation decides; shares: how what is left of the
    ratio is spent over the layers from the check to the last, numbers that do not grow, in any unit, stretched over the
    layers. One number: chosen once. `3/1`: gradual filtering (r1 > r2 > ..., §4.3 and Figure 9), every layer drops the
    rows whose own KV deviates least, from 1.5 times the mean down to half of it.
    """

    deviation: Callable[[Evidence], Tensor]
    check_layer: int = 1
    shares: str = "1"

    def __post_init__(self) -> None:
        if self.check_layer < 0:
            raise UsageError(f"check_layer must be at least 0, not {self.check_layer}")
        self._course()

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        # The check would cost more than nothing, and choose none.
        return base.needed_rows(plan) if plan.budget == 0 else base.inexact_rows(plan)

    def passes(self, plan: Plan) -> list[tuple[float, float]]:
        if not base.can_choose(plan):
            return super().passes(plan)
        check, always = self._check_layer(plan), plan.always_tokens
        behind = always + self.remaining_ratio(plan) * plan.stored_tokens
        every = always + plan.candidate_tokens
        return [(every, check + plan.attention_share), (behind, plan.layers - check)]

    def peeks(self, plan: Plan, layer: int) -> bool:
        return layer == self._check_layer(plan) and base.can_choose(plan)

    def narrows(self, plan: Plan, layer: int) -> bool:
        falls = len(set(self._course())) > 1
        return falls and self._check_layer(plan) <= layer < plan.layers - 1 and base.can_choose(plan)

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        count = round(self.ratio_at(plan, next_layer) * plan.stored_tokens)
        return base.pick_top(plan, evidence.rows, self.deviation(evidence), count)

    def ratio_at(self, plan: Plan, layer: int) -> float:
        """Share of the stored tokens to compute in that layer, the check or one behind it."""
        mean, check = self.remaining_ratio(plan), self._check_layer(plan)
        course = _stretched(self._course(), plan.layers - check)
        away = [share * len(course) / sum(course) - 1 for share in course]
        # What is cut off above the reach would be missing from the mean, so all come closer to it.
        if mean * (1 + away[0]) > base.recomputable_share(plan):
            away = [each * (base.recomputable_share(plan) / mean - 1) / away[0] for each in away]
        return mean * (1 + away[layer - check])

    def remaining_ratio(self, plan: Plan) -> float:
        """What the ratio leaves, a layer, for the layers from the check on; a little even where it leaves nothing."""
        check, most = self._check_layer(plan), base.recomputable_share(plan)
        spent = (check + plan.attention_share) * most
        left = (plan.ratio * plan.layers - spent) / (plan.layers - check)
        return min(max(left, min(base.FLOOR_RATIO, plan.ratio)), most)

    def _check_layer(self, plan: Plan) -> int:
        return min(self.check_layer, plan.layers - 1)

    def _course(self) -> list[float]:
        try:
            course = [float(share) for share in self.shares.split("/")]
        except ValueError:
            course = [-1.0]
        falling = all(before >= after for before, after in pairwise(course))
        if not falling or not 0 <= course[-1] <= course[0] < math.inf or course[0] == 0:
            raise UsageError(
                "shares are numbers from 0 with / between, the first above 0 and none larger than the one before "
                f"(3/2/1), not {self.shares!r}"
            )
        return course


def _stretched(course: list[float], layers: int) -> list[float]:
    """That many points of the line through the numbers, from the first to the last; of one layer their mean."""
    places = np.linspace(0, len(course) - 1, layers)
    found: list[float] = np.interp(places, range(len(course)), course).tolist()
    return found if layers > 1 else [sum(course) / len(course)]


def value_deviation(evidence: Evidence) -> Tensor:
    """(R,) float32, as in the released code."""
    return _squared_distance(evidence.new_values, evidence.old_values)


def key_deviation(evidence: Evidence) -> Tensor:
    """(R,) float32, as in LMCache."""
    return _squared_distance(evidence.new_keys, evidence.old_keys)


def _squared_distance(new: Tensor, old: Tensor) -> Tensor:
    delta = new.float() - old.float()  # (H, R, D)
    return delta.pow_(2).sum(dim=(0, 2))
