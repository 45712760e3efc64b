"""Attention for scattered rows on the CPU: blocks of rows against just the keys they can see.

Torch's CPU kernel computes every masked score, so rows spread over a sequence cost twice what causality asks for, and
ten times where a window slides. Rows are ascending: a block of them sees one run of keys. Registered with transformers
under its own name (its documented extension point); without row blocks it is transformers' sdpa, unchanged.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

NAME = "ragblend"
BLOCK_ROWS = 128


@dataclass(frozen=True)
class RowBlock:
    """Rows start..stop of those being computed see keys first..last + 1, under mask (1, 1, stop - start, keys)."""

    start: int
    stop: int
    first_key: int
    stop_key: int
    mask: Tensor


def row_blocks(rows: Tensor, window: int | None, dtype: torch.dtype) -> list[RowBlock]:
    """Cut ascending positions (R,) into blocks; masks are additive, in dtype."""
    blocks = []
    for start in range(0, rows.numel(), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        first = 0 if window is None else max(0, int(block[0]) - window + 1)
        stop = int(block[-1]) + 1
        keys = torch.arange(first, stop)
        hidden = keys[None, :] > block[:, None]
        if window is not None:
            hidden |= keys[None, :] <= block[:, None] - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append(RowBlock(start, start + block.numel(), first, stop, mask[None, None]))
    return blocks


def register() -> str:
    """Make the attention known to transformers; returns its name. Doing so twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, rows_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_blocks: list[RowBlock] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, N, R, D), key and value (1, H, T, D) -> (1, R, N, D); N is H times the group."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if row_blocks is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    heads, rows, size = query.shape[1:]
    groups = query.view(key.shape[1], heads // key.shape[1], rows, size)  # (H, G, R, D)
    keys, values = key[0, :, None], value[0, :, None]  # (H, 1, T, D): one for all heads of a group
    out = torch.empty((1, rows, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    for block in row_blocks:
        shape = (*groups.shape[:2], block.stop_key - block.first_key, -1)
        part = nn.functional.scaled_dot_product_attention(
            groups[:, :, block.start : block.stop],
            keys[:, :, block.first_key : block.stop_key].expand(shape),
            values[:, :, block.first_key : block.stop_key].expand(shape),
            attn_mask=block.mask,
            scale=scaling,
        )
        out[0, block.start : block.stop] = part.flatten(0, 1).transpose(0, 1)
    return out, None
