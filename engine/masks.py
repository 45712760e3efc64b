"""Attention masks built from true positions.

A row at position p sees the keys at positions <= p, and in a sliding layer only those > p - window. A mask aligned to
the bottom right corner, as usual for contiguous rows, would let scattered rows see the future.
"""

import torch
from torch import Tensor


def is_plain_causal(rows: Tensor, total_tokens: int, window: int | None) -> bool:
    """Whether the rows are the whole sequence and nothing slides out, so that attention may take its causal path."""
    return rows.numel() == total_tokens and (window is None or window >= total_tokens)


def position_mask(
    rows: Tensor, total_tokens: int, window: int | None, absent: Tensor | None = None
) -> Tensor:
    """The mask for computing `rows` against the whole sequence.

    rows (R,) positions, ascending; window: tokens a sliding layer sees, itself included, or None; absent (T,) bool:
    keys that are not there. Returns bool (1, 1, R, total_tokens), True where the row may look.
    """
    keys = torch.arange(total_tokens, device=rows.device)
    mask = keys[None, :] <= rows[:, None]  # (R, T)
    if window is not None:
        mask &= keys[None, :] > rows[:, None] - window
    if absent is not None:
        mask &= ~absent
    return mask[None, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask as numbers to add to the scores: 0 where the row may look, the lowest number elsewhere."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, torch.finfo(dtype).min
    )
