"""What happens inside one prefill, for the report: which rows a policy computes, and what the last rows look at.

Both watch from outside, through the engine's extension points (a policy, transformers' attention interface), so any
policy can be watched, also one that was written after this.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection import Evidence, Policy

if TYPE_CHECKING:
    from torch import nn

WATCHED_ROWS = 16  # the last rows of the question: enough to compare, and small beside the KV


@dataclass
class Watched:
    """Filled in while a watched policy runs. steps: from which layer on which rows (ascending) were computed."""

    plan: Plan | None = None
    steps: list[tuple[int, Tensor]] = field(default_factory=list)
    probed: list[Tensor] = field(default_factory=list)

    def shares(self) -> Tensor:
        """(T,) float32: in which share of the layers each token was computed."""
        return self.computed().float().mean(0)

    def computed(self) -> Tensor:
        """(L, T) bool: which rows each layer computed; stored rows of a probe are in all."""
        assert self.plan is not None, "the policy has not run"
        computed = torch.zeros(self.plan.layers, self.plan.tokens, dtype=torch.bool)
        ends = [layer for layer, _ in self.steps[1:]] + [self.plan.layers]
        for (begin, rows), end in zip(self.steps, ends, strict=True):
            computed[begin:end, rows] = True
        for rows in self.probed:
            computed[:, rows[~self.plan.always[rows].cpu()]] = True
        return computed


def watched(policy: Policy) -> tuple[Policy, Watched]:
    """The same policy, and what it will do when it runs: an instance of a subclass, so nothing else changes."""
    seen = Watched()

    def rows(self: Policy, plan: Plan, *more: Any) -> Tensor:
        found: Tensor = type(policy).rows(self, plan, *more)
        seen.plan, seen.steps = plan, [(0, found.cpu())]  # a request that lost a chunk begins again
        return found

    def narrow(self: Policy, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        kept = type(policy).narrow(self, plan, evidence, next_layer)
        seen.steps.append((next_layer, kept.cpu()))
        return kept

    overrides: dict[str, Any] = {"rows": rows, "narrow": narrow}
    if hasattr(policy, "probe_rows"):  # not every engine has policies that probe

        def probe_rows(self: Any, plan: Plan, *more: Any) -> Tensor | None:
            found: Tensor | None = type(policy).probe_rows(self, plan, *more)
            if found is not None:
                seen.probed.append(found.cpu())
            return found

        overrides["probe_rows"] = probe_rows
    return overridden(policy, overrides), seen


def overridden(policy: Policy, overrides: dict[str, Any]) -> Policy:
    """The same policy with other methods by these names."""
    made: Policy = object.__new__(type(f"Watched{type(policy).__name__}", (type(policy),), overrides))
    made.__dict__.update(policy.__dict__)  # frozen, so not by assignment
    return made


@dataclass(frozen=True)
class Everything(Policy):
    """Computes every row over the stored KV, and notes how far each token's KV is from what was stored."""

    name: str = field(default="everything", kw_only=True)
    fixed_ratio: float | None = field(default=1.0, kw_only=True)
    deviations: dict[int, Tensor] = field(default_factory=dict, compare=False)
    plans: list[Plan] = field(default_factory=list, compare=False)

    def rows(self, plan: Plan, *more: Any) -> Tensor:
        self.plans[:] = [plan]
        return torch.arange(plan.tokens, device=plan.token_ids.device)

    def narrows(self, plan: Plan, layer: int) -> bool:
        return True

    def narrow(self, plan: Plan, evidence: Evidence, next_layer: int) -> Tensor:
        """Keeps all. deviations[layer]: (C,) float32, L1 over heads and sizes of K and V, of the candidates."""
        pairs = ((evidence.new_keys, evidence.old_keys), (evidence.new_values, evidence.old_values))
        chosen = plan.candidates.nonzero().squeeze(1)
        apart = [
            (new[:, chosen].float() - old[:, chosen].float()).abs().sum(dim=(0, 2)) for new, old in pairs
        ]
        self.deviations[evidence.layer] = (apart[0] + apart[1]).cpu()
        return evidence.rows


@contextmanager
def last_rows_attention(rows: int = WATCHED_ROWS) -> Iterator[dict[int, Tensor]]:
    """Inside the block, what the last rows of the latest prefill look at: by layer (N, rows, T) float16.

    Empty where the model's attention does not go through transformers' interface by name (soft caps, sinks).
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from ragblend.engine.attention import NAME

    seen: dict[int, Tensor] = {}
    before = {
        name: ALL_ATTENTION_FUNCTIONS[name] for name in (NAME, "sdpa") if name in ALL_ATTENTION_FUNCTIONS
    }
    try:
        for name, attention in before.items():
            AttentionInterface.register(name, _noting(attention, seen, rows))
        yield seen
    finally:
        for name, attention in before.items():
            AttentionInterface.register(name, attention)


def _noting(attention: Any, seen: dict[int, Tensor], rows: int) -> Any:
    def noting(
        module: "nn.Module", query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is not None:
            window = kwargs.get("sliding_window") or getattr(module, "sliding_window", None)
            seen[layer] = _weights(query[0, :, -rows:], key[0], kwargs.get("scaling"), window)
        return attention(module, query, key, value, *args, **kwargs)

    return noting


def _weights(query: Tensor, key: Tensor, scaling: float | None, window: int | None) -> Tensor:
    """query (N, R, D) of the last rows, key (H, T, D) -> (N, R, T) float16 on the CPU."""
    heads, rows, size = query.shape
    tokens = key.shape[1]
    grouped = query.float().view(key.shape[0], -1, rows, size)  # (H, G, R, D)
    scores = grouped @ key.float()[:, None].transpose(-1, -2) * (size**-0.5 if scaling is None else scaling)
    at = torch.arange(tokens - rows, tokens, device=query.device)[:, None]
    keys = torch.arange(tokens, device=query.device)[None, :]
    hidden = keys > at
    if window is not None:
        hidden |= keys <= at - window
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).view(heads, rows, tokens).half().cpu()


def attention_deviation(weights: dict[int, Tensor], reference: dict[int, Tensor]) -> float | None:
    """Mean over layers, heads and rows of the L2 distance between what a row looks at and what it should.

    Between 0 and the square root of 2. CacheBlend §4.1: the forward attention matrix, for the last rows. None where one
    of them has no rows.
    """
    if not weights or weights.keys() != reference.keys():
        return None
    each = []
    for layer, found in weights.items():
        rows = min(found.shape[1], reference[layer].shape[1])
        apart = found[:, -rows:].float() - reference[layer][:, -rows:].float()
        each.append(float(apart.norm(dim=-1).mean()))
    return sum(each) / len(each)
