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

    On the CPU the reads go straight into the fused buffers, and the computing thread moves the keys when it needs them:
    both cores compute, so a thread that moved them beside it would only take its place. Elsewhere each read is copied
    and moved beside the compute, as soon as it has landed.
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
        lane.begin()
        for layer in range(cache.geometry.layers):
            self._reads[layer] = [pool.submit(self._read, span, layer) for span in self._spans]

    def wait(self, layer: int) -> None:
        """Return when that layer's stored KV stands in the buffers, moved. Raises LostChunk if it is damaged."""
        if layer in self._done:
            return
        self._done.add(layer)
        begun = time.perf_counter()
        landed = [read.result() for read in self._reads[layer]]
        self.stall_ms += (time.perf_counter() - begun) * 1e3
        for load_ms, ticket in landed:
            self.load_ms += load_ms
            self._lane.arrive(ticket)
        if not self._lane.staged:
            begun = time.perf_counter()
            for span in self._spans:
                self._move(span, layer)
            self.move_ms += (time.perf_counter() - begun) * 1e3

    def finish(self) -> None:
        """Stop what has not begun and wait for what has: after this nobody writes to the buffers."""
        reads = [read for layer in self._reads.values() for read in layer]
        for read in reads:
            read.cancel()
        for read in reads:
            if not read.cancelled():
                read.exception()
        self._lane.finish()

    def _read(self, span: Span, layer: int) -> tuple[float, Any]:
        """In a loader's thread: one chunk's layer, and the ticket of its delivery."""
        assert span.reader is not None
        begun = time.perf_counter()
        keys, values = self._cache.span(layer, span.start, span.stop)
        host_keys, host_values = self._landed(span, layer, keys, values)
        load_ms = (time.perf_counter() - begun) * 1e3
        if not self._lane.staged:
            return load_ms, None

        def copies() -> None:
            keys.copy_(host_keys, non_blocking=True)
            values.copy_(host_values, non_blocking=True)
            self._move(span, layer)

        return load_ms, self._lane.deliver(copies)

    def _landed(self, span: Span, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The layer in memory from which the lane delivers: where it lies already, or staging that was read into."""
        assert span.reader is not None
        held = span.reader.layer(layer) if self._lane.staged else None
        if held is not None:
            return held
        host_keys, host_values = self._lane.staging(keys), self._lane.staging(values)
        try:
            span.reader.read_layer(layer, host_keys, host_values)
        except CorruptBlobError as damage:
            raise LostChunk(span) from damage
        return host_keys, host_values

    def _move(self, span: Span, layer: int) -> None:
        if self._moves_keys:
            keys, _ = self._cache.span(layer, span.start, span.stop)
            move_keys_(keys, span.delta, self._decoder.rope(layer))
