"""Measures a device for the controller: prefill over a grid, and how fast KV is loaded from each tier.

It runs the same loop and loader as requests do: the layers with nothing to load, and the tiers with nothing to compute,
on chunks of random values.
"""

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.controller import DeviceProfile, Tier
from ragblend.engine.fusion import Fusion
from ragblend.engine.loader import loader_class
from ragblend.engine.model.decoder import BLOCK_ROWS, Decoder
from ragblend.engine.plan import Plan, Span, make_plan
from ragblend.engine.runtime import Runtime
from ragblend.engine.scheduling.queue import DeviceTurn
from ragblend.engine.selection.base import Policy, ProbeResult
from ragblend.engine.trace import Recorder
from ragblend.kvstore.blob import PAGE_CACHE, ChunkReader
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.codec import Source
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import held_copy
from ragblend.kvstore.policy import PrefillProfile
from ragblend.kvstore.store import KVStore

CACHED_TOKENS = (0, 512, 2048, 4096)
# At 256 rows linear layers change the order of their weights (packing.MAX_PACKED_ROWS): there is a point after it too.
NEW_TOKENS = (16, 64, 256, 320, 512, BLOCK_ROWS)
MANY_NEW_TOKENS = 4 * BLOCK_ROWS  # an accelerator needs so many rows to be busy
# Measured in the background, in a few seconds: (cached, new) tokens without, then with an accelerator.
QUICK_GRIDS = ((0, 1024), (16, 128, 512)), ((0, 4096), (16, 256, BLOCK_ROWS, MANY_NEW_TOKENS))
REPEATS = 7
REPEAT_UNTIL_MS = 1000.0  # a measurement is not repeated after this total time
CHUNK_TOKENS = 512
CHUNKS = 4  # read at once, because a single one would not occupy all threads
PROFILE_FOLDER = "profile-"
MOVED_TOKENS = 8  # so that keys are rotated, as they nearly always are
OpenChunk = Callable[[int], AbstractContextManager[Source]]


@dataclass(frozen=True)
class EvenlySpread(Policy):
    """A policy that computes a given number of rows, evenly spread, the last one included."""

    count: int = 0
    name: str = field(default="profile", kw_only=True)
    measures_time_only: ClassVar[bool] = True

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        positions = torch.linspace(0, plan.tokens - 1, self.count, dtype=torch.float64)
        positions[-1] = plan.tokens - 1
        return positions.round().long().to(plan.token_ids.device)


