"""The attention that models call: tiles of scattered rows on the CPU, and collection of attention weights.

Torch's CPU kernel computes every masked score: for scattered rows twice as many as causality needs, and ten times as
many with a sliding window. Rows are ascending, so a tile of rows sees one range of keys. With few rows, heads that
share a key head are folded into rows, so that the keys are read once. On processors with AVX-512 BF16 but no AMX,
torch's kernel does not use bfloat16 instructions (66 GFLOP/s per core; plain products reach 400): there a tile is three
plain operations in a core's cache. Rows whose attention is collected use plain products too, so that a policy gets
their weights, for that layer only. On CUDA a kernel of our own takes scattered rows without a mask.

Both attentions are registered with transformers under names of our own (a documented extension point). Without tiles,
scattered rows or collector they are transformers' sdpa and the model's own eager attention, unchanged.

Masks are built from true positions: a row at position p sees the keys at positions <= p, and in a sliding layer only
those > p - window. A mask aligned to the bottom right corner, as usual for contiguous rows, would let scattered rows
see the future.
"""

import functools
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.model.device import cpu_features

OWN_ATTENTION, OWN_EAGER = "ragblend", "ragblend_eager"
CAPACITY_STEP = 256  # tokens: the smallest step between rounded capacities
TILE_ROWS = 64  # the fastest of 32, 64, 128 and 256, by the kernel and by products
# The same if keys are packed: 64 unfolded take 1.3 to 2 times as long for 800 rows of 3,200.
WIDE_TILE_ROWS = 128
WASTED_SCORES = 8192  # masked scores that cost as much as one more tile's calls
WASTED_PRODUCTS = 12288  # the same for products, where a tile has its own shape
# The folded masks of more rows are not kept, because they take much memory; without AMX more rows are not folded.
MAX_FOLDED_ROWS = 256
# How much faster products must be: unlike the kernel they round scores to the model's dtype.
PRODUCTS_GAIN = 1.25
_measuring_lock = threading.Lock()


