"""`Policy`, the interface that decides which rows are recomputed, and functions that policies share.

`fusion.py` calls only this interface.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, Span, TokenKind
from ragblend.engine.selection.shift import Delta, KernelShift, LayerChange
from ragblend.kvstore.errors import UsageError

# The least ratio that remains if selection has used up the whole ratio.
FLOOR_RATIO = 0.01
# Attention is collected for at most this many rows W, the last ones after the last chunk: its weights are (N, W, T).
COLLECTED_ROWS = 128


@dataclass(frozen=True)
class Evidence:
    """New and stored KV of the rows being computed, in one layer.

    rows (R,) positions; new_* and old_* (H, R, D). old_* are undefined for rows without stored KV.
    """

    layer: int
    rows: Tensor
    new_keys: Tensor
    new_values: Tensor
    old_keys: Tensor
    old_values: Tensor


@dataclass(frozen=True)
class Attention:
    """The attention of the rows after the last chunk in one layer, during a probe.

    queries (N, W, D), rotated; keys (H, K, D), from position first_key on, N a multiple of H; scaling: of the scores;
    mask (W, K) additive; weights (N, W, K): sum to 1 over K (less if the model has sinks), 0 for masked keys.
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
    """Result of a request's probe.

    scores: by layer, (T,) float32, the policy's `layer_scores` (0 for keys out of the window); cost_rows: rows of the
    probe that are computed again after it, averaged over layers.
    """

    scores: Mapping[int, Tensor]
    cost_rows: float


@dataclass(frozen=True)
class Policy:
    """Base of all policies: computes only the rows that have no stored KV.

    moves_keys: rotate stored keys to their new positions; needs_attention: whether it collects attention, which not
    every model supports; fixed_ratio: the share that it recomputes for any requested ratio, None if it follows the
    request; shift: predicts the change of rows that are not recomputed; uses_tree: start from the longest path of the
    prompt in the knowledge tree (`kvstore/tree.py`); exact: use no other stored KV and compute in pieces, so that the
    result may enter the tree; sure: the probability of a figure in the answer below which the answer continues from a
    full prefill (`uncertainty.py`), 0 for never.
    """

    name: str = field(default="", kw_only=True)
    moves_keys: bool = field(default=True, kw_only=True)
    needs_attention: bool = field(default=False, kw_only=True)
    fixed_ratio: float | None = field(default=None, kw_only=True)
    shift: KernelShift | None = field(default=None, kw_only=True)
    uses_tree: bool = field(default=False, kw_only=True)
    exact: bool = field(default=False, kw_only=True)
    sure: float = field(default=0.0, kw_only=True)
    measures_time_only: ClassVar[bool] = False  # the result does not matter, so it may leave out needed rows

    def check_ratio(self, ratio: float | str) -> float:
        """Return the ratio. Raises UsageError unless it is a number from 0 to 1."""
        if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
            raise UsageError(
                "the ratio must be between 0 and 1 (the share of stored tokens to recompute), or `auto`, not "
                f"{ratio!r:.80}"
            )
        return ratio

    @property
    def parameters(self) -> dict[str, int | float | str]:
        """The parameters that a method name may set, with their values: the policy's own fields, and its parts'."""
        own = {
            each.name: getattr(self, each.name) for each in fields(self) if each.name not in NOT_PARAMETERS
        }
        parts = [part for part in own.values() if is_dataclass(part)]
        own |= {each.name: getattr(part, each.name) for part in parts for each in fields(part)}
        return {name: value for name, value in own.items() if isinstance(value, int | float | str)}

    def probe_rows(self, plan: Plan) -> Tensor | None:
        """(R,) ascending fresh positions to run over the stored KV before `rows`; None: no probe.

        Fresh rows that are left out are invisible to the others.
        """
        return None

    def attention_layers(self, plan: Plan) -> range:
        """The layers whose attention the probe passes to `layer_scores`. The probe ends after the last of them."""
        return range(0)

    def probe_keys(self, plan: Plan) -> Tensor | None:
        """(S,) ascending positions of the keys that the probe's rows attend to, all rows that are no candidates among
        them; None: all keys. The attention that is collected always covers all keys.
        """
        return None

    def layer_scores(self, plan: Plan, attention: Attention) -> Tensor:
        """(K,) float32: a score for each key from one layer's attention, which is discarded afterwards."""
        raise AssertionError(f"{self.name} collects no attention")

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        """(R,) ascending positions to compute from layer 0. probed: the probe's result, if there was one."""
        return needed_rows(plan)

    def passes(self, plan: Plan) -> list[tuple[float, float]]:
        """The cost: for each pass, the number of rows and of layers."""
        return [(self.rows(plan).numel(), plan.layers)]

    def spans(self, plan: Plan) -> tuple[Span, ...]:
        """The chunks whose stored KV is used."""
        return tuple(span for span in plan.spans if span.stored is not None)

    def peeks(self, plan: Plan, layer: int) -> bool:
        """Whether to call `narrow` with this layer's new KV before its attention is computed."""
        return False

    def narrows(self, plan: Plan, layer: int) -> bool:
        """Whether to call `narrow` with this layer's new KV after the layer is computed."""
        return False

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        """(R',) ascending positions, a subset of evidence.rows, to compute in `next_layer` (this one or the next)."""
        raise AssertionError(f"{self.name} neither peeks nor narrows")

    def corrects(self, plan: Plan) -> bool:
        """Whether to call `deltas` in every layer."""
        return self.shift is not None and can_choose(plan)

    def deltas(self, plan: Plan, change: LayerChange) -> Iterable[Delta]:
        """What to add to one layer's stored KV, predicted from the change of the recomputed rows."""
        return self.shift.deltas(change) if self.shift is not None else ()


