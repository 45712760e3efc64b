"""Corrections: what a policy adds to stored KV that is not computed again, from what changed where it was."""

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.rope import rotated
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.shift import Change, Run


class Correction:
    """Asks the policy in each layer, and rotates what it answers to where each row stands.

    rows (R,): all rows that are being computed, in one block; those of them that were stored have changed.
    """

    def __init__(self, decoder: Decoder, plan: Plan, policy: Policy, cache: FusedCache, rows: Tensor) -> None:
        self._decoder, self._plan, self._policy, self._cache = decoder, plan, policy, cache
        self._at = (plan.kinds[rows] == Kind.REUSABLE).nonzero().squeeze(1)
        where = plan.candidates.nonzero().squeeze(1)
        start, stop = (int(where[0]), int(where[-1]) + 1) if where.numel() else (0, 0)
        self._rows, self._run = slice(start, stop), Run.of(plan, start, stop, rows[self._at])
        # In the run, and computed in any case. They hold what was in memory before; a product of the whole run takes
        # NaN over into a neighbour: oneDNN reads an odd row of bfloat16 together with the first number behind it.
        self._unwritten = plan.always[start:stop].nonzero().squeeze(1) + start
        # (n, 1) bool: rows of the run that may be changed; None if the others are all written over anyway.
        gets = (plan.candidates | plan.always)[start:stop, None]
        self._gets = None if bool(gets.all()) else gets
        self._tables: dict[tuple[str, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache; new_* (H, R, D) are about to be written over it."""
        rows, computed = self._rows, self._run.computed
        if rows.start == rows.stop:
            return
        if self._unwritten.numel():
            self._cache.blank(layer, self._unwritten)
        keys, values = self._cache.span(layer, 0, self._plan.tokens)
        keys_apart = new_keys.index_select(1, self._at).float() - keys.index_select(1, computed).float()
        values_apart = new_values.index_select(1, self._at).float() - values.index_select(1, computed).float()

        def unrotated(of: Tensor, positions: Tensor | slice) -> Tensor:
            return self._rotated(layer, of, positions, sign=-1)

        change = Change(
            layer=layer,
            run=self._run,
            keys=unrotated(keys_apart, computed),
            values=values_apart,
            stored_keys=unrotated(_handy(keys[:, rows]), rows),
            stored_values=_handy(values[:, rows]),
            unrotated=unrotated,
        )
        delta = self._policy.correct(self._plan, change)
        if delta is not None:
            of_keys, of_values = self._rotated(layer, delta.keys, rows), delta.values
            # Whole runs are added to, the rows that will be written over included: that is faster than picking rows.
            if self._gets is not None:
                of_keys.masked_fill_(~self._gets, 0)
                of_values = of_values.masked_fill(~self._gets, 0)
            keys[:, rows].add_(of_keys)
            values[:, rows].add_(of_values)

    def _rotated(self, layer: int, keys: Tensor, positions: Tensor | slice, sign: int = 1) -> Tensor:
        """Keys (H, n, D) rotated from position 0 to theirs (sign 1) or back (-1): of their dtype, of its own."""
        cos, sin = self._table(layer, keys.dtype)
        return rotated(keys, cos[positions], sign * sin[positions], self._decoder.rope(layer))

    def _table(self, layer: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2), of every position in layers of that type."""
        kind = self._decoder.layer_types[layer]
        if (kind, dtype) not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            angles = positions[:, None] * inv_freq
            self._tables[kind, dtype] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._tables[kind, dtype]


def _handy(stored: Tensor) -> Tensor:
    """As it is in bfloat16, else float32: squares of float16 may overflow."""
    return stored if stored.dtype == torch.bfloat16 else stored.float()
