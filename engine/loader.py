"""Loads stored KV into the fused buffers, layer by layer, ahead of the compute (CacheBlend §5.1)."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.model.decoder import Decoder
from ragblend.engine.model.device import TransferStream
from ragblend.engine.model.rope import UNROTATED, angles, rotate_
from ragblend.engine.plan import Span
from ragblend.engine.trace import Recorder
from ragblend.kvstore.codec import RAW, Part, Source
from ragblend.kvstore.errors import CorruptBlobError, RemoteError, StoreError
from ragblend.kvstore.memory import HeldChunk

# How many layers are read ahead into pinned memory, before they are copied to the device.
READ_AHEAD = 4
QUEUED_AHEAD = 2  # layers whose copies are queued before the device computes them
Fill = Callable[[], object]  # fills a chunk's rows in one layer


class LostChunk(Exception):
    """A stored chunk is damaged or late: the request starts again without it."""

    def __init__(self, span: Span, why: StoreError) -> None:
        super().__init__(f"the stored KV of tokens {span.start}..{span.stop} is lost: {why}")
        self.span = span


class LayerLoader:
    """Reads the layers of all spans in threads, in order of use; the computing thread calls `wait(layer)`.

    On the CPU, reads go directly into the fused buffers, and the computing thread rotates the keys when it needs them:
    rotating in other threads would only take its cores.
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
        self._pool, self._recorder = pool, recorder
        rotations = [span.rotation(moves_keys) for span in self._spans]
        self._moved = [
            (span, by) for span, by in zip(self._spans, rotations, strict=True) if _is_rotation(by)
        ]
        self._angles: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._reads: dict[int, list[Future[Any]]] = {}
        self._done: set[int] = set()
        for layer in range(cache.geometry.layers):
            for span in self._spans:
                span.source.expect(layer)
        self._begin()

    def _begin(self) -> None:
        for layer in range(self._cache.geometry.layers):
            self._submit(layer, enumerate(self._spans))

    def _submit(self, layer: int, numbered: Iterable[tuple[int, Span]]) -> None:
        self._reads[layer] = [self._pool.submit(self._read, *each, layer) for each in numbered]

    def wait(self, layer: int) -> None:
        """Wait until that layer's stored KV is in the buffers, rotated. Raises LostChunk if it cannot be read."""
        if layer in self._done:
            return
        self._done.add(layer)
        with self._recorder.part("stall", layer):
            for read in self._reads[layer]:
                read.result()
        with self._recorder.part("move", layer):
            for span, by in self._moved:
                keys, _ = self._cache.span(layer, span.start, span.stop)
                rotate_(keys, *self._angles_of(span, by, layer), self._decoder.rope(layer))

    def _angles_of(self, span: Span, by: int | Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin of that rotation in layers of that type, (T, R/2) or (R/2,)."""
        kind = self._decoder.layer_types[layer]
        if (span.start, kind) not in self._angles:
            self._angles[span.start, kind] = angles(by, self._decoder.ropes[kind])
        return self._angles[span.start, kind]

    def pace(self) -> None:
        """Called between two layers: keeps the host from running far ahead of the device."""
        self._transfers.pace()

    def finish(self) -> None:
        """Cancel pending reads and wait for running ones; afterwards nothing writes to the buffers."""
        reads = [read for layer in self._reads.values() for read in layer]
        for read in reads:
            read.cancel()
        for read in reads:
            if not read.cancelled():
                read.exception()
        self._transfers.finish()
        self._reads.clear()  # an error would keep a reference to this loader, and so to the whole cache

    def _read(self, number: int, span: Span, layer: int) -> Any:
        """In a thread: read one chunk's layer."""
        with self._recorder.part("load", layer, number):
            keys, values = self._cache.span(layer, span.start, span.stop)
            try:
                span.source.read_layer(layer, keys, values)
            except (CorruptBlobError, RemoteError) as error:
                raise LostChunk(span, error) from error


class StagedLoader(LayerLoader):
    """Loader for an accelerator: threads read files, and the computing thread queues copies and rotations ahead, by
    layer.

    When the reading threads queued them, each of hundreds of calls blocked the interpreter.
    """

    def _begin(self) -> None:
        self._from_files = [each for each in enumerate(self._spans) if not each[1].source.in_memory]
        self._placement = _RawPlacement(self._spans, self._cache, self._decoder.device)
        self._rotation = _Rotation(self._moved, self._decoder) if self._moved else None
        self._deliveries: list[Any] = []  # of the layers whose copies are queued
        self._fills: list[Fill] = []
        self._next = 0  # the next layer to wait for
        self._transfers.begin()
        for layer in range(min(READ_AHEAD, self._cache.geometry.layers)):
            self._submit(layer, self._from_files)

    def wait(self, layer: int) -> None:
        if layer in self._done:
            return
        self._done.add(layer)
        self._next = layer + 1
        with self._recorder.part("stall", layer, stream="device"):
            while len(self._deliveries) <= layer:
                self._queue()
            self._transfers.arrive(self._deliveries[layer])

    def pace(self) -> None:
        super().pace()
        while len(self._deliveries) < min(self._next + QUEUED_AHEAD, self._cache.geometry.layers):
            if not all(read.done() for read in self._reads[len(self._deliveries)]):
                return
            self._queue()

    def _queue(self) -> None:
        """Queue the copies of the next layer."""
        layer = len(self._deliveries)
        reads = iter([read.result() for read in self._reads[layer]])
        fills = [
            self._filled(number, span, layer) if span.source.in_memory else next(reads)
            for number, span in enumerate(self._spans)
        ]
        self._deliveries.append(self._transfers.deliver(partial(self._copied, layer, fills)))
        self._reads[layer] = []
        if not self._transfers.keeps_reads:
            self._fills += fills
        if layer + READ_AHEAD < self._cache.geometry.layers:
            self._submit(layer + READ_AHEAD, self._from_files)

    def finish(self) -> None:
        super().finish()
        self._fills.clear()

    def _copied(self, layer: int, fills: Sequence[Fill]) -> None:
        with self._recorder.part("copy", layer, stream="copy"):
            for fill in fills:
                fill()
            self._placement.place(layer)
            if self._rotation is not None:
                self._rotation.rotate(layer, self._cache.fused[layer].key_buffer[0])

    def _filled(self, number: int, span: Span, layer: int) -> Fill:
        if number in self._placement.rooms:
            return partial(span.source.read_packed, layer, self._placement.rooms[number])
        keys, values = self._cache.span(layer, span.start, span.stop)
        return partial(span.source.read_layer, layer, keys, values)

    def _read(self, number: int, span: Span, layer: int) -> Fill:
        """In a thread: read one chunk's layer into memory; returns a function that fills its rows on the device."""
        reader, staging = span.source, self._transfers.staging
        keys, values = self._cache.span(layer, span.start, span.stop)
        with self._recorder.part("load", layer, number):
            try:
                if isinstance(reader, Part):
                    host_keys, host_values = staging(keys), staging(values)
                    reader.read_layer(layer, host_keys, host_values)
                    held = HeldChunk(
                        reader.token_ids, reader.start, reader.geometry, [host_keys], [host_values]
                    )
                    return partial(held.read_layer, 0, keys, values)
                # Packed: half the bytes are copied to the device, and unpacked there.
                nbytes = reader.codec.layer_nbytes(reader.geometry, span.length)
                packed = staging(torch.empty(nbytes, dtype=torch.uint8, device="meta"))
                reader.read_packed(layer, packed)
            except (CorruptBlobError, RemoteError) as error:
                raise LostChunk(span, error) from error
        if number in self._placement.rooms:
            return partial(self._placement.rooms[number].copy_, packed, non_blocking=True)
        unpack, geometry = reader.codec.unpack, reader.geometry
        return lambda: unpack(packed.to(keys.device, non_blocking=True), geometry, keys, values)


class _RawPlacement:
    """Copies one layer of all raw (unpacked) spans at once: one call for each would take the host too long.

    rooms: by span number, the buffer that its layer was read into, (bytes,) uint8.
    """

    def __init__(self, spans: Sequence[Span], cache: FusedCache, device: torch.device) -> None:
        g, self._cache = cache.geometry, cache
        numbered = enumerate(spans if g.key_size == g.value_size else ())
        found = {number: span for number, span in numbered if _is_raw(span.source)}
        self._parts = [
            torch.empty(2, g.kv_heads, span.length, g.key_size, dtype=g.torch_dtype, device=device)
            for span in found.values()
        ]
        self.rooms = {
            number: part.flatten().view(torch.uint8) for number, part in zip(found, self._parts, strict=True)
        }
        if found:
            self._joined = torch.cat(self._parts, dim=2)
            places = [torch.arange(span.start, span.stop) for span in found.values()]
            self._places = torch.cat(places).to(device)

    def place(self, layer: int) -> None:
        """Copy these buffers into that layer's KV."""
        if self.rooms:
            held = self._cache.fused[layer]
            keys, values = torch.cat(self._parts, dim=2, out=self._joined)
            held.key_buffer[0].index_copy_(1, self._places, keys)
            held.value_buffer[0].index_copy_(1, self._places, values)


class _Rotation:
    """Rotates the keys of several spans at once: a call for each span would take as long as its copy."""

    def __init__(self, moved: Sequence[tuple[Span, int | Tensor]], decoder: Decoder) -> None:
        self._decoder = decoder
        places = torch.cat([torch.arange(span.start, span.stop) for span, _ in moved])
        deltas = torch.cat([torch.as_tensor(by).float().expand(span.length) for span, by in moved])
        self._rows, deltas = places.to(decoder.device), deltas.to(decoder.device)
        self._angles = {kind: angles(deltas, inv_freq) for kind, inv_freq in decoder.ropes.items()}

    def rotate(self, layer: int, keys: Tensor) -> None:
        """Rotate these rows of a layer's buffer (H, capacity, D)."""
        rope = self._decoder.rope(layer)
        if rope.layout != UNROTATED:
            moved = keys.index_select(1, self._rows)
            rotate_(moved, *self._angles[self._decoder.layer_types[layer]], rope)
            keys.index_copy_(1, self._rows, moved)


def _is_rotation(by: int | Tensor) -> bool:
    return isinstance(by, Tensor) or by != 0


def loader_of(transfers: TransferStream) -> type[LayerLoader]:
    """The loader for that device."""
    return StagedLoader if transfers.staged else LayerLoader


def _is_raw(reader: Source) -> bool:
    """Whether its keys and values are stored raw, one after the other."""
    return reader.codec is RAW and not isinstance(reader, Part | HeldChunk)
