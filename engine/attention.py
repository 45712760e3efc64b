"""The attention that models call: blocks of scattered rows on the CPU, and a look at what some rows look at.

Torch's CPU kernel computes every masked score, so rows spread over a sequence cost twice what causality asks for, and
ten times where a window slides. Rows are ascending: a block of them sees one run of keys. Where rows are few, the
heads that share a key head are folded into rows, so that they do not each read the same keys again. Watched rows are
attended to by plain products, so that their weights are at hand for a policy: computed once, kept for that layer alone.
Registered with transformers under names of its own (its documented extension point); with none of these it is
transformers' sdpa, or the model's own eager attention, unchanged.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NAME, EAGER = "ragblend", "ragblend_eager"
BLOCK_ROWS = 128
FOLDED_ROWS = 256  # of more rows the folded masks would take more memory than they save time


@dataclass(frozen=True)
class RowBlock:
    """Rows start..stop of those being computed see keys first_key..stop_key, under mask (1, 1, stop - start, keys)."""

    start: int
    stop: int
    first_key: int
    stop_key: int
    mask: Tensor | None

    _folds: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def folded(self, group: int) -> Tensor | None:
        """(1, 1, group * rows, keys): the mask for a group's heads one below the other; made once for all layers."""
        if self.mask is None:
            return None
        if group not in self._folds:
            self._folds[group] = self.mask.repeat(1, 1, group, 1)
        return self._folds[group]


@dataclass(frozen=True)
class Watch:
    """The last `rows` of those being computed, whose attention `see` is to be shown.

    They see keys from first_key on, under the additive mask (rows, K). see(queries (N, rows, D), keys (H, K, D),
    scaling, weights (N, rows, K)) returns None; what it raises leaves the layer.
    """

    rows: int
    first_key: int
    mask: Tensor
    see: Callable[[Tensor, Tensor, float, Tensor], None] | None = None


def row_blocks(
    rows: Tensor, window: int | None, dtype: torch.dtype, absent: Tensor | None = None
) -> list[RowBlock]:
    """Cut ascending positions (R,) into blocks; masks are additive, in dtype. absent (T,) bool: keys to leave out."""
    blocks = []
    for start in range(0, rows.numel(), BLOCK_ROWS):
        block = rows[start : start + BLOCK_ROWS]
        first = 0 if window is None else max(0, int(block[0]) - window + 1)
        stop = int(block[-1]) + 1
        keys = torch.arange(first, stop)
        hidden = keys[None, :] > block[:, None]
        if window is not None:
            hidden |= keys[None, :] <= block[:, None] - window
        if absent is not None:
            hidden |= absent[first:stop]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append(RowBlock(start, start + block.numel(), first, stop, mask[None, None]))
    return blocks


def register() -> str:
    """Make both attentions known to transformers; returns NAME. Doing so twice changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(NAME, rows_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    AttentionInterface.register(EAGER, eager_attention)
    AttentionMaskInterface.register(EAGER, eager_mask)
    return NAME


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_blocks: list[RowBlock] | None = None,
    watch: Watch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, N, R, D), key and value (1, H, T, D) -> (1, R, N, D); N is H times the group.

    With a watch, attention_mask and row_blocks are of the rows before the watched ones.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if watch is not None:
        return _watched_attention(
            module, query, key, value, attention_mask, scaling, row_blocks, watch, kwargs
        )
    if row_blocks is None and attention_mask is None and query.shape[2] == 1 and query.device.type == "cpu":
        row_blocks = [RowBlock(0, 1, 0, key.shape[2], None)]  # one row sees all that it is given
    if row_blocks is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    return _blocked(query, key, value, scaling, row_blocks), None


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    watch: Watch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of the model's own module (soft caps, sinks), whose weights are at hand anyway."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    attended: tuple[Tensor, Tensor] = own(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    if watch is not None and watch.see is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        weights = attended[1][0, :, -watch.rows :, watch.first_key :]
        watch.see(query[0, :, -watch.rows :], key[0, :, watch.first_key :], scale, weights)
    return attended


def _blocked(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, row_blocks: list[RowBlock]
) -> Tensor:
    heads, rows, size = query.shape[1:]
    group = heads // key.shape[1]
    folds = rows <= FOLDED_ROWS
    groups = query.reshape(key.shape[1], group, rows, size)  # (H, G, R, D)
    out = torch.empty((1, rows, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    for block in row_blocks:
        queries = groups[:, :, block.start : block.stop]
        if folds:
            queries = queries.flatten(1, 2)[:, None]  # (H, 1, G * R, D)
        shape = (*queries.shape[:2], block.stop_key - block.first_key, -1)
        keys = slice(block.first_key, block.stop_key)
        part = nn.functional.scaled_dot_product_attention(
            queries,
            key[0, :, None, keys].expand(shape),
            value[0, :, None, keys].expand(shape),
            attn_mask=block.folded(group) if folds else block.mask,
            scale=scaling,
        )
        part = part.reshape(heads, block.stop - block.start, -1)
        out[0, block.start : block.stop] = part.transpose(0, 1)
    return out


def _watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    row_blocks: list[RowBlock] | None,
    watch: Watch,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    start = query.shape[2] - watch.rows
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    watched = query[0, :, start:]
    keys, values = key[0, :, watch.first_key :], value[0, :, watch.first_key :]
    weights = _weights(watched, keys, scale, watch.mask)
    if watch.see is not None:
        watch.see(watched, keys, scale, weights)
    attended = (weights.view(keys.shape[0], -1, keys.shape[1]) @ values).view(*watched.shape[:2], -1)
    out = attended.transpose(0, 1)[None]  # (1, W, N, D)
    if start == 0:
        return out.contiguous(), None
    before, _ = rows_attention(
        module, query[:, :, :start], key, value, attention_mask, scaling, row_blocks, None, **kwargs
    )
    return torch.cat([before, out], dim=1), None


def _weights(queries: Tensor, keys: Tensor, scaling: float, mask: Tensor) -> Tensor:
    """queries (N, W, D), keys (H, K, D), mask (W, K) additive -> (N, W, K) shares of each row, in queries' dtype."""
    heads, rows, size = queries.shape
    grouped = (queries * scaling).reshape(keys.shape[0], -1, size)  # (H, G * W, D): no key is expanded
    scores = (grouped @ keys.transpose(1, 2)).view(heads, rows, -1)
    return scores.add_(mask).softmax(dim=-1)
