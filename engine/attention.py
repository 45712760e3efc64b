"""The attention that models call: tiles of scattered rows on the CPU, and what some rows attend to, collected.

Torch's CPU kernel computes every masked score, so rows spread over a sequence cost twice what causality asks for, and
ten times where a window slides. Rows are ascending: a tile of them sees one run of keys. Where rows are few, the
heads that share a key head are folded into rows, so that they do not each read the same keys again. Rows whose
attention is collected attend by plain products, so that a policy has their weights: computed once, kept for that layer
alone.
Registered with transformers under names of its own (its documented extension point); with none of these it is
transformers' sdpa, or the model's own eager attention, unchanged.

Masks are built from true positions: a row at position p sees the keys at positions <= p, and in a sliding layer only
those > p - window. A mask aligned to the bottom right corner, as usual for contiguous rows, would let scattered rows
see the future.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

NAME, EAGER = "ragblend", "ragblend_eager"
TILE_ROWS = 128
FOLDED_ROWS = 256  # of more rows the folded masks would take more memory than they save time


@dataclass(frozen=True)
class Tile:
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
class Collector:
    """The last `rows` of those being computed, whose attention is collected.

    They see keys from first_key on, under the additive mask (rows, K). collect(self, queries (N, rows, D), keys
    (H, K, D), scaling, weights (N, rows, K)) returns None; what it raises leaves the layer.
    """

    rows: int
    first_key: int
    mask: Tensor
    collect: "Collect | None" = None


Collect = Callable[[Collector, Tensor, Tensor, float, Tensor], None]


def tiles(rows: Tensor, window: int | None, dtype: torch.dtype, absent: Tensor | None = None) -> list[Tile]:
    """Cut ascending positions (R,) into tiles; masks are additive, in dtype. absent (T,) bool: keys to leave out."""
    tiles = []
    for start in range(0, rows.numel(), TILE_ROWS):
        tile = rows[start : start + TILE_ROWS]
        first = 0 if window is None else max(0, int(tile[0]) - window + 1)
        stop = int(tile[-1]) + 1
        visible = position_mask(tile, stop, window, absent, first)
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        tiles.append(Tile(start, start + tile.numel(), first, stop, mask))
    return tiles


def position_mask(
    rows: Tensor, total_tokens: int, window: int | None, absent: Tensor | None = None, first_key: int = 0
) -> Tensor:
    """The mask for computing `rows` against the keys first_key..total_tokens.

    rows (R,) positions, ascending; window: tokens a sliding layer sees, itself included, or None; absent (T,) bool:
    keys that are not there. Returns bool (1, 1, R, keys), True where the row may attend.
    """
    keys = torch.arange(first_key, total_tokens, device=rows.device)
    mask = keys[None, :] <= rows[:, None]  # (R, K)
    if window is not None:
        mask &= keys[None, :] > rows[:, None] - window
    if absent is not None:
        mask &= ~absent[first_key:total_tokens]
    return mask[None, None]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The same mask as numbers to add to the scores: 0 where the row may attend, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


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
    tiles: list[Tile] | None = None,
    collector: Collector | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, N, R, D), key and value (1, H, T, D) -> (1, R, N, D); N is H times the group.

    With a collector, attention_mask and tiles are of the rows before its own.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if collector is not None:
        start = query.shape[2] - collector.rows
        out = _collected(query[0, :, start:], key[0], value[0], scaling, collector)
        if start == 0:
            return out.contiguous(), None
        first, more = query[:, :, :start], {"tiles": tiles, **kwargs}
        before, _ = rows_attention(module, first, key, value, attention_mask, scaling, **more)
        return torch.cat([before, out], dim=1), None
    if tiles is None and attention_mask is None and query.shape[2] == 1 and query.device.type == "cpu":
        tiles = [Tile(0, 1, 0, key.shape[2], None)]  # one row sees all that it is given
    if tiles is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    return _tiled(query, key, value, scaling, tiles), None


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    collector: Collector | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of the model's own module (soft caps, sinks), whose weights are at hand anyway."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    attended: tuple[Tensor, Tensor] = own(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    if collector is not None and collector.collect is not None:
        last, seen = slice(-collector.rows, None), slice(collector.first_key, None)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        collector.collect(collector, query[0, :, last], key[0, :, seen], scale, attended[1][0, :, last, seen])
    return attended


def _tiled(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, tiles: list[Tile]) -> Tensor:
    heads, rows, size = query.shape[1:]
    group = heads // key.shape[1]
    folds = rows <= FOLDED_ROWS
    groups = query.reshape(key.shape[1], group, rows, size)  # (H, G, R, D)
    out = torch.empty((1, rows, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    for tile in tiles:
        queries = groups[:, :, tile.start : tile.stop]
        if folds:
            queries = queries.flatten(1, 2)[:, None]  # (H, 1, G * R, D)
        shape = (*queries.shape[:2], tile.stop_key - tile.first_key, -1)
        keys = slice(tile.first_key, tile.stop_key)
        part = nn.functional.scaled_dot_product_attention(
            queries,
            key[0, :, None, keys].expand(shape),
            value[0, :, None, keys].expand(shape),
            attn_mask=tile.folded(group) if folds else tile.mask,
            scale=scaling,
        )
        part = part.reshape(heads, tile.stop - tile.start, -1)
        out[0, tile.start : tile.stop] = part.transpose(0, 1)
    return out


def _collected(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, collector: Collector
) -> Tensor:
    """queries (N, W, D), keys and values (H, T, D) -> (1, W, N, D), by weights (N, W, K) that are collected."""
    (heads, rows, size), keys = query.shape, key[:, collector.first_key :]
    scale = size**-0.5 if scaling is None else scaling
    grouped = (query * scale).reshape(keys.shape[0], -1, size)  # (H, G * W, D): no key is expanded
    scores = (grouped @ keys.transpose(1, 2)).view(heads, rows, -1)
    weights = scores.add_(collector.mask).softmax(dim=-1)
    if collector.collect is not None:
        collector.collect(collector, query, keys, scale, weights)
    attended = weights.view(keys.shape[0], -1, keys.shape[1]) @ value[:, collector.first_key :]
    return attended.view(heads, rows, -1).transpose(0, 1)[None]
