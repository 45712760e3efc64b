"""Corrections: what a policy adds to stored KV that is not computed again, from what changed where it was."""

from functools import partial

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.rope import turn_
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.evidence import Change, Shift


class Correction:
    """Asks the policy in each layer, and turns what it answers to where each row stands.

    rows (R,): all rows that are being computed, in one go; those of them that were stored are what it learns from.
    done (T,) bool: rows that are to stay as they are.
    """

    def __init__(
        self,
        decoder: Decoder,
        plan: Plan,
        policy: Policy,
        cache: FusedCache,
        rows: Tensor,
        done: Tensor | None = None,
    ) -> None:
        self._decoder, self._plan, self._policy, self._cache = decoder, plan, policy, cache
        self._at = (plan.kinds[rows] == Kind.REUSABLE).nonzero().squeeze(1)
        self._rows = rows[self._at]
        self._keeps = ~plan.candidates if done is None else ~plan.candidates | done
        reusable = plan.candidates.nonzero().squeeze(1)
        self._range = (int(reusable[0]), int(reusable[-1]) + 1) if reusable.numel() else (0, 0)
        self._tables: dict[str, tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache; new_* (H, R, D) are about to be written over it."""
        keys, values = self._cache.span(layer, 0, self._plan.tokens)
        moved = new_keys.index_select(1, self._at).float() - keys.index_select(1, self._rows).float()
        changed = new_values.index_select(1, self._at).float() - values.index_select(1, self._rows).float()
        still = partial(self._turned, layer, sign=-1)
        change = Change(layer, self._rows, still(moved, self._rows), changed, keys, values, still)
        shift = self._policy.correct(self._plan, change)
        if shift is not None:
            self._add(layer, shift, keys, values)

    def _add(self, layer: int, shift: Shift, keys: Tensor, values: Tensor) -> None:
        start, stop = self._range
        groups = shift.groups.masked_fill(self._keeps, -1)[start:stop]  # -1: the last to pick from, the zeros
        # Whole runs are added to, the rows that will be written over included: that is faster than picking rows.
        moved = _with_zeros(shift.keys)[:, groups]
        cos, sin = self._table(layer)
        turn_(moved, cos[start:stop], sin[start:stop], self._decoder.rope(layer))
        keys[:, start:stop] += moved
        values[:, start:stop] += _with_zeros(shift.values)[:, groups]

    def _turned(self, layer: int, keys: Tensor, positions: Tensor, sign: int = 1) -> Tensor:
        cos, sin = self._table(layer)
        turned = keys.float().clone()
        turn_(turned, cos[positions], sign * sin[positions], self._decoder.rope(layer))
        return turned

    def _table(self, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2) float32, of every position in layers of that type."""
        kind = self._decoder.layer_types[layer]
        if kind not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            angles = positions[:, None] * inv_freq
            self._tables[kind] = angles.cos(), angles.sin()
        return self._tables[kind]


def _with_zeros(table: Tensor) -> Tensor:
    return torch.cat([table, torch.zeros_like(table[:, :1])], dim=1)