def measure(runtime: Runtime, progress: Callable[[int, int], None] | None = None) -> DeviceProfile:
    """Profile this model on this device, in a device turn; takes seconds for a small model on a CPU.

    Sizes beyond the model's window are left out. progress(done, total).
    """
    decoder = runtime.decoder
    wanted = (*NEW_TOKENS, MANY_NEW_TOKENS) if runtime.transfers.staged else NEW_TOKENS
    cached, new = _axes(runtime.context_window, CACHED_TOKENS, wanted)
    total, done = len(cached) * len(new) + (4 if runtime.transfers.staged else 3), 0

    def median(once_ms: Callable[[], float]) -> float:
        nonlocal done
        times = [once_ms()]  # fewer repeats of slow ones: a profile should take seconds
        while len(times) < REPEATS and sum(times) < REPEAT_UNTIL_MS:
            times.append(once_ms())
        done += 1
        if progress is not None:
            progress(done, total)
        return statistics.median(times)

    _prefill_ms(runtime, cached[-1], new[-1])  # the first pays for pages and kernels
    grid = PrefillProfile.of(
        _about(decoder),
        cached,
        new,
        lambda cached, count: median(lambda: _prefill_ms(runtime, cached, count)),
    )
    count = max(1, min(CHUNKS, (runtime.context_window - MOVED_TOKENS) // CHUNK_TOKENS))
    chunk, tiers = _random_chunk(decoder), []
    nbytes = count * decoder.geometry.layers * runtime.codec.layer_nbytes(decoder.geometry, CHUNK_TOKENS)
    for name, opened in _tiers(runtime, chunk, count):
        load_ms = median(lambda: _load_ms(runtime, count, opened))  # noqa: B023
        tiers.append(Tier(name, nbytes / load_ms * 1e3))
    return DeviceProfile(grid.about, grid, tuple(tiers), overlaps=runtime.transfers.staged)


def measure_layers(runtime: Runtime, turn: DeviceTurn) -> DeviceProfile:
    """Profile the layers alone, by a few prefills in a background turn. The tiers' speeds are learned from requests.

    Raises Cancelled between two layers once a request waits.
    """
    cached, new = _axes(runtime.context_window, *QUICK_GRIDS[runtime.transfers.staged])
    yielding = _YieldingTurn(turn)
    _prefill_ms(runtime, cached[-1], new[0], yielding)  # the first pays for pages and kernels
    grid = PrefillProfile.of(
        _about(runtime.decoder),
        cached,
        new,
        lambda cached, count: _prefill_ms(runtime, cached, count, yielding),
    )
    return DeviceProfile(grid.about, grid, (), overlaps=runtime.transfers.staged)


class _YieldingTurn(DeviceTurn):
    """A background turn that ends between two layers once a request waits."""

    def __init__(self, turn: DeviceTurn) -> None:
        self._turn = turn

    def between_layers(self) -> None:
        if self._turn.should_stop():
            raise Cancelled("a request waits for the device")


def _about(decoder: Decoder) -> str:
    geometry = decoder.geometry
    return f"{type(decoder.model).__name__}, {geometry.layers} layers, {geometry.dtype} on {decoder.device}"


def _axes(window: int, cached: Sequence[int], new: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The cached and new sizes that fit the window, at least two of each."""
    behind = [count for count in cached if count + new[-1] <= window] or [0, 1]
    fitting = [count for count in new if count + behind[-1] <= window]
    return behind if len(behind) > 1 else (0, 1), fitting if len(fitting) > 1 else (1, 2)


def _tiers(runtime: Runtime, chunk: ChunkKV, count: int) -> Iterator[tuple[str, OpenChunk]]:
    """Every tier, the fastest first, with a function that opens one of its chunks, packed by the codec in use."""
    device, keys = runtime.device, [ChunkKey(f"{number:064x}") for number in range(count)]
    for left in runtime.home.glob(f"{PROFILE_FOLDER}*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    # A temporary store on the same disk, because in the real one these values could evict passages.
    with (
        TemporaryDirectory(prefix=PROFILE_FOLDER, dir=runtime.home) as folder,
        KVStore.open(Path(folder), chunk.nbytes * 2 * count) as store,
    ):
        for key in keys:
            store.put(key, chunk, runtime.codec)
        with _cold(store, keys[0], chunk) as stored:
            held = held_copy(stored, "memory", torch.device("cpu"), pinned=device.type == "cuda")
        if runtime.transfers.staged:
            on_device = held_copy(held, "device", runtime.transfers.device, pinned=False)
            yield "device", lambda _: on_device
        yield "memory", lambda _: held
        yield PAGE_CACHE, lambda number: _opened(store, keys[number], chunk)
        yield "disk", lambda number: _cold(store, keys[number], chunk)


def _prefill_ms(runtime: Runtime, cached: int, count: int, turn: DeviceTurn | None = None) -> float:
    """Time to compute these rows of a sequence, with nothing to load."""
    decoder, transfers = runtime.decoder, runtime.transfers
    tokens = cached + count
    ids = torch.ones(tokens, dtype=torch.int64, device=decoder.device)
    plan = make_plan(ids, (), decoder.geometry.layers, 0.0, decoder.attention_share)
    cache = FusedCache(decoder.geometry, tokens, 0, decoder.device)
    for layer in range(plan.layers):  # touches the buffers; and NaNs in them are slower on some CPUs
        cache.blank(layer, torch.arange(tokens, device=decoder.device))
    transfers.synchronize()
    begun, recorder = time.perf_counter(), Recorder(transfers)
    loader = loader_class(transfers)((), cache, decoder, transfers, runtime.loader_threads, recorder)
    Fusion(decoder, plan, EvenlySpread(count), cache, loader, recorder, turn).prefill()
    transfers.synchronize()
    return (time.perf_counter() - begun) * 1e3


def _load_ms(runtime: Runtime, count: int, opened: OpenChunk) -> float:
    """Time to load these chunks of a tier into new buffers, rotated."""
    decoder, transfers = runtime.decoder, runtime.transfers
    starts = [MOVED_TOKENS + number * CHUNK_TOKENS for number in range(count)]
    with ExitStack() as sources:
        readers = [sources.enter_context(opened(number)) for number in range(count)]
        spans = [Span(start, CHUNK_TOKENS, reader) for start, reader in zip(starts, readers, strict=True)]
        cache = FusedCache(decoder.geometry, spans[-1].stop, 0, decoder.device)
        transfers.synchronize()
        begun, recorder = time.perf_counter(), Recorder(transfers)
        loader = loader_class(transfers)(spans, cache, decoder, transfers, runtime.loader_threads, recorder)
        try:
            for layer in range(decoder.geometry.layers):
                loader.wait(layer)
        finally:
            loader.finish()
        transfers.synchronize()
        return (time.perf_counter() - begun) * 1e3


def _random_chunk(decoder: Decoder) -> ChunkKV:
    geometry = decoder.geometry
    shapes = [(geometry.kv_heads, CHUNK_TOKENS, size) for size in (geometry.key_size, geometry.value_size)]
    keys, values = (
        [torch.randn(shape).to(geometry.torch_dtype) for _ in range(geometry.layers)] for shape in shapes
    )
    tokens = tuple(range(CHUNK_TOKENS))
    return ChunkKV(tokens, 0, geometry, keys, values, unrotated_keys=lambda layer: keys[layer].float())


def _opened(store: KVStore, key: ChunkKey, chunk: ChunkKV) -> ChunkReader:
    reader = store.open_chunk(key, chunk.token_ids)
    assert isinstance(reader, ChunkReader), "it has just been stored, and was not promoted"
    return reader


def _cold(store: KVStore, key: ChunkKey, chunk: ChunkKV) -> ChunkReader:
    reader = _opened(store, key, chunk)
    reader.drop_page_cache()
    return reader
