"""Loads stored KV into the fused buffers, layer by layer, ahead of the compute (CacheBlend §5.1)."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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

GROUP_BYTES = 128 << 20  # at most, of a `ReadGroup`
READ_AHEAD_BYTES = 384 << 20  # of pinned memory that waits to be copied to the device
# Copies are queued for as many layers ahead of the device as these bytes hold, but at least and at most so many.
QUEUED_BYTES, MIN_QUEUED, MAX_QUEUED = 128 << 20, 2, 6
ALIGN_BYTES = 256  # of each span's bytes in `PackedLayer`: kernels read them as any dtype, many bytes at once
Fill = Callable[[], object]  # fills a chunk's rows in one layer
# Spans whose keys must be rotated, each with its `Span.rotation`.
Rotations = Sequence[tuple[Span, int | Tensor]]


class LostChunk(Exception):
    """A stored chunk is damaged, or did not arrive in time: the prefill starts again without its KV."""

    def __init__(self, span: Span, why: StoreError) -> None:
        super().__init__(f"the stored KV of tokens {span.start}..{span.stop} is lost: {why}")
        self.span = span


class LayerLoader:
    """Loader for the CPU, and base of `StagedLoader`: threads read the layers of all spans in order of use, and the
    thread that computes calls `wait(layer)` before each.

    Reads go directly into the fused buffers, and the computing thread rotates the keys when it needs them: rotating in
    other threads would only take its cores. moves_keys: as in `Span.rotation`.
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
        rotations = [(span, span.rotation(moves_keys)) for span in self._spans]
        self._rotations = [
            (span, delta) for span, delta in rotations if isinstance(delta, Tensor) or delta != 0
        ]
        self._angles: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
        self._reads: dict[int, list[Future[Any]]] = {}  # by layer
        self._waited_for: set[int] = set()  # layers that were waited for
        for layer in range(cache.geometry.layers):
            for span in self._spans:
                span.source.expect(layer)
        self._begin()

    def _begin(self) -> None:
        """Queue all reads."""
        for layer in range(self._cache.geometry.layers):
            self._reads[layer] = [
                self._pool.submit(self._read, number, span, layer) for number, span in enumerate(self._spans)
            ]

    def wait(self, layer: int) -> None:
        """Wait until that layer's stored KV is in the buffers, rotated. Raises LostChunk if it cannot be read."""
        if layer in self._waited_for:
            return
        self._waited_for.add(layer)
        with self._recorder.part("stall", layer):
            for read in self._reads[layer]:
                read.result()
        with self._recorder.part("move", layer):
            for span, delta in self._rotations:
                keys, _ = self._cache.span(layer, span.start, span.stop)
                rotate_(keys, *self._angles_of(span, delta, layer), self._decoder.rope(layer))

    def _angles_of(self, span: Span, delta: int | Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin of a span's rotation in this layer, (T, R/2) or (R/2,) with R rotated dimensions; computed once
        for all layers of one type.
        """
        kind = self._decoder.layer_types[layer]
        if (span.start, kind) not in self._angles:
            self._angles[span.start, kind] = angles(delta, self._decoder.ropes[kind])
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
        """In a thread: read one layer of a span. number: the span's, for the trace."""
        with self._recorder.part("load", layer, number):
            keys, values = self._cache.span(layer, span.start, span.stop)
            try:
                span.source.read_layer(layer, keys, values)
            except (CorruptBlobError, RemoteError) as error:
                raise LostChunk(span, error) from error


class ReadGroup:
    """Consecutive layers that are read from files together, into pinned memory.

    layer_nbytes: size of one layer of all spans in files, in the order of `PackedLayer`.
    """

    def __init__(self, layers: range, layer_nbytes: int, staging: Callable[[Tensor], Tensor]) -> None:
        self.layers, self.nbytes = layers, layer_nbytes * len(layers)
        self._shape, self._staging = (len(layers), layer_nbytes), staging
        self._lock, self._memory = threading.Lock(), list[Tensor]()

    def memory_of(self, layer: int) -> Tensor:
        """(bytes,) uint8: the memory of one layer. Allocated for the group by the first thread that reads, because
        pinning takes long.
        """
        with self._lock:
            if not self._memory:
                like = torch.empty(self._shape, dtype=torch.uint8, device="meta")
                self._memory[:] = self._staging(like).unbind()
        return self._memory[layer - self.layers.start]


class StagedLoader(LayerLoader):
    """Loader for an accelerator: threads read files into pinned memory, and the computing thread queues copies to the
    device and rotations there, some layers ahead.

    Few large reads, the first ones small, so that the first layer arrives soon. One read for each layer of each chunk
    was slower: hundreds of calls blocked the interpreter, and so did copies that the reading threads queued.
    """

    def _begin(self) -> None:
        decoder, cache = self._decoder, self._cache
        self._packed_layer = PackedLayer(self._spans, decoder.device)
        self._fillers, remaining = _fillers(self._spans, self._rotations, self._packed_layer, cache, decoder)
        self._rotation = _Rotation(remaining, decoder) if remaining else None
        self._tickets: list[Any] = []  # one for each layer whose copies are queued
        # Host memory that queued copies read, on devices where they hold no reference to it.
        self._kept_alive: list[object] = []
        self._next_layer = 0  # the layer after the last one that was waited for
        # A read of several layers is listed under the first.
        self._reads = {layer: [] for layer in range(cache.geometry.layers)}
        self._unread_groups, self._reading_groups = deque(self._groups()), deque[ReadGroup]()
        self._transfers.begin()
        self._read_ahead()

    def _groups(self) -> Iterator[ReadGroup]:
        """All layers in groups of 1, 1, 2, 4, ..., each of at most GROUP_BYTES (or one layer)."""
        layers, nbytes, first = self._cache.geometry.layers, self._packed_layer.file_nbytes, 0
        most = max(1, GROUP_BYTES // max(nbytes, 1))
        while first < layers:
            stop = min(first + min(max(first, 1), most), layers)
            yield ReadGroup(range(first, stop), nbytes, self._transfers.staging)
            first = stop

    def _read_ahead(self) -> None:
        """Queue the reads of the next groups, up to READ_AHEAD_BYTES."""
        while self._unread_groups:
            group = self._unread_groups[0]
            reading_nbytes = sum(each.nbytes for each in self._reading_groups)
            if self._reading_groups and reading_nbytes + group.nbytes > READ_AHEAD_BYTES:
                return
            self._reading_groups.append(self._unread_groups.popleft())
            for number, span in enumerate(self._spans):
                if span.source.in_memory:
                    continue
                is_one_read = span.source.reads_runs and number in self._packed_layer.slices
                runs = [group.layers] if is_one_read else [range(each, each + 1) for each in group.layers]
                for run in runs:
                    self._reads[run.start].append(self._pool.submit(self._read_run, number, span, run, group))

    def wait(self, layer: int) -> None:
        if layer in self._waited_for:
            return
        self._waited_for.add(layer)
        self._next_layer = layer + 1
        with self._recorder.part("stall", layer, stream="device"):
            while len(self._tickets) <= layer:
                self._queue_copies()
            self._transfers.wait_for(self._tickets[layer])

    def pace(self) -> None:
        super().pace()
        ahead = min(max(QUEUED_BYTES // max(self._packed_layer.nbytes, 1), MIN_QUEUED), MAX_QUEUED)
        while len(self._tickets) < min(self._next_layer + ahead, self._cache.geometry.layers):
            if not all(read.done() for read in self._reads[len(self._tickets)]):
                return
            self._queue_copies()

    def _queue_copies(self) -> None:
        """Queue the copies of the next layer, once its reads have ended."""
        layer, group = len(self._tickets), self._reading_groups[0]
        fills = [fill for read in self._reads[layer] if (fill := read.result()) is not None]
        for number, span in enumerate(self._spans):
            if span.source.in_memory and number not in self._packed_layer.slices:
                fills.append(
                    partial(span.source.read_layer, layer, *self._cache.span(layer, span.start, span.stop))
                )
        read = group.memory_of(layer) if group.nbytes else None
        self._tickets.append(self._transfers.deliver(partial(self._copy_layer, layer, read, fills)))
        self._reads[layer] = []
        if not self._transfers.keeps_sources:
            self._kept_alive.append((read, fills))
        if layer == group.layers[-1]:
            self._reading_groups.popleft()
            self._read_ahead()

    def finish(self) -> None:
        super().finish()
        self._kept_alive.clear()

    def _copy_layer(self, layer: int, read: Tensor | None, fills: Sequence[Fill]) -> None:
        """Fill a layer's rows in the fused buffers. read: the bytes from files; fills: of spans that are not packed."""
        with self._recorder.part("copy", layer, stream="copy"):
            for fill in fills:
                fill()
            self._packed_layer.fill(layer, read)
            for filler in self._fillers:
                filler.fill(layer)
            if self._rotation is not None:
                self._rotation.rotate(layer, self._cache.fused[layer].key_buffer[0])

    def _read_run(self, number: int, span: Span, layers: range, group: ReadGroup) -> Fill | None:
        """In a thread: read a span's layers into the group's memory. Of a span that is not packed, read one layer, and
        return what copies it to its rows.
        """
        with self._recorder.part("load", layers.start, number):
            try:
                if number not in self._packed_layer.slices:
                    return self._read_part(span, layers.start)
                packed = [group.memory_of(layer)[self._packed_layer.slices[number]] for layer in layers]
                span.source.read_packed_layers(layers.start, packed)
            except (CorruptBlobError, RemoteError) as error:
                raise LostChunk(span, error) from error
        return None

    def _read_part(self, span: Span, layer: int) -> Fill:
        """Read a layer of a `Part`, whose tokens are not contiguous in the file, into memory of its own."""
        keys, values = self._cache.span(layer, span.start, span.stop)
        staging, reader = self._transfers.staging, span.source
        host_keys, host_values = staging(keys), staging(values)
        reader.read_layer(layer, host_keys, host_values)
        held = HeldChunk(reader.token_ids, reader.start, reader.geometry, [host_keys], [host_values])
        return partial(held.read_layer, 0, keys, values)


class PackedLayer:
    """Device memory for the packed bytes of one layer of all spans. Spans in files come first: one copy fills them all.

    A `Part` and a `HeldChunk` have no packed bytes. slices: where each span's bytes are, by the span's number.
    file_nbytes: size of the spans in files; nbytes: of all.
    """

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.slices: dict[int, slice] = {}
        self.file_nbytes = self.nbytes = 0
        packed = [(n, span) for n, span in enumerate(spans) if not isinstance(span.source, Part | HeldChunk)]
        for number, span in sorted(packed, key=lambda each: each[1].source.in_memory):
            nbytes = span.source.codec.layer_nbytes(span.source.geometry, span.length)
            self.slices[number] = slice(self.nbytes, self.nbytes + nbytes)
            self.nbytes += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
            if not span.source.in_memory:
                self.file_nbytes = self.nbytes
        self.bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._in_memory = [(span.source, self.bytes_of(n)) for n, span in packed if span.source.in_memory]

    def bytes_of(self, number: int) -> Tensor:
        """(bytes,) uint8 of that span."""
        return self.bytes[self.slices[number]]

    def fill(self, layer: int, read: Tensor | None) -> None:
        """Copy a layer of all spans to the device. read: the bytes from files; those in memory are read here."""
        if read is not None:
            self.bytes[: self.file_nbytes].copy_(read, non_blocking=True)
        for source, packed in self._in_memory:
            source.read_packed(layer, packed)


class _UnpackFiller:
    """Fills rows from packed bytes of any codec, span by span."""

    def __init__(self, spans: Mapping[int, Span], packed: PackedLayer, cache: FusedCache) -> None:
        self._cache = cache
        self._packed = [(span, packed.bytes_of(number)) for number, span in spans.items()]

    def fill(self, layer: int) -> None:
        for span, packed in self._packed:
            keys, values = self._cache.span(layer, span.start, span.stop)
            span.source.codec.unpack(packed, span.source.geometry, keys, values)


class _RawFiller:
    """Fills the rows of all raw spans at once, for keys and values of one size: a call for each span would take the
    host too long.
    """

    def __init__(self, spans: Mapping[int, Span], packed: PackedLayer, cache: FusedCache) -> None:
        self._cache, g = cache, cache.geometry
        shape = (2, g.kv_heads, -1, g.key_size)
        self._parts = [packed.bytes_of(number).view(g.torch_dtype).view(shape) for number in spans]
        self._joined = torch.cat(self._parts, dim=2)  # (2, H, rows, D)
        rows = [torch.arange(span.start, span.stop) for span in spans.values()]
        self._rows = torch.cat(rows).to(packed.bytes.device)

    def fill(self, layer: int) -> None:
        held = self._cache.fused[layer]
        keys, values = torch.cat(self._parts, dim=2, out=self._joined)
        held.key_buffer[0].index_copy_(1, self._rows, keys)
        held.value_buffer[0].index_copy_(1, self._rows, values)


class _KernelFiller:
    """Fills the rows of all spans of one codec, with rotated keys, in one launch (`kernels/placement.py`).

    rotations: by the span's number, as `Span.rotation` gives it; spans that need none are left out.
    """

    def __init__(
        self,
        spans: Mapping[int, Span],
        packed: PackedLayer,
        cache: FusedCache,
        decoder: Decoder,
        rotations: Mapping[int, int | Tensor],
    ) -> None:
        from ragblend.engine.kernels.placement import RowTable

        rows = list[tuple[int, int, Tensor]]()
        deltas = [torch.zeros(1)]  # one at least: without angles another kernel would be compiled
        for number, span in spans.items():
            delta, first = torch.as_tensor(rotations.get(number, ())).float().flatten(), sum(map(len, deltas))
            # Each token's row in deltas; -1: not rotated.
            angle_rows = first + torch.arange(len(delta)) if len(delta) else torch.tensor([-1])
            rows.append((packed.slices[number].start, span.start, angle_rows.expand(span.length)))
            deltas.append(delta)
        (codec,) = {span.source.codec.name for span in spans.values()}
        self._cache, self._decoder = cache, decoder
        all_deltas = torch.cat(deltas).to(decoder.device)
        self._table = RowTable(packed.bytes, rows, cache.geometry, codec)
        self._angles = {kind: angles(all_deltas, inv_freq) for kind, inv_freq in decoder.ropes.items()}

    def fill(self, layer: int) -> None:
        held, by = self._cache.fused[layer], self._angles[self._decoder.layer_types[layer]]
        self._table.place(held.key_buffer[0], held.value_buffer[0], self._decoder.rope(layer), by)


Filler = _UnpackFiller | _RawFiller | _KernelFiller  # fill(layer): copies packed bytes to the spans' rows


def _fillers(
    spans: Sequence[Span], rotations: Rotations, packed: PackedLayer, cache: FusedCache, decoder: Decoder
) -> tuple[list[Filler], Rotations]:
    """A filler for the spans of each codec, and the rotations that remain to be done after it."""
    g, fillers = cache.geometry, list[Filler]()
    by_codec: dict[Codec, dict[int, Span]] = {}
    for number in packed.slices:
        by_codec.setdefault(spans[number].source.codec, {})[number] = spans[number]
    remaining = {span.start: delta for span, delta in rotations}
    for codec, codec_spans in by_codec.items():
        if decoder.has_kernels("placement", codec.name):
            deltas = {
                number: remaining.pop(span.start)
                for number, span in codec_spans.items()
                if span.start in remaining
            }
            fillers.append(_KernelFiller(codec_spans, packed, cache, decoder, deltas))
        elif codec is RAW and g.key_size == g.value_size:
            fillers.append(_RawFiller(codec_spans, packed, cache))
        else:
            fillers.append(_UnpackFiller(codec_spans, packed, cache))
    return fillers, [(span, delta) for span, delta in rotations if span.start in remaining]


class _Rotation:
    """Rotates the keys of several spans at once: a call for each span would take as long as its copy."""

    def __init__(self, rotations: Rotations, decoder: Decoder) -> None:
        self._decoder = decoder
        rows = torch.cat([torch.arange(span.start, span.stop) for span, _ in rotations])
        deltas = torch.cat([torch.as_tensor(delta).float().expand(span.length) for span, delta in rotations])
        self._rows, deltas = rows.to(decoder.device), deltas.to(decoder.device)
        self._angles = {kind: angles(deltas, inv_freq) for kind, inv_freq in decoder.ropes.items()}

    def rotate(self, layer: int, keys: Tensor) -> None:
        """Rotate these rows of a layer's buffer (H, capacity, D)."""
        rope = self._decoder.rope(layer)
        if rope.layout != UNROTATED:
            rotated = keys.index_select(1, self._rows)
            rotate_(rotated, *self._angles[self._decoder.layer_types[layer]], rope)
            keys.index_copy_(1, self._rows, rotated)


def loader_class(transfers: TransferStream) -> type[LayerLoader]:
    """The class of loaders for that device."""
    return StagedLoader if transfers.staged else LayerLoader
