"""CacheBlend: recompute the tokens whose KV deviates most from what was stored (EuroSys'25, §4.3).

Deviation is the squared L2 distance between a token's new and stored KV, over heads and sizes. Layer 0 depends on the
token alone, so the first layer that can deviate is 1: layers before it are computed for every row, and of the check
layer only keys and values, before its attention (the fork and LMCache compute that layer whole as well).

The ratio is what is spent in all, averaged over layers: the layers before the check count as 1, the check itself as the
attention's share of a layer, and the rest gets what is left. `ratio` = 15% on 30 layers leaves about 11% of the rows.
"""

import math
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor

from ragblend.engine.controller import FLOOR_RATIO
from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import Policy, chooses, one_of, pick_top, reach
from ragblend.engine.selection.evidence import Evidence, Probed
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class CacheBlend(Policy):
    """High-KV-deviation tokens chosen once, at the check layer.

    measure: `values` (the released code) or `keys` (LMCache). check_layer: the layer whose deviation decides.
    floor_ratio: rows kept after the check even where the check alone has spent the ratio.
    """

    measure: str = "values"
    check_layer: int = 1
    floor_ratio: float = FLOOR_RATIO
    name: str = field(default="cacheblend", kw_only=True)

    def __post_init__(self) -> None:
        one_of(self.name, "measure", self.measure, ("values", "keys"))
        if self.check_layer < 0 or not 0 <= self.floor_ratio <= 1:
            raise UsageError(f"method {self.name!r}: check_layer at least 0, floor_ratio from 0 to 1")

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        if plan.ratio == 0:  # the check would cost more than nothing, and choose none
            return super().rows(plan)
        return (plan.always | plan.candidates).nonzero().squeeze(1)

    def peeks(self, plan: Plan, layer: int) -> bool:
        return layer == self._check_layer(plan) and chooses(plan)

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        count = round(self.ratio_at(plan, next_layer) * plan.stored_tokens)
        return pick_top(plan, evidence.rows, deviation(evidence, self.measure), count)

    def ratio_at(self, plan: Plan, layer: int) -> float:
        """Share of the stored tokens to compute in that layer."""
        return self.remaining_ratio(plan)

    def remaining_ratio(self, plan: Plan) -> float:
        """What the ratio leaves, a layer, for the layers from the check on."""
        check, most = self._check_layer(plan), reach(plan)
        spent = (check + plan.attention_share) * most
        left = (plan.ratio * plan.layers - spent) / (plan.layers - check)
        return min(max(left, min(self.floor_ratio, plan.ratio)), most)

    def _check_layer(self, plan: Plan) -> int:
        return min(self.check_layer, plan.layers - 1)


@dataclass(frozen=True)
class GradualCacheBlend(CacheBlend):
    """Gradual filtering: r1 > r2 > ... (§4.3, Figure 9).

    The check keeps a little more than the mean share, and every layer after it drops the rows whose own KV deviates
    least, linearly down to a little less than the mean. spread: how much more and less, as a share of the mean.
    shares: a course of one's own from the check to the last layer, in place of that line: numbers that do not grow, in
    any unit (`3/2/1/1`), stretched over the layers; their mean is what the ratio leaves a layer.
    """

    spread: float = 0.5
    shares: str = ""
    name: str = field(default="cacheblend-gradual", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.spread <= 1:
            raise UsageError(f"method {self.name!r}: spread from 0 to 1")
        self._course()

    def narrows(self, plan: Plan, layer: int) -> bool:
        return self._check_layer(plan) <= layer < plan.layers - 1 and chooses(plan)

    def ratio_at(self, plan: Plan, layer: int) -> float:
        mean, check = self.remaining_ratio(plan), self._check_layer(plan)
        course = _stretched(self._course(), plan.layers - check)
        away = [share * len(course) / sum(course) - 1 for share in course]
        # What is cut off above the reach would be missing from the mean, so all come closer to it.
        if mean * (1 + away[0]) > reach(plan):
            away = [each * (reach(plan) / mean - 1) / away[0] for each in away]
        return mean * (1 + away[layer - check])

    def _course(self) -> list[float]:
        if not self.shares:
            return [1 + self.spread, 1 - self.spread]
        try:
            course = [float(share) for share in self.shares.split("/")]
        except ValueError:
            course = [-1.0]
        falling = all(before >= after for before, after in pairwise(course))
        if not falling or not 0 <= course[-1] <= course[0] < math.inf or course[0] == 0:
            raise UsageError(
                f"method {self.name!r}: shares are numbers from 0 with / between, the first above 0 and none larger "
                f"than the one before (3/2/1), not {self.shares!r}"
            )
        return course


def _stretched(course: list[float], layers: int) -> list[float]:
    """That many points of the line through the numbers, from the first to the last; of one layer their mean."""
    if layers == 1 or len(course) == 1:
        return [sum(course) / len(course)] * layers
    places = [layer * (len(course) - 1) / (layers - 1) for layer in range(layers)]
    ends = [min(int(place), len(course) - 2) for place in places]
    return [
        course[end] + (place - end) * (course[end + 1] - course[end])
        for place, end in zip(places, ends, strict=True)
    ]


def deviation(evidence: Evidence, measure: str) -> Tensor:
    """(R,) float32 squared distance of new from stored values or keys, summed over heads and sizes."""
    new, old = {
        "values": (evidence.new_values, evidence.old_values),
        "keys": (evidence.new_keys, evidence.old_keys),
    }[measure]
    delta = new.float() - old.float()  # (H, R, D)
    return delta.pow_(2).sum(dim=(0, 2))
