"""What a policy is: it names the rows to compute; the mechanism never asks which policy it has."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragblend.engine.plan import Kind, Plan, Span
from ragblend.engine.selection.shift import Delta, KernelShift, LayerChange
from ragblend.kvstore.errors import UsageError

# Rows that are left after a selection that has spent the ratio by itself.
FLOOR_RATIO = 0.01
# Of the rows behind the last chunk at most so many, the last ones, have their attention collected: it is (N, W, T).
COLLECTED_ROWS = 128


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


@dataclass(frozen=True)
class Attention:
    """What the rows behind the last chunk attend to in one layer, during a probe.

    queries (N, W, D), rotated; keys (H, K, D), those from position first_key on, N a multiple of H; scaling: what
    products are multiplied by; mask (W, K) additive; weights (N, W, K): each row's shares, which sum to 1 (less where
    the model has sinks), 0 where the row may not attend.
    """

    layer: int
    first_key: int
    queries: Tensor
    keys: Tensor
    scaling: float
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True)
class ProbeResult:
    """What the probe of a request has shown.

    scores: by layer, (T,) float32, what the policy's `layer_scores` said (0 for keys out of sight); cost_rows: rows of
    the probe that are computed again after it, averaged over layers.
    """

    scores: Mapping[int, Tensor]
    cost_rows: float


@dataclass(frozen=True)
class Policy:
    """Base of all policies: computes what must be computed, and nothing more.

    moves_keys: rotate stored keys to their new positions; needs_attention: it collects attention, which not every model
    shows; fixed_ratio: the share that it recomputes whatever ratio is asked for, None where it does as asked; shift:
    what predicts the change of rows that are not computed; uses_tree: it begins with the longest path that the knowledge
    tree has of the prompt (`kvstore/tree.py`); exact: it uses no other stored KV and computes in pieces, so that what
    it computes may be entered there; sure: the probability below which a figure of the answer is read again in full
    (`uncertainty.py`), 0 for none.
    """

    name: str = field(default="", kw_only=True)
    moves_keys: bool = field(default=True, kw_only=True)
    needs_attention: bool = field(default=False, kw_only=True)
    fixed_ratio: float | None = field(default=None, kw_only=True)
    shift: KernelShift | None = field(default=None, kw_only=True)
    uses_tree: bool = field(default=False, kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    sure: float = field(default=0.0, kw_only=True)
    measures_time_only: ClassVar[bool] = (
        False  # how long rows take is asked, not what comes out: it may leave out any
    )

    def check_ratio(self, ratio: float | str) -> float:
        """The ratio. Raises UsageError if it makes no sense."""
        if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise UsageError(
                "the ratio must be between 0 and 1 (the share of stored tokens to compute again), or `auto`, not "
                f"{ratio!r}"
            )
        return ratio

    @property
    def parameters(self) -> dict[str, int | float | str]:
        """What `policy_named` may be told after a colon, with the values that stand: its fields', and its parts'."""
        own = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in NOT_PARAMETERS
        }
        parts = [part for part in own.values() if is_dataclass(part)]
        own |= {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
        return {name: value for name, value in own.items() if isinstance(value, int | float | str)}

    def probe_rows(self, plan: Plan) -> Tensor | None:
        """(R,) ascending fresh positions to run through the stored KV before anything is chosen; None: choose now.

        Fresh rows that are left out are not there for the others.
        """
        return None

    def attention_layers(self, plan: Plan) -> range:
        """The layers of a probe whose attention `layer_scores` is to see. After the last of them the probe ends."""
        return range(0)

    def digest(self, plan: Plan) -> Tensor | None:
        """(S,) ascending positions that a probe's rows attend to in place of all, while they go from layer to layer;
        attention is collected of all keys. None: all. What is no candidate must be among them.
        """
        return None

    def layer_scores(self, plan: Plan, attention: Attention) -> Tensor:
        """(K,) float32: what one layer's attention says for each of its keys. The attention itself is not kept."""
        raise AssertionError(f"{self.name} collects no attention")

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        """(R,) ascending positions to compute from layer 0. probed: what the probe has shown, if there was one."""
        return needed_rows(plan)

    def passes(self, plan: Plan) -> list[tuple[float, float]]:
        """What it will cost: rows, and the layers they are taken through, for each time that it computes some."""
        return [(self.rows(plan).numel(), plan.layers)]

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
        """Whether `deltas` are to be asked for in every layer."""
        return self.shift is not None and can_choose(plan)

    def deltas(self, plan: Plan, change: LayerChange) -> Iterable[Delta]:
        """What to add to the stored KV of one layer, from what changed on the rows that are computed there."""
        return self.shift.deltas(change) if self.shift is not None else ()


NOT_PARAMETERS = frozenset(each.name for each in fields(Policy)) - {"sure"}


def every_row(plan: Plan) -> Tensor:
    """(T,) all positions."""
    return torch.arange(plan.tokens, device=plan.token_ids.device)


def needed_rows(plan: Plan) -> Tensor:
    """(R,) positions of what has no stored KV."""
    return plan.always.nonzero().squeeze(1)


def inexact_rows(plan: Plan) -> Tensor:
    """(R,) positions of all but what is stored behind these very tokens."""
    return (plan.always | plan.candidates).nonzero().squeeze(1)


def fresh_rows(plan: Plan) -> Tensor:
    """(R,) positions of the literals."""
    return (plan.kinds == Kind.FRESH).nonzero().squeeze(1)


def recomputable_share(plan: Plan) -> float:
    """Share of the stored tokens that can be recomputed at all (the first chunk may be exact)."""
    return plan.candidate_tokens / plan.stored_tokens if plan.stored_tokens else 0.0


def can_choose(plan: Plan) -> bool:
    """Whether there is anything to choose: the budget pays for some of the candidates, and not for all."""
    return 0 < plan.budget < plan.candidate_tokens


def budget_rows(plan: Plan, probed: ProbeResult | None = None) -> int:
    """Stored rows that the budget pays for, after what the probe has cost."""
    spent = probed.cost_rows if probed is not None else 0.0
    return max(round(plan.budget - spent), min(round(FLOOR_RATIO * plan.stored_tokens), plan.budget))


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
