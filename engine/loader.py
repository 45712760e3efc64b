"""The layer loader: stored KV into the fused buffers, layer by layer, ahead of the compute (CacheBlend §5.1)."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import Lane
from ragblend.engine.plan import Span
from ragblend.engine.rope import move_keys_
from ragblend.kvstore.errors import CorruptBlobError


class LostChunk(Exception):
    """A stored chunk turned out to be damaged while it was read: the request starts again without it."""

    def __init__(self, span: Span) -> None:
        super().__init__(f"the stored KV of tokens {span.start}..{span.stop} is damaged")
        self.span = span


class LayerLoader:
    """Reads every span's layers in the order of use, in threads; `wait(layer)` is called by the compute.

    On the CPU the reads go straight into the fused buffers and the waiting thread moves the keys; elsewhere they go
    through the lane's staging memory, and copies and moves run beside the compute.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        cache: FusedCache,
        decoder: Decoder,
        lane: Lane,
        pool: ThreadPoolExecutor,
        moves_keys: bool = True,
    ) -> None:
        self._spans = list(spans)
        self._cache, self._decoder, self._lane = cache, decoder, lane
        self._moves_keys = moves_keys
        self._reads: dict[int, list[Future[Any]]] = {}
        self._done: set[int] = set()
        self.load_ms = self.stall_ms = self.move_ms = 0.0
        for layer in range(cache.geometry.layers):
            self._reads[layer] = [pool.submit(self._read, span, layer) for span in self._spans]

    def wait(self, layer: int) -> None:
        """Return when that layer's stored KV stands in the buffers, moved. Raises LostChunk if it is damaged."""
        if layer in self._done or layer not in self._reads:
            return
        self._done.add(layer)
        begun = time.perf_counter()
        pieces = [read.result() for read in self._reads[layer]]
        landed = time.perf_counter()
        self.stall_ms += (landed - begun) * 1e3
        self.load_ms += sum(piece[2] for piece in pieces)
        self._lane.arrive(self._lane.deliver(lambda: self._place(layer, pieces)))
        self.move_ms += (time.perf_counter() - landed) * 1e3

    def finish(self) -> None:
        """Stop what has not begun and wait for what has: after this nobody writes to the buffers."""
        reads = [read for layer in self._reads.values() for read in layer]
        for read in reads:
            read.cancel()
        for read in reads:
            if not read.cancelled():
                read.exception()

    def _read(self, span: Span, layer: int) -> tuple[Tensor, Tensor, float]:
        assert span.reader is not None
        begun = time.perf_counter()
        keys, values = self._cache.span(layer, span.start, span.stop)
        host_keys, host_values = self._lane.staging(keys), self._lane.staging(values)
        try:
            span.reader.read_layer(layer, host_keys, host_values)
        except CorruptBlobError as damage:
            raise LostChunk(span) from damage
        return host_keys, host_values, (time.perf_counter() - begun) * 1e3

    def _place(self, layer: int, pieces: list[tuple[Tensor, Tensor, float]]) -> None:
        rope = self._decoder.rope(layer)
        for span, (host_keys, host_values, _) in zip(self._spans, pieces, strict=True):
            keys, values = self._cache.span(layer, span.start, span.stop)
            if self._lane.staged:
                keys.copy_(host_keys, non_blocking=True)
                values.copy_(host_values, non_blocking=True)
            if self._moves_keys:
                move_keys_(keys, span.delta, rope)
