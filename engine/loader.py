"""Loads stored KV into the fused buffers, layer by layer, ahead of the compute (CacheBlend §5.1)."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from ragblend.kvstore.codec import RAW, Codec, Part
from ragblend.kvstore.errors import CorruptBlobError, RemoteError, StoreError
from ragblend.kvstore.memory import HeldChunk

# How much is read at once by all threads, and how much lies in pinned memory before it is copied to the device.
GROUP_BYTES, READ_AHEAD_BYTES = 128 << 20, 384 << 20
# Layers whose copies are queued before the device computes them: of so many bytes, but at least and at most so many.
QUEUED_BYTES, LEAST_QUEUED, MOST_QUEUED = 128 << 20, 2, 6
ALIGN_BYTES = 256  # of each span in `LayerRoom`, for any dtype and wide accesses
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


class ReadGroup:
    """Consecutive layers that are read from files together, into pinned memory.

    row_nbytes: of one layer of all packed files, as they follow each other in `LayerRoom`.
    """

    def __init__(self, layers: range, row_nbytes: int, staging: Callable[[Tensor], Tensor]) -> None:
        self.layers, self.nbytes = layers, row_nbytes * len(layers)
        self._shape, self._staging = (len(layers), row_nbytes), staging
        self._lock, self._memory = threading.Lock(), list[Tensor]()

    def of(self, layer: int) -> Tensor:
        """(bytes,) uint8 of one layer. The first thread that reads allocates all: pinning memory takes a while."""
        with self._lock:
            if not self._memory:
                like = torch.empty(self._shape, dtype=torch.uint8, device="meta")
                self._memory[:] = self._staging(like).unbind()
        return self._memory[layer - self.layers.start]


class StagedLoader(LayerLoader):
    """Loader for an accelerator: threads read files, and the computing thread queues copies and rotations ahead, by
    layer.

    Few large reads, the first ones small, so that the first layer arrives soon: with a read of each layer of each
    chunk, hundreds of calls blocked the interpreter, and so did copies that the reading threads queued.
    """

    def _begin(self) -> None:
        decoder, cache = self._decoder, self._cache
        self._room = LayerRoom(self._spans, decoder.device)
        self._fillers, moved = _fillers(self._spans, self._moved, self._room, cache, decoder)
        self._rotation = _Rotation(moved, decoder) if moved else None
        self._deliveries: list[Any] = []  # of the layers whose copies are queued
        self._sources: list[object] = []  # of queued copies that do not keep them alive
        self._next = 0  # the next layer to wait for
        self._reads = {layer: [] for layer in range(cache.geometry.layers)}
        self._todo, self._reading = deque(self._groups()), deque[ReadGroup]()
        self._transfers.begin()
        self._read_ahead()

    def _groups(self) -> Iterator[ReadGroup]:
        """Groups of 1, 1, 2, 4, ... layers, of at most GROUP_BYTES."""
        layers, nbytes, first = self._cache.geometry.layers, self._room.file_nbytes, 0
        most = max(1, GROUP_BYTES // max(nbytes, 1))
        while first < layers:
            stop = min(first + min(max(first, 1), most), layers)
            yield ReadGroup(range(first, stop), nbytes, self._transfers.staging)
            first = stop

    def _read_ahead(self) -> None:
        """Let threads read the next groups, as far as memory allows."""
        while self._todo:
            group = self._todo[0]
            if self._reading and group.nbytes + sum(each.nbytes for each in self._reading) > READ_AHEAD_BYTES:
                return
            self._reading.append(self._todo.popleft())
            for number, span in enumerate(self._spans):
                at_once = span.source.reads_runs and number in self._room.places
                runs = [group.layers] if at_once else [range(each, each + 1) for each in group.layers]
                for run in runs if not span.source.in_memory else ():
                    self._reads[run.start].append(self._pool.submit(self._read_run, number, span, run, group))

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
        ahead = min(max(QUEUED_BYTES // max(self._room.nbytes, 1), LEAST_QUEUED), MOST_QUEUED)
        while len(self._deliveries) < min(self._next + ahead, self._cache.geometry.layers):
            if not all(read.done() for read in self._reads[len(self._deliveries)]):
                return
            self._queue()

    def _queue(self) -> None:
        """Queue the copies of the next layer."""
        layer, group = len(self._deliveries), self._reading[0]
        fills = [fill for read in self._reads[layer] if (fill := read.result()) is not None]
        for number, span in enumerate(self._spans):
            if span.source.in_memory and number not in self._room.places:
                fills.append(
                    partial(span.source.read_layer, layer, *self._cache.span(layer, span.start, span.stop))
                )
        read = group.of(layer) if group.nbytes else None
        self._deliveries.append(self._transfers.deliver(partial(self._copied, layer, read, fills)))
        self._reads[layer] = []
        if not self._transfers.keeps_reads:
            self._sources.append((read, fills))
        if layer == group.layers[-1]:
            self._reading.popleft()
            self._read_ahead()

    def finish(self) -> None:
        super().finish()
        self._sources.clear()

    def _copied(self, layer: int, read: Tensor | None, fills: Sequence[Fill]) -> None:
        with self._recorder.part("copy", layer, stream="copy"):
            for fill in fills:
                fill()
            self._room.fill(layer, read)
            for filler in self._fillers:
                filler.fill(layer)
            if self._rotation is not None:
                self._rotation.rotate(layer, self._cache.fused[layer].key_buffer[0])

    def _read_run(self, number: int, span: Span, layers: range, group: ReadGroup) -> Fill | None:
        """In a thread: read a chunk's layers into the group's memory; or return what fills its rows on the device."""
        with self._recorder.part("load", layers.start, number):
            try:
                if number not in self._room.places:
                    return self._read_part(span, layers.start)
                packed = [group.of(layer)[self._room.places[number]] for layer in layers]
                span.source.read_packed_layers(layers.start, packed)
            except (CorruptBlobError, RemoteError) as error:
                raise LostChunk(span, error) from error
        return None

    def _read_part(self, span: Span, layer: int) -> Fill:
        """Read a layer of a part of a chunk, which is no run of bytes."""
        keys, values = self._cache.span(layer, span.start, span.stop)
        staging, reader = self._transfers.staging, span.source
        host_keys, host_values = staging(keys), staging(values)
        reader.read_layer(layer, host_keys, host_values)
        held = HeldChunk(reader.token_ids, reader.start, reader.geometry, [host_keys], [host_values])
        return partial(held.read_layer, 0, keys, values)


class LayerRoom:
    """Device memory for one layer of all spans that arrive as packed bytes: those of files first, by one copy.

    places: by span number, its bytes in the room.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.places: dict[int, slice] = {}
        self.file_nbytes = self.nbytes = 0
        packed = [(n, span) for n, span in enumerate(spans) if not isinstance(span.source, Part | HeldChunk)]
        for number, span in sorted(packed, key=lambda each: each[1].source.in_memory):
            nbytes = span.source.codec.layer_nbytes(span.source.geometry, span.length)
            self.places[number] = slice(self.nbytes, self.nbytes + nbytes)
            self.nbytes += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
            if not span.source.in_memory:
                self.file_nbytes = self.nbytes
        self.bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._in_memory = [(span.source, self.of(n)) for n, span in packed if span.source.in_memory]

    def of(self, number: int) -> Tensor:
        return self.bytes[self.places[number]]

    def fill(self, layer: int, read: Tensor | None) -> None:
        """Copy a layer of all spans: what was read from files, and what lies in memory."""
        if read is not None:
            self.bytes[: self.file_nbytes].copy_(read, non_blocking=True)
        for source, packed in self._in_memory:
            source.read_packed(layer, packed)


