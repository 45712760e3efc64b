"""What a profile has chosen: policies that compute, shift or watch a given number of rows, whatever the KV says."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.asking import fresh_rows
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Attention, Change, Probed, Shift
from ragblend.engine.selection.probe import Probe
from ragblend.engine.selection.shift import shift_of


@dataclass(frozen=True)
class Spread(Policy):
    """Computes so many rows, evenly spread, the last one among them: as rows are that a policy has chosen."""

    count: int = 0
    name: str = field(default="profile", kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        places = torch.linspace(0, plan.tokens - 1, self.count, dtype=torch.float64)
        places[-1] = plan.tokens - 1
        return places.round().long().to(plan.token_ids.device)


@dataclass(frozen=True)
class Shifting(Spread):
    """The same rows, and the others shifted."""

    def corrects(self, plan: Plan) -> bool:
        return True

    def correct(self, plan: Plan, change: Change) -> Shift | None:
        return shift_of("kernel", 1.0, plan, change)


@dataclass(frozen=True)
class Watching(Spread):
    """A probe with the fresh rows before that, through all layers, watched in all of them or in the last one alone."""

    everywhere: bool = False

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        return fresh_rows(plan) if probed is None else None

    def watches(self, plan: Plan, layer: int) -> bool:
        return self.everywhere or layer == plan.layers - 1

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        return Probe().look(plan, attention)
