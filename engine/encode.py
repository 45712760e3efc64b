"""Encodes a chunk: computes its KV alone, after the encoding prefix.

Without a prefix, a chunk's first token would become an attention sink, and its KV would be of little use elsewhere.
With the prefix that prompts begin with, the first chunk of a prompt is exact.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ragblend.engine.cache import Append, FusedCache
from ragblend.engine.model.decoder import BLOCK_ROWS, Decoder
from ragblend.engine.model.device import transfer_stream
from ragblend.engine.model.rope import Rope, unrotated
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.chunks import ChunkKV, Geometry

ROOM_TOKENS = 1024  # for a chunk; the cache grows for a longer one


def copied_kv(
    token_ids: tuple[int, ...],
    start: int,
    geometry: Geometry,
    layers: Iterable[tuple[Tensor, Tensor]],
    rope: Callable[[int], Rope],
) -> ChunkKV:
    """Copy KV to new tensors on the CPU. layers: keys and values (H, T, D) of each, on any device. All copies are
    queued before the device is awaited.
    """
    views = list(layers)
    transfers = transfer_stream(views[0][0].device)
    keys, values = (
        [transfers.staging(view).copy_(view, non_blocking=True) for view in of_layers]
        for of_layers in zip(*views, strict=True)
    )
    transfers.synchronize()
    ropes = [rope(layer) for layer in range(geometry.layers)]
    return ChunkKV(
        token_ids,
        start,
        geometry,
        keys,
        values,
        unrotated_keys=lambda layer: unrotated(keys[layer], start, ropes[layer]),
    )


class ChunkEncoder:
    """Encodes chunks after one prefix, which is computed once. It holds only a weak reference to the model."""

    def __init__(self, decoder: Decoder, prefix_ids: Sequence[int]) -> None:
        self._decoder = weakref.ref(decoder)
        self.start = len(prefix_ids)
        self._cache = FusedCache(decoder.geometry, self.start, ROOM_TOKENS, decoder.device)
        if prefix_ids:
            self._append(prefix_ids)

    @property
    def decoder(self) -> Decoder:
        decoder = self._decoder()
        assert decoder is not None, "used only while the model is loaded"
        return decoder

    def uses(self, decoder: Decoder) -> bool:
        """Whether it uses that decoder, and not one that was freed."""
        return self._decoder() is decoder

    def extend_prefix(self, kv: ChunkKV) -> None:
        """Append the KV of further tokens to the prefix."""
        self._cache.truncate()
        for held, keys, values in zip(self._cache.fused, kv.keys, kv.values, strict=True):
            held.update(keys[None].to(held.device), values[None].to(held.device))
        self.start += len(kv.token_ids)
        self._cache.prompt_tokens = self.start

    def encode(self, token_ids: Sequence[int], cancel: Cancel | None = None) -> ChunkKV:
        """The chunk's KV on the CPU, in new tensors. Raises Cancelled between layers."""
        assert token_ids, "a chunk has at least one token"
        self._cache.truncate()
        self._cache.step = Append(cancel)
        self._append(token_ids)
        stop, geometry = self.start + len(token_ids), self.decoder.geometry
        layers = [self._cache.span(layer, self.start, stop) for layer in range(geometry.layers)]
        return copied_kv(tuple(token_ids), self.start, geometry, layers, self.decoder.rope)

    @torch.inference_mode()
    def _append(self, token_ids: Sequence[int]) -> None:
        decoder = self.decoder
        for ids in torch.tensor(list(token_ids), device=decoder.device).split(BLOCK_ROWS):
            start = self._cache.get_seq_length()
            rows = torch.arange(start, start + ids.numel(), device=decoder.device)
            hidden = decoder.embed(ids)
            block = decoder.row_block(rows, start + ids.numel(), hidden)
            for layer in range(decoder.geometry.layers):
                hidden = decoder.run_layer(layer, hidden, block, self._cache)
