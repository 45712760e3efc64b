"""A chunk's KV: the chunk read alone, behind the encoding prefix.

Behind nothing a chunk's first token becomes its own attention sink, and its KV is of little use elsewhere; behind the
prefix that it will follow, the first chunk of a prompt is exact (design: encoding prefix).
"""

import weakref
from collections.abc import Callable, Sequence

import torch

from ragblend.engine.cache import Append, FusedCache
from ragblend.engine.model.decoder import BLOCK_ROWS, Decoder
from ragblend.kvstore.chunks import ChunkKV


class ChunkEncoder:
    """Encodes chunks behind one prefix, which is read once, while somebody else holds the model."""

    def __init__(self, decoder: Decoder, prefix_ids: Sequence[int], room_tokens: int = 1024) -> None:
        self._decoder = weakref.ref(decoder)
        self.start = len(prefix_ids)
        self._cache = FusedCache(decoder.geometry, self.start, room_tokens, decoder.device)
        if prefix_ids:
            self._append(prefix_ids)

    @property
    def decoder(self) -> Decoder:
        """The model's, which who only waits for a turn does not keep from being freed; see `is_of`."""
        decoder = self._decoder()
        assert decoder is not None, "only asked for while the model is there"
        return decoder

    def is_of(self, decoder: Decoder) -> bool:
        """Whether it is that one, and not one that is gone."""
        return self._decoder() is decoder

    def go_on(self, read: ChunkKV) -> None:
        """Have that KV, of what stands right behind what was read so far, before all that is encoded from now on."""
        self._cache.truncate()
        for held, keys, values in zip(self._cache.fused, read.keys, read.values, strict=True):
            held.update(keys[None].to(held.device), values[None].to(held.device))
        self.start += len(read.token_ids)
        self._cache.prompt_tokens = self.start

    def encode(self, token_ids: Sequence[int], leave: Callable[[], bool] | None = None) -> ChunkKV:
        """The chunk's KV on the CPU, in tensors of its own. Raises Cancelled if leave() says so before a layer."""
        assert token_ids, "a chunk has at least one token"
        self._cache.truncate()
        self._cache.step = Append(leave)
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
