"""The layer loader: stored KV into the fused buffers, layer by layer, ahead of the compute (CacheBlend §5.1)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import TransferStream
from ragblend.engine.plan import Span
from ragblend.engine.rope import move_keys_
from ragblend.engine.trace import Recorder
from ragblend.kvstore.codec import RAW
from ragblend.kvstore.errors import CorruptBlobError, RemoteError, StoreError
from ragblend.kvstore.memory import HeldChunk


class LostChunk(Exception):
    """A stored chunk could not be read, damaged or not there in time: the request starts again without it."""

    def __init__(self, span: Span, why: StoreError) -> None:
        super().__init__(f"the stored KV of tokens {span.start}..{span.stop} is lost: {why}")
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
        transfers: TransferStream,
        pool: ThreadPoolExecutor,
        recorder: Recorder,
        moves_keys: bool = True,
    ) -> None:
        self._spans = list(spans)
        self._cache, self._decoder, self._transfers = cache, decoder, transfers
        self._recorder, self._moves_keys = recorder, moves_keys
        self._reads: dict[int, list[Future[Any]]] = {}
        self._done: set[int] = set()
        transfers.begin()
        for layer in range(cache.geometry.layers):
            for span in self._spans:
                assert span.reader is not None
                span.reader.expect(layer)
            self._reads[layer] = [
                pool.submit(self._read, number, span, layer) for number, span in enumerate(self._spans)
            ]

    def wait(self, layer: int) -> None:
        """Return when that layer's stored KV stands in the buffers, moved. Raises LostChunk if it cannot be read."""
        if layer in self._done:
            return
        self._done.add(layer)
        with self._recorder.part("stall", layer, stream="device"):
            for ticket in [read.result() for read in self._reads[layer]]:
                self._transfers.arrive(ticket)
        if not self._transfers.staged:
            with self._recorder.part("move", layer):
                for span in self._spans:
                    self._move(span, layer)

    def pace(self) -> None:
        """Between two layers: the device is not left far behind."""
        self._transfers.pace()

    def finish(self) -> None:
        """Stop what has not begun and wait for what has: after this nobody writes to the buffers."""
        reads = [read for layer in self._reads.values() for read in layer]
        for read in reads:
            read.cancel()
        for read in reads:
            if not read.cancelled():
                read.exception()
        self._transfers.finish()
        self._reads.clear()  # an error among them holds this, and with it all of the cache

    def _read(self, number: int, span: Span, layer: int) -> Any:
        """In a loader's thread: one chunk's layer; the ticket of its delivery."""
        with self._recorder.part("load", layer, number):
            keys, values = self._cache.span(layer, span.start, span.stop)
            fill = self._fetched(span, layer, keys, values)
        if not self._transfers.staged:
            return None

        def copies() -> None:
            with self._recorder.part("copy", layer, number, "copy"):
                fill()
                self._move(span, layer)

        return self._transfers.deliver(copies)

    def _fetched(self, span: Span, layer: int, keys: Tensor, values: Tensor) -> Callable[[], object]:
        """Have the layer in memory; what then fills keys and values with it, where the transfer stream says."""
        reader, staging = span.reader, self._transfers.staging
        assert reader is not None
        try:
            if not self._transfers.staged:
                reader.read_layer(layer, keys, values)
                return lambda: None
            if reader.in_memory:
                return partial(reader.read_layer, layer, keys, values)
            if reader.codec is RAW:
                host_keys, host_values = staging(keys), staging(values)
                reader.read_layer(layer, host_keys, host_values)
                held = HeldChunk(reader.token_ids, reader.start, reader.geometry, [host_keys], [host_values])
                return partial(held.read_layer, 0, keys, values)
            # Half the bytes cross to the device, and are unpacked there.
            nbytes = reader.codec.layer_nbytes(reader.geometry, span.length)
            packed = staging(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
            reader.read_packed(layer, packed)
            unpack, geometry = reader.codec.unpack, reader.geometry
            return lambda: unpack(packed.to(keys.device, non_blocking=True), geometry, keys, values)
        except (CorruptBlobError, RemoteError) as error:
            raise LostChunk(span, error) from error

    def _move(self, span: Span, layer: int) -> None:
        if self._moves_keys:
            keys, _ = self._cache.span(layer, span.start, span.stop)
            move_keys_(keys, span.delta, self._decoder.rope(layer))
