"""Policies that look at nothing: the ends of the scale, and the controls that a selection must beat."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, Span
from ragblend.engine.selection.base import Policy, budget_rows, pick_top
from ragblend.engine.selection.evidence import Probed


@dataclass(frozen=True)
class Full(Policy):
    """Full prefill: every row is computed. The reference."""

    name: str = field(default="full", kw_only=True)
    fixed_ratio: float | None = field(default=1.0, kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        return torch.arange(plan.tokens, device=plan.token_ids.device)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        return ()


@dataclass(frozen=True)
class Prefix(Policy):
    """Prefix reuse alone: only a chunk that stands right behind its encoding prefix is taken from the store."""

    name: str = field(default="prefix", kw_only=True)
    fixed_ratio: float | None = field(default=1.0, kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        return (plan.always | plan.candidates).nonzero().squeeze(1)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        return tuple(span for span in plan.spans if span.exact)


@dataclass(frozen=True)
class Recompute(Policy):
    """Load everything, then compute every row over it: what `full` is through the fused path. An oracle for tests."""

    name: str = field(default="recompute", kw_only=True)
    fixed_ratio: float | None = field(default=1.0, kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        return torch.arange(plan.tokens, device=plan.token_ids.device)


@dataclass(frozen=True)
class Reuse(Policy):
    """Full KV reuse: stored keys are moved, nothing is recomputed (PromptCache, MLSys'24, with positions mended)."""

    name: str = field(default="reuse", kw_only=True)
    fixed_ratio: float | None = field(default=0.0, kw_only=True)


@dataclass(frozen=True)
class Naive(Policy):
    """Full KV reuse as it lies: keys stay rotated to where they were encoded. Shows what moving is worth."""

    name: str = field(default="naive", kw_only=True)
    fixed_ratio: float | None = field(default=0.0, kw_only=True)
    moves_keys: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Random(Policy):
    """Control: as many rows as the ratio allows, drawn with the plan's seed, in all layers."""

    name: str = field(default="random", kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(plan.seed)
        scores = torch.rand(plan.tokens, generator=generator).to(plan.token_ids.device)
        everything = torch.arange(plan.tokens, device=plan.token_ids.device)
        return pick_top(plan, everything, scores, budget_rows(plan))


@dataclass(frozen=True)
class Heads(Policy):
    """Control: the first tokens of each chunk, evenly many, in all layers (EPIC's LegoLink, ICML'25 §4)."""

    name: str = field(default="heads", kw_only=True)

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        everything = torch.arange(plan.tokens, device=plan.token_ids.device)
        return pick_top(plan, everything, nearness_to_beginning(plan), budget_rows(plan))


def nearness_to_beginning(plan: Plan) -> Tensor:
    """(T,) float32: minus the place of each row in its chunk; 0 in no chunk."""
    scores = torch.zeros(plan.tokens)
    for span in plan.spans:
        scores[span.start : span.stop] = -torch.arange(span.length, dtype=torch.float32)
    return scores.to(plan.token_ids.device)