class _Unpacked:
    """Unpacks spans from the room into their rows of a layer."""

    def __init__(self, spans: Mapping[int, Span], room: LayerRoom, cache: FusedCache) -> None:
        self._cache = cache
        self._packed = [(span, room.of(number)) for number, span in spans.items()]

    def fill(self, layer: int) -> None:
        for span, packed in self._packed:
            keys, values = self._cache.span(layer, span.start, span.stop)
            span.source.codec.unpack(packed, span.source.geometry, keys, values)


class _RawRows:
    """Copies raw spans, keys and values of one size, from the room to their rows at once: a call for each span would
    take the host too long.
    """

    def __init__(self, spans: Mapping[int, Span], room: LayerRoom, cache: FusedCache) -> None:
        self._cache, g = cache, cache.geometry
        shape = (2, g.kv_heads, -1, g.key_size)
        self._parts = [room.of(number).view(g.torch_dtype).view(shape) for number in spans]
        self._joined = torch.cat(self._parts, dim=2)
        rows = [torch.arange(span.start, span.stop) for span in spans.values()]
        self._rows = torch.cat(rows).to(room.bytes.device)

    def fill(self, layer: int) -> None:
        held = self._cache.fused[layer]
        keys, values = torch.cat(self._parts, dim=2, out=self._joined)
        held.key_buffer[0].index_copy_(1, self._rows, keys)
        held.value_buffer[0].index_copy_(1, self._rows, values)


