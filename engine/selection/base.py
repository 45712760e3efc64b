"""What a policy is: it names the rows to compute; the mechanism never asks which policy it has."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, Span
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Evidence:
    """KV of the rows being computed, beside what was stored for them, in one layer.

    rows (R,) positions; new_* and old_* (H, R, D). old_* hold nothing meaningful for rows without stored KV.
    """

    layer: int
    rows: Tensor
    new_keys: Tensor
    new_values: Tensor
    old_keys: Tensor
    old_values: Tensor


def joined(parts: list[Evidence]) -> Evidence:
    """One layer's evidence, gathered in several goes."""
    if len(parts) == 1:
        return parts[0]
    heads = ("new_keys", "new_values", "old_keys", "old_values")
    kv = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in heads}
    return Evidence(layer=parts[0].layer, rows=torch.cat([part.rows for part in parts]), **kv)


@dataclass(frozen=True)
class Policy:
    """Base of all policies: computes what must be computed, and nothing more.

    moves_keys: rotate stored keys to their new positions; fixed_ratio: the share that it recomputes whatever ratio is
    asked for, None where it does as asked.
    """

    name: str = field(default="", kw_only=True)
    moves_keys: bool = field(default=True, kw_only=True)
    fixed_ratio: float | None = field(default=None, kw_only=True)

    def checked(self, ratio: float | str) -> float:
        """The ratio. Raises UsageError if it makes no sense."""
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise UsageError(
                "the ratio must be between 0 and 1 (the share of stored tokens to compute again), or `auto`, not "
                f"{ratio!r}"
            )
        return ratio

    def rows(self, plan: Plan) -> Tensor:
        """(R,) ascending positions to compute from layer 0."""
        return plan.always.nonzero().squeeze(1)

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        """The chunks whose stored KV is used."""
        return tuple(span for span in plan.spans if span.reader is not None)

    def peeks(self, plan: Plan, layer: int) -> bool:
        """Whether `narrow` is to choose from this layer's new KV before the layer's attention is computed."""
        return False

    def narrows(self, plan: Plan, layer: int) -> bool:
        """Whether `narrow` is to choose from this layer's new KV after the layer was computed."""
        return False

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        """(R',) ascending positions, a subset of evidence.rows, to compute in `next_layer` (this one or the next)."""
        raise AssertionError(f"{self.name} neither peeks nor narrows")


def pick_top(plan: Plan, rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """The rows that must be computed, and the `count` candidates with the highest scores.

    rows (R,) ascending; scores (R,) float; returns ascending positions.
    """
    candidates = plan.candidates[rows]
    count = min(count, plan.candidate_tokens)
    chosen = torch.zeros_like(candidates)
    if count > 0:
        ranked = scores.masked_fill(~candidates, -torch.inf)
        chosen[ranked.topk(min(count, rows.numel())).indices] = True
    return rows[(chosen & candidates) | plan.always[rows]]
