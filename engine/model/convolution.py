"""Gated short convolutions (LFM2): a layer in which a row depends on itself and on the few rows before it.

The convolution's inputs are kept as the layer's KV: of each row its C numbers, the first half as keys (which are not
rotated), the second as values. So loading, storing, truncating and correcting them need no code of their own, and any
row can be computed alone, because the inputs before it are in the cache, stored or recomputed.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ragblend.engine.cache import Append, FusedCache
from ragblend.kvstore.errors import UnsupportedModelError


def convolution_heads(channels: int, head_size: int) -> int:
    """Number of KV heads that hold a row's inputs."""
    return -(-channels // (2 * head_size))


def use_own_convolution(layer: nn.Module) -> None:
    """Make a layer's convolution work on a `FusedCache`. Raises UnsupportedModelError for an unknown structure."""
    own = getattr(layer, "conv", None)
    if isinstance(own, RowConvolution):
        return
    if not all(hasattr(own, part) for part in ("in_proj", "conv", "out_proj", "layer_idx")):
        raise UnsupportedModelError(f"{type(layer).__name__} has no convolution of a known structure")
    layer.conv = RowConvolution(own)


class RowConvolution(nn.Module):
    """A model's convolution `own`, which with a `FusedCache` computes any rows; without one it runs unchanged."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.own = own

    def forward(self, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> Tensor:
        """(1, R, hidden) -> (1, R, hidden)."""
        if not isinstance(past_key_values, FusedCache):
            unchanged: Tensor = self.own(hidden_states, past_key_values=past_key_values, **kwargs)
            return unchanged
        gate, gate_after, content = self.own.in_proj(hidden_states).chunk(3, dim=-1)
        mixed = self._convolved(gate * content, past_key_values)
        out: Tensor = self.own.out_proj(gate_after * mixed)
        return out

    def _convolved(self, inputs: Tensor, cache: FusedCache) -> Tensor:
        """The weighted sum of each row's inputs (1, R, C) and of those of the rows before it.

        Summed in float32 and rounded once, as torch's convolution does: in bfloat16 the sums have the same bits.
        """
        layer, channels, bias = self.own.layer_idx, inputs.shape[2], self.own.conv.bias
        weights: Sequence[Tensor] = self.own.conv.weight[:, 0].float().unbind(1)  # the last is the row's own
        rows = _rows_of_step(cache, layer, inputs.shape[1])
        cache.update(*_as_kv(inputs, cache), layer)
        mixed = inputs.float() * weights[-1]
        for back, weight in enumerate(reversed(weights[:-1]), start=1):
            mixed.addcmul_(_inputs_at(cache, layer, rows - back, channels).float(), weight)
        if bias is not None:
            mixed.add_(bias)
        return mixed.to(inputs.dtype)


def _rows_of_step(cache: FusedCache, layer: int, count: int) -> Tensor:
    """(R,) positions of the rows that the cache's step writes next."""
    step, held = cache.step, cache.fused[layer]
    if not isinstance(step, Append) and step.rows is not None:
        return step.rows
    start = held.keys.shape[2] if isinstance(step, Append) else 0
    return torch.arange(start, start + count, device=held.device)


def _as_kv(inputs: Tensor, cache: FusedCache) -> tuple[Tensor, Tensor]:
    """Keys and values (1, H, R, D) that hold inputs (1, R, C)."""
    size, channels = cache.geometry.key_size, inputs.shape[2]
    heads = convolution_heads(channels, size)
    padded = pad(inputs, (0, 2 * heads * size - channels))
    keys, values = padded.unflatten(2, (2, heads, size)).unbind(2)
    return keys.transpose(1, 2), values.transpose(1, 2)


def _inputs_at(cache: FusedCache, layer: int, rows: Tensor, channels: int) -> Tensor:
    """(1, R, C): the inputs at rows (R,), zero before the first row."""
    heads, held = convolution_heads(channels, cache.geometry.key_size), cache.fused[layer]
    buffers = held.key_buffer[0, :heads], held.value_buffer[0, :heads]
    halves = [buffer.index_select(1, rows.clamp_min(0)).transpose(0, 1).flatten(1) for buffer in buffers]
    inputs = torch.cat(halves, dim=1)[:, :channels]
    return inputs.masked_fill_((rows < 0)[:, None], 0)[None]