class _RowsByKernel:
    """Moves spans of one codec from the room to their rows in one launch (`kernels/placement.py`), with rotated keys.

    by: by span number, how far its keys are rotated, in tokens.
    """

    def __init__(
        self,
        spans: Mapping[int, Span],
        room: LayerRoom,
        cache: FusedCache,
        decoder: Decoder,
        by: Mapping[int, int | Tensor],
    ) -> None:
        from ragblend.engine.kernels.placement import RowTable

        rows = list[tuple[int, int, Tensor]]()
        deltas = [torch.zeros(1)]  # one at least: without angles another kernel would be compiled
        for number, span in spans.items():
            delta, known = torch.as_tensor(by.get(number, ())).float().flatten(), sum(map(len, deltas))
            turns = known + torch.arange(len(delta)) if len(delta) else torch.tensor([-1])
            rows.append((room.places[number].start, span.start, turns.expand(span.length)))
            deltas.append(delta)
        (codec,) = {span.source.codec.name for span in spans.values()}
        self._cache, self._decoder, turned = cache, decoder, torch.cat(deltas).to(decoder.device)
        self._table = RowTable(room.bytes, rows, cache.geometry, codec)
        self._angles = {kind: angles(turned, inv_freq) for kind, inv_freq in decoder.ropes.items()}

    def fill(self, layer: int) -> None:
        held, by = self._cache.fused[layer], self._angles[self._decoder.layer_types[layer]]
        self._table.place(held.key_buffer[0], held.value_buffer[0], self._decoder.rope(layer), by)


Moved = Sequence[tuple[Span, int | Tensor]]


def _fillers(
    spans: Sequence[Span], moved: Moved, room: LayerRoom, cache: FusedCache, decoder: Decoder
) -> tuple[list[Any], Moved]:
    """What fills a layer's rows from the room; and the spans whose keys must be rotated afterwards."""
    g, found = cache.geometry, list[Any]()
    by_codec: dict[Codec, dict[int, Span]] = {}
    for number in room.places:
        by_codec.setdefault(spans[number].source.codec, {})[number] = spans[number]
    by = {span.start: delta for span, delta in moved}
    for codec, some in by_codec.items():
        if decoder.has_kernels("placement", codec.name):
            turned = {number: by.pop(span.start) for number, span in some.items() if span.start in by}
            found.append(_RowsByKernel(some, room, cache, decoder, turned))
        elif codec is RAW and g.key_size == g.value_size:
            found.append(_RawRows(some, room, cache))
        else:
            found.append(_Unpacked(some, room, cache))
    return found, [(span, delta) for span, delta in moved if span.start in by]


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
