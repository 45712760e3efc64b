"""Corrections: what a policy adds to stored KV that is not computed again, from what changed where it was."""

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.rope import rotated
from ragblend.engine.plan import Kind, Plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.shift import LayerChange, ShiftContext


class Correction:
    """Asks the policy in each layer, and rotates what it answers to where each row stands.

    rows (R,): all rows that are being computed, in one block; those of them that were stored have changed.
    """

    def __init__(self, decoder: Decoder, plan: Plan, policy: Policy, cache: FusedCache, rows: Tensor) -> None:
        self._decoder, self._plan, self._policy, self._cache = decoder, plan, policy, cache
        self._at = (plan.kinds[rows] == Kind.REUSABLE).nonzero().squeeze(1)
        chunks = [(span.start, span.stop) for span in policy.spans(plan) if not span.exact]
        stored = decoder.geometry.torch_dtype
        # As it is in bfloat16, else float32: squares of float16 may overflow.
        self._dtype = stored if stored == torch.bfloat16 else torch.float32
        self._run = ShiftContext(rows[self._at], chunks, self._dtype)
        self._tables: dict[tuple[str, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache; new_* (H, R, D) are about to be written over it."""
        keys, values = self._cache.span(layer, 0, self._plan.tokens)
        computed = self._run.computed
        # index_select would first copy all of a buffer that has room behind its rows.
        keys_apart = new_keys[:, self._at].float() - keys[:, computed].float()
        values_apart = new_values[:, self._at].float() - values[:, computed].float()

        def unrotated(of: Tensor, positions: Tensor | slice) -> Tensor:
            return self._rotated(layer, of, positions, sign=-1)

        def stored(at: Tensor | slice) -> tuple[Tensor, Tensor]:
            return unrotated(keys[:, at].to(self._dtype), at), values[:, at].to(self._dtype)

        change = LayerChange(
            layer, self._run, unrotated(keys_apart, computed), values_apart, stored, unrotated
        )
        for delta in self._policy.deltas(self._plan, change):
            rows = slice(delta.start, delta.start + delta.keys.shape[1])
            keys[:, rows].add_(self._rotated(layer, delta.keys, rows))
            values[:, rows].add_(delta.values)

    def _rotated(self, layer: int, keys: Tensor, positions: Tensor | slice, sign: int = 1) -> Tensor:
        """Keys (H, n, D) rotated from position 0 to theirs (sign 1) or back (-1): of their dtype, of its own."""
        cos, sin = self._table(layer, keys.dtype, sign)
        return rotated(keys, cos[positions], sin[positions], self._decoder.rope(layer))

    def _table(self, layer: int, dtype: torch.dtype, sign: int) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2), of every position in layers of that type, or of its opposite (sign -1)."""
        kind = self._decoder.layer_types[layer]
        if (kind, dtype, sign) not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            angles = sign * positions[:, None] * inv_freq
            self._tables[kind, dtype, sign] = angles.cos().to(dtype), angles.sin().to(dtype)
        return self._tables[kind, dtype, sign]
