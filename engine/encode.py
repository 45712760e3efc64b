"""Encodes a chunk: computes its KV alone, after the encoding prefix.

Without a prefix, a chunk's first token would become an attention sink, and its KV would be of little use elsewhere.
With the prefix that prompts begin with, the first chunk of a prompt is exact.
"""

import weakref
from collections.abc import Sequence

import torch

from ragblend.engine.cache import Append, FusedCache
from ragblend.engine.model.decoder import BLOCK_ROWS, Decoder
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.chunks import ChunkKV

ROOM_TOKENS = 1024  # for a chunk; the cache grows for a longer one


class ChunkEncoder:
    """Encodes chunks after one prefix, which is computed once. It does not keep the model from being freed."""

    def __init__(self, decoder: Decoder, prefix_ids: Sequence[int]) -> None:
        self._decoder = weakref.ref(decoder)
        self.start = len(prefix_ids)
        self._cache = FusedCache(decoder.geometry, self.start, ROOM_TOKENS, decoder.device)
        if prefix_ids:
            self._append(prefix_ids)

    @property
    def decoder(self) -> Decoder:
        decoder = self._decoder()
        assert decoder is not None, "only asked for while the model is loaded"
        return decoder

    def is_of(self, decoder: Decoder) -> bool:
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
        return ChunkKV(
            token_ids=tuple(token_ids),
            start=self.start,
            geometry=geometry,
            keys=[keys.to("cpu", copy=True).contiguous() for keys, _ in layers],
            values=[values.to("cpu", copy=True).contiguous() for _, values in layers],
        )

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