@dataclass(frozen=True)
class Tile:
    """Rows start..stop of the computed rows, which see keys first_key..stop_key; the mask begins at masked_from_key.

    mask (stop - start, stop_key - masked_from_key), additive; None if no key is masked.
    """

    start: int
    stop: int
    first_key: int
    stop_key: int
    masked_from_key: int
    mask: Tensor | None

    _folds: dict[int, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def folded(self, group: int, is_kept: bool) -> Tensor | None:
        """(group * rows, keys): the mask of all keys, repeated for a group's heads. is_kept: for later layers."""
        if self.mask is None or group in self._folds:
            return self._folds.get(group)
        rows, keys = self.stop - self.start, self.stop_key - self.first_key
        folded = self.mask.new_zeros(group, rows, keys)
        folded[..., self.masked_from_key - self.first_key :] = self.mask
        if is_kept:
            self._folds[group] = folded.flatten(0, 1)
        return folded.flatten(0, 1)


@dataclass(frozen=True)
class ScatteredRows:
    """Rows (R,), ascending positions, whose attention one kernel computes (`kernels/rows_attention.py`)."""

    positions: Tensor
    window: int | None


@dataclass(frozen=True)
class AttentionCollector:
    """Collects the attention of the last `rows` of the computed rows.

    These rows see keys from first_key on; mask (rows, K) is additive, and zero before masked_from_key.
    collect(self, queries (N, rows, D), keys (H, K, D), scaling, weights (N, rows, K)) returns None, and may raise.
    """

    rows: int
    first_key: int
    mask: Tensor
    masked_from_key: int
    collect: "CollectAttention | None" = None


CollectAttention = Callable[[AttentionCollector, Tensor, Tensor, float, Tensor], None]


def tiles(rows: Tensor, window: int | None, dtype: torch.dtype, absent: Tensor | None = None) -> list[Tile]:
    """Cut ascending positions (R,) into tiles; masks have dtype. absent (T,) bool: keys that no row sees.

    All keys up to the last row must be finite: for products a tile ends at a rounded number of keys, so it may contain
    keys that are not computed yet.
    """
    tiles, rounds_stop = [], products_are_faster(dtype)
    most_rows = WIDE_TILE_ROWS if packs_keys(dtype) else TILE_ROWS
    wasted = WASTED_PRODUCTS if rounds_stop else WASTED_SCORES * most_rows // TILE_ROWS
    for start, end in _cuts(rows.tolist(), most_rows, wasted):
        tile = rows[start:end]
        first, least, stop = 0, int(tile[0]) + 1, int(tile[-1]) + 1
        if rounds_stop:
            stop = min(rounded_up(stop), int(rows[-1]) + 1)
        if window is not None:
            first = max(0, least - window)
        masked_from_key = masked_from(first, least, stop, window, absent)
        mask = None
        if masked_from_key < stop:
            visible = position_mask(tile, stop, window, absent, masked_from_key)[0, 0]
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        tiles.append(Tile(start, end, first, stop, masked_from_key, mask))
    return tiles


def masked_from(first: int, least: int, stop: int, window: int | None, absent: Tensor | None) -> int:
    """The first key of first..stop that some row may not see; the first row sees all keys before `least`."""
    return least if absent is None and stop - first <= (window or stop) else first


def rounded_up(tokens: int) -> int:
    """Round up to a multiple of CAPACITY_STEP, or of an eighth of the largest power of two in `tokens`.

    oneDNN compiles each new shape, which takes a megabyte and a millisecond.
    """
    step = max(CAPACITY_STEP, 1 << max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def _cuts(positions: list[int], most_rows: int, most_wasted: int) -> list[tuple[int, int]]:
    """(start, end) of each tile: at most most_rows rows, with a cut where a gap between positions would waste more than
    most_wasted scores.
    """
    starts = [0]
    for number, (before, position) in enumerate(pairwise(positions), 1):
        rows = number - starts[-1]
        if rows == most_rows or rows * (position - before) > most_wasted:
            starts.append(number)
    return list(pairwise([*starts, len(positions)])) if positions else []


def products_are_faster(dtype: torch.dtype) -> bool:
    """Whether plain products are faster than torch's attention kernel on this machine; measured once, in a few ms."""
    if dtype != torch.bfloat16 or packs_keys(dtype):
        return False  # about equal: 60 and 64 GFLOP/s in float32
    with _measuring_lock:  # it changes torch's number of threads
        return _measured_faster()


@functools.cache
def packs_keys(dtype: torch.dtype) -> bool:
    """Whether torch's attention kernel packs keys for the processor's matrix unit (AMX), once for each tile."""
    return dtype == torch.bfloat16 and bool(cpu_features().get("amx_bf16"))


@functools.cache
def _measured_faster() -> bool:
    """Measures on one thread: under load, several threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        query, key = (torch.ones(1, 1, count, 64, dtype=torch.bfloat16) for count in (2 * TILE_ROWS, 1024))
        tile = Tile(0, query.shape[2], 0, key.shape[2], key.shape[2], None)

        def fastest_s(attend: Callable[..., Tensor]) -> float:
            times = []
            for _ in range(5):
                begun = time.perf_counter()
                attend(query, key, key, None, [tile])
                times.append(time.perf_counter() - begun)
            return min(times)

        return fastest_s(_by_kernel) > PRODUCTS_GAIN * fastest_s(_by_products)
    finally:
        torch.set_num_threads(threads)


def position_mask(
    rows: Tensor, total_tokens: int, window: int | None, absent: Tensor | None = None, first_key: int = 0
) -> Tensor:
    """The mask of `rows` over the keys first_key..total_tokens.

    rows (R,) positions, ascending; window: tokens that a row sees in a sliding layer, its own included, or None; absent
    (T,) bool: keys that no row sees. Returns bool (1, 1, R, keys), True where the row may attend.
    """
    mask = causal_mask(rows, torch.arange(first_key, total_tokens, device=rows.device), window)
    if absent is not None:
        mask &= ~absent[first_key:total_tokens]
    return mask


def causal_mask(rows: Tensor, keys: Tensor, window: int | None) -> Tensor:
    """The mask of `rows` over the keys at these positions (K,): bool (1, 1, R, K)."""
    mask = keys[None, :] <= rows[:, None]
    if window is not None:
        mask &= keys[None, :] > rows[:, None] - window
    return mask[None, None]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask as numbers to add to the scores: 0 where the row may attend, the lowest number elsewhere."""
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(dtype).min)


def register() -> str:
    """Register both attentions with transformers; returns OWN_ATTENTION. Idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(OWN_ATTENTION, rows_attention)
    AttentionMaskInterface.register(OWN_ATTENTION, sdpa_mask)
    AttentionInterface.register(OWN_EAGER, eager_attention)
    AttentionMaskInterface.register(OWN_EAGER, eager_mask)
    return OWN_ATTENTION


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tiles: list[Tile] | None = None,
    scattered: ScatteredRows | None = None,
    collector: AttentionCollector | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (1, N, R, D), key and value (1, H, T, D) -> (1, R, N, D); N is H times the group.

    With a collector, attention_mask, tiles and scattered cover only the rows before the collector's.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if collector is not None:
        start = query.shape[2] - collector.rows
        out = _collected(query[0, :, start:], key[0], value[0], scaling, collector)
        if start == 0:
            return out.contiguous(), None
        first, more = query[:, :, :start], {"tiles": tiles, "scattered": scattered, **kwargs}
        before, _ = rows_attention(module, first, key, value, attention_mask, scaling, **more)
        return torch.cat([before, out], dim=1), None
    if scattered is not None:
        from ragblend.engine.kernels.rows_attention import attend as attend_rows

        given = query[0], key[0], value[0], scattered.positions
        return attend_rows(*given, scaling, scattered.window)[None], None
    if tiles is None and attention_mask is None and query.device.type == "cpu":
        tiles = _implicit_tiles(query, key)
    if tiles is None:
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return attended
    # Not for a single row: each token of an answer would be a new shape.
    by_products = query.shape[2] > 1 and products_are_faster(query.dtype)
    attend = _by_products if by_products else _by_kernel
    return attend(query, key, value, scaling, tiles), None


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    collector: AttentionCollector | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """The eager attention of the model's own module (soft caps, sinks), which returns its weights anyway."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    attended: tuple[Tensor, Tensor] = own(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    if collector is not None and collector.collect is not None:
        last, seen = slice(-collector.rows, None), slice(collector.first_key, None)
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        collector.collect(collector, query[0, :, last], key[0, :, seen], scale, attended[1][0, :, last, seen])
    return attended


def _implicit_tiles(query: Tensor, key: Tensor) -> list[Tile] | None:
    """Tiles of rows without a mask: a single row sees all keys, a whole sequence is causal."""
    rows, keys = query.shape[2], key.shape[2]
    if rows == 1:
        return [Tile(0, 1, 0, keys, keys, None)]
    whole = rows == keys and query.shape[0] == 1
    return _sequence_tiles(rows, query.dtype) if whole and products_are_faster(query.dtype) else None


@functools.lru_cache(maxsize=1)
def _sequence_tiles(rows: int, dtype: torch.dtype) -> list[Tile]:
    return tiles(torch.arange(rows), None, dtype)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, tiles: list[Tile]) -> Tensor:
    """query (1, N, R, D), key and value (1, H, T, D) -> (1, R, N, D), tile by tile."""
    heads, rows, size = query.shape[1:]
    group = heads // key.shape[1]
    is_small = rows <= MAX_FOLDED_ROWS
    folds = is_small or packs_keys(query.dtype)
    groups = query.reshape(key.shape[1], group, rows, size)  # (H, G, R, D)
    out = torch.empty((1, rows, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    for tile in tiles:
        queries = groups[:, :, tile.start : tile.stop]
        if folds:
            queries = queries.flatten(1, 2)[:, None]  # (H, 1, G * R, D)
        shape = (*queries.shape[:2], tile.stop_key - tile.first_key, -1)
        keys = slice(tile.first_key, tile.stop_key)
        mask = tile.folded(group if folds else 1, is_kept=is_small)
        part = nn.functional.scaled_dot_product_attention(
            queries,
            key[0, :, None, keys].expand(shape),
            value[0, :, None, keys].expand(shape),
            attn_mask=None if mask is None else mask[None, None],
            scale=scaling,
        )
        part = part.reshape(heads, tile.stop - tile.start, -1)
        out[0, tile.start : tile.stop] = part.transpose(0, 1)
    return out


def _by_products(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, tiles: list[Tile]
) -> Tensor:
    """`_by_kernel` as plain products, one key head at a time, so that its scores stay in the processor's cache."""
    heads, rows, width = query.shape[1:]
    group = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    groups = query.reshape(key.shape[1], group, rows, width)  # (H, G, R, D)
    centred = _centred(key[0, :, : tiles[-1].stop_key])  # later rows may not be written yet
    out = torch.empty((1, rows, heads, value.shape[-1]), dtype=query.dtype, device=query.device)
    zero = query.new_zeros(1)
    sizes = [group * (tile.stop - tile.start) * (tile.stop_key - tile.first_key) for tile in tiles]
    scratch = query.new_empty(max(sizes, default=0))
    for tile, size in zip(tiles, sizes, strict=True):
        keys = slice(tile.first_key, tile.stop_key)
        for head, queries in enumerate(groups[:, :, tile.start : tile.stop].flatten(1, 2)):  # (G * R, D)
            scores = scratch[:size].view(len(queries), -1)
            torch.addmm(zero, queries, centred[head, keys].T, beta=0, alpha=scale, out=scores)
            if tile.mask is not None:
                by_head = scores.view(group, -1, scores.shape[1])
                by_head[..., tile.masked_from_key - tile.first_key :].add_(tile.mask)
            part = torch.softmax(scores, -1, out=scores) @ value[0, head, keys]
            of_head = out[0, tile.start : tile.stop, head * group : (head + 1) * group]
            of_head.copy_(part.view(group, -1, part.shape[-1]).transpose(0, 1))
    return out


def _collected(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, collector: AttentionCollector
) -> Tensor:
    """queries (N, W, D), keys and values (H, T, D) -> (1, W, N, D); passes weights (N, W, K) to the collector."""
    heads, rows, size = query.shape
    keys, values = key[:, collector.first_key :], value[:, collector.first_key :]
    key_heads, scale = keys.shape[0], size**-0.5 if scaling is None else scaling
    masked = slice(collector.masked_from_key - collector.first_key, None)
    grouped = (query * scale).reshape(key_heads, -1, size)  # (H, G * W, D): no key is expanded
    padded, centred = padded_scores(query, (heads, rows, keys.shape[1])), _centred(keys)
    weights = padded[..., : keys.shape[1]]
    out = query.new_empty(key_heads, grouped.shape[1], values.shape[-1])
    # On a CPU a head at a time: its scores stay in the cache, and no keys are copied as batched products would.
    for head in range(key_heads) if query.device.type == "cpu" else [slice(None)]:
        scores = weights.view(key_heads, -1, keys.shape[1])[head]
        torch.matmul(grouped[head], centred[head].mT, out=scores)
        scores.view(-1, rows, keys.shape[1])[..., masked].add_(collector.mask[:, masked])
        whole = padded.view(key_heads, -1, padded.shape[-1])[head]
        torch.softmax(whole, -1, out=whole)
        torch.matmul(scores, values[head], out=out[head])
    if collector.collect is not None:
        collector.collect(collector, query, keys, scale, weights)
    return out.view(heads, rows, -1).transpose(0, 1)[None]


def _centred(keys: Tensor) -> Tensor:
    """Keys (H, K, D) minus their mean, which changes no attention weight.

    Products are rounded to their dtype. Qwen2.5-1.5B's first layer has scores up to 12,700, because its keys have a
    bias: rounding made its output 9% wrong, and 0.2% after the mean was subtracted.
    """
    return keys if keys.dtype == torch.float32 else keys - keys.mean(1, keepdim=True)


def padded_scores(like: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """An uninitialised tensor for scores (N, W, K). On a GPU K is padded with -inf to a multiple of eight, because
    products are several times slower for other sizes. The padding is returned too: softmax would copy a view twice.
    """
    extra = 0 if like.device.type == "cpu" else -shape[-1] % 8
    scores = like.new_empty((*shape[:-1], shape[-1] + extra))
    scores[..., shape[-1] :] = -torch.inf
    return scores