NOT_PARAMETERS = frozenset(each.name for each in fields(Policy)) - {"sure"}


def every_row(plan: Plan) -> Tensor:
    """(T,) all positions."""
    return torch.arange(plan.tokens, device=plan.token_ids.device)


def needed_rows(plan: Plan) -> Tensor:
    """(R,) positions without stored KV."""
    return plan.always.nonzero().squeeze(1)


def inexact_rows(plan: Plan) -> Tensor:
    """(R,) all positions whose stored KV is missing or was encoded after other tokens."""
    return (plan.always | plan.candidates).nonzero().squeeze(1)


def fresh_rows(plan: Plan) -> Tensor:
    """(R,) positions of the literals, and of the not-loaded chunks before the first missing or reusable one: what a
    probe computes of these chunks is final, and stored KV is loaded meanwhile.
    """
    rows = plan.kinds == TokenKind.FRESH
    rows[: plan.settled_tokens] |= plan.always[: plan.settled_tokens]
    return rows.nonzero().squeeze(1)


def recomputable_share(plan: Plan) -> float:
    """Share of the stored tokens that may be recomputed (the first chunk may be exact)."""
    return plan.candidate_tokens / plan.stored_tokens if plan.stored_tokens else 0.0


def can_choose(plan: Plan) -> bool:
    """Whether the budget covers some of the candidates, but not all."""
    return 0 < plan.budget < plan.candidate_tokens


def budget_rows(plan: Plan, probed: ProbeResult | None = None) -> int:
    """Stored rows that the budget covers after the probe's cost."""
    spent = probed.cost_rows if probed is not None else 0.0
    return max(round(plan.budget - spent), min(round(FLOOR_RATIO * plan.stored_tokens), plan.budget))


def pick_top(plan: Plan, rows: Tensor, scores: Tensor, count: int) -> Tensor:
    """The rows without stored KV, and the `count` candidates with the highest scores.

    rows (R,) ascending; scores (R,) float; returns ascending positions.
    """
    candidates = plan.candidates[rows]
    count = min(count, plan.candidate_tokens)
    chosen = torch.zeros_like(candidates)
    if count > 0:
        ranked = scores.masked_fill(~candidates, -torch.inf)
        chosen[ranked.topk(min(count, rows.numel())).indices] = True
    return rows[(chosen & candidates) | plan.always[rows]]
