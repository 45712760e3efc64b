"""What a policy is: it names the rows to compute; the mechanism never asks which policy it has."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from ragblend.engine.controller import FLOOR_RATIO
from ragblend.engine.plan import Plan, Span
from ragblend.engine.selection.evidence import Attention, Change, Evidence, Probed, Shift
from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Policy:
    """Base of all policies: computes what must be computed, and nothing more.

    moves_keys: rotate stored keys to their new positions; looks: it must see attention, which not every model shows;
    fixed_ratio: the share that it recomputes whatever ratio is asked for, None where it does as asked.
    """

    name: str = field(default="", kw_only=True)
    moves_keys: bool = field(default=True, kw_only=True)
    looks: bool = field(default=False, kw_only=True)
    fixed_ratio: float | None = field(default=None, kw_only=True)

    def checked(self, ratio: float | str) -> float:
        """The ratio. Raises UsageError if it makes no sense."""
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise UsageError(
                "the ratio must be between 0 and 1 (the share of stored tokens to compute again), or `auto`, not "
                f"{ratio!r}"
            )
        return ratio

    @property
    def parameters(self) -> dict[str, object]:
        """What `policy_named` may be told after a colon, with the values that stand."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in FIXED}

    def probe_rows(self, plan: Plan, probed: Probed | None) -> Tensor | None:
        """(R,) ascending positions to run through the assembled cache before anything is chosen; None: choose now.

        probed: None at first, then what the probes before have shown. Fresh rows that are left out are not there for
        the others. Stored rows among them are computed for good.
        """
        return None

    def watches(self, plan: Plan, layer: int) -> bool:
        """Whether `look` is to see the attention of a probe in this layer. After the last such layer a probe ends."""
        return False

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        """(K,) float32: what this layer says for each key that it looked at. Sums up what must not be kept whole."""
        raise AssertionError(f"{self.name} watches no layer")

    def rows(self, plan: Plan, probed: Probed | None = None) -> Tensor:
        """(R,) ascending positions to compute from layer 0. probed: what the probes have shown, if there were any."""
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

    def corrects(self, plan: Plan) -> bool:
        """Whether `correct` is to be asked in every layer."""
        return False

    def correct(self, plan: Plan, change: Change) -> Shift | None:
        """What to add to the stored KV of one layer, from what changed on the rows that are computed there."""
        raise AssertionError(f"{self.name} corrects nothing")


FIXED = frozenset(each.name for each in fields(Policy))


def one_of(method: str, parameter: str, value: str, choices: Sequence[str]) -> None:
    """Raises UsageError if the parameter's value is none of the choices."""
    if value not in choices:
        raise UsageError(f"method {method!r}: {parameter} must be one of {', '.join(choices)}, not {value!r}")


def reach(plan: Plan) -> float:
    """Share of the stored tokens that can be recomputed at all (the first chunk may be exact)."""
    return plan.candidate_tokens / plan.stored_tokens if plan.stored_tokens else 0.0


def chooses(plan: Plan) -> bool:
    """Whether there is anything to choose: the ratio pays for some of the candidates, and not for all."""
    return 0 < plan.ratio < reach(plan)


def budget_rows(plan: Plan, probed: Probed | None = None) -> int:
    """Stored rows that the ratio pays for, after what the probes have cost."""
    spent = probed.cost_rows if probed is not None else 0.0
    least = min(FLOOR_RATIO, plan.ratio) * plan.stored_tokens
    return round(max(plan.ratio * plan.stored_tokens - spent, least))


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


def spread_evenly(rows: Tensor, count: int) -> Tensor:
    """`count` of the ascending rows (R,), evenly; all of them where there are no more."""
    if count >= rows.numel():
        return rows
    each = rows.numel() / max(count, 1)
    return rows[((torch.arange(count, device=rows.device, dtype=torch.float64) + 0.5) * each).long()]


def chunk_runs(plan: Plan, change: Change) -> list[tuple[int, int, int]]:
    """The number of each chunk that is in the run of a change, and where its rows begin and end there."""
    edges = (
        (max(span.start, change.start) - change.start, min(span.stop, change.stop) - change.start)
        for span in plan.spans
    )
    return [(number, start, stop) for number, (start, stop) in enumerate(edges) if start < stop]
