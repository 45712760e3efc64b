"""Corrects the KV of tokens that are not recomputed by extrapolating from the recomputed ones."""

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.rope import angles, rotated
from ragblend.engine.plan import Plan, TokenKind
from ragblend.engine.selection.base import Policy
from ragblend.engine.selection.shift import Delta, LayerChange, ShiftContext


class Correction:
    """Applies the policy's corrections in each layer, rotated to each row's position.

    rows (R,): all rows being computed, in one block. The policy gets the change of those among them that had stored KV.
    """

    def __init__(self, decoder: Decoder, plan: Plan, policy: Policy, cache: FusedCache, rows: Tensor) -> None:
        self._decoder, self._plan, self._policy, self._cache = decoder, plan, policy, cache
        self._reusable = (plan.kinds[rows] == TokenKind.REUSABLE).nonzero().squeeze(1)
        chunks = [(span.start, span.stop) for span in policy.spans(plan) if not span.exact]
        stored = decoder.geometry.torch_dtype
        # Not float16, whose squares may overflow.
        self._dtype = stored if stored == torch.bfloat16 else torch.float32
        self._context = ShiftContext(rows[self._reusable], chunks, self._dtype)
        self._uses_kernel = decoder.has_kernels("shift")
        self._tables: dict[tuple[str, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def apply(self, layer: int, new_keys: Tensor, new_values: Tensor) -> None:
        """Correct one layer's stored KV in the cache, before new_* (H, R, D) are written over it."""
        keys, values = self._cache.span(layer, 0, self._plan.tokens)

        def unrotated(of: Tensor, positions: Tensor | slice) -> Tensor:
            return self._rotated(layer, of, positions, sign=-1)

        def stored(at: Tensor | slice) -> tuple[Tensor, Tensor]:
            return unrotated(keys[:, at].to(self._dtype), at), values[:, at].to(self._dtype)

        observed = self._observed(layer, (new_keys, new_values), (keys, values))
        change = LayerChange(layer, self._context, *observed[:2], stored, unrotated, observed[2])
        for delta in self._policy.deltas(self._plan, change):
            self._add(layer, delta, keys, values)

    def _observed(
        self, layer: int, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """New minus stored keys, un-rotated, and values (H, C, D); and both by row, if a kernel computes them."""
        computed = self._context.computed
        if not self._uses_kernel or new[0].stride(2) != 1 or new[1].stride(2) != 1:
            # index_select would first copy the whole of a buffer that has free capacity.
            keys, values = (
                a[:, self._reusable].float() - b[:, computed].float()
                for a, b in zip(new, stored, strict=True)
            )
            return self._rotated(layer, keys, computed, sign=-1), values, None
        from ragblend.engine.kernels.shift import observed

        rotation, rope = self._table(layer, torch.float32, 1), self._decoder.rope(layer)
        heads, _, size = new[0].shape
        by_row = observed(new, self._reusable, stored, computed, rotation, rope)
        parts = by_row[:, : heads * size], by_row[:, heads * size :]
        keys, values = (part.unflatten(1, (heads, -1)).transpose(0, 1) for part in parts)
        return keys, values, by_row

    def _add(self, layer: int, delta: Delta, keys: Tensor, values: Tensor) -> None:
        """Add a correction to these stored rows (H, T, D), keys rotated to their positions."""
        if self._uses_kernel and delta.keys.stride(2) == delta.values.stride(2) == 1:
            from ragblend.engine.kernels.shift import add

            rotation, rope = self._table(layer, torch.float32, 1), self._decoder.rope(layer)
            add((delta.keys, delta.values), (keys, values), delta.start, rotation, rope)
            return
        rows = slice(delta.start, delta.start + delta.keys.shape[1])
        keys[:, rows].add_(self._rotated(layer, delta.keys, rows))
        values[:, rows].add_(delta.values)

    def _rotated(self, layer: int, keys: Tensor, positions: Tensor | slice, sign: int = 1) -> Tensor:
        """A copy of keys (H, n, D) rotated from position 0 to theirs (sign 1) or back (-1), in their dtype."""
        cos, sin = self._table(layer, keys.dtype, sign)
        return rotated(keys, cos[positions], sin[positions], self._decoder.rope(layer))

    def _table(self, layer: int, dtype: torch.dtype, sign: int) -> tuple[Tensor, Tensor]:
        """cos and sin, (T, R/2), of every position in layers of that type; sign -1 for the inverse rotation."""
        kind = self._decoder.layer_types[layer]
        if (kind, dtype, sign) not in self._tables:
            inv_freq = self._decoder.ropes[kind]
            positions = torch.arange(self._plan.tokens, device=inv_freq.device, dtype=inv_freq.dtype)
            cos, sin = angles(sign * positions, inv_freq)
            self._tables[kind, dtype, sign] = cos.to(dtype), sin.to(dtype)
        return self._tables[kind, dtype, sign]
