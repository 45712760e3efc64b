"""Measuring a device for the controller: prefill over a grid, and loading from each tier, alone and beside the layers.

Everything is timed through the very loop and loader that serve requests: the layers with nothing to load, the tiers
with nothing to compute, and then both at once, on chunks of random values.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from ragblend.engine.cache import FusedCache
from ragblend.engine.controller import DeviceProfile, Tier
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import Lane
from ragblend.engine.fusion import fused_prefill
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Span, make_plan
from ragblend.engine.profile_policies import Shifting, Spread, Watching
from ragblend.engine.selection.base import Policy
from ragblend.engine.trace import Recorder
from ragblend.engine.work import BATCH_ROWS
from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.held import HeldChunk, Source, held_copy
from ragblend.kvstore.profile import PrefillProfile
from ragblend.kvstore.reader import ChunkReader
from ragblend.kvstore.store import KVStore

CACHED = (0, 512, 2048, 4096)
# 256 is where linear layers change the order of their weights (packing.MOST_ROWS), so there is a point behind it too.
NEW = (16, 64, 256, 320, 512, BATCH_ROWS)
# Behind nothing; behind something they are composed of goes.
LONG = tuple(count * BATCH_ROWS for count in (2, 3, 4))
REPEATS = 7
ENOUGH_MS = 1000.0  # of one thing
CHUNK_TOKENS = 512
SHIFT_ROWS = 64  # few, so that the difference is not lost in what they take themselves
MORE_SHIFT_ROWS = 384  # what a shift learns from is paid for by the row
CHUNKS = 4  # read at once: one alone would be over before the threads have shared it out
MOVED_TOKENS = 8  # so that keys have to be moved, as they nearly always have
Progress = Callable[[int, int], None]
Opened = Callable[[int], AbstractContextManager[Source]]


class _Nothing:
    """A loader that has nothing to load."""

    def wait(self, layer: int) -> None:
        pass


@dataclass(frozen=True)
class Bench:
    """What is measured, and with what. step() is called after each measurement."""

    decoder: Decoder
    lane: Lane
    pool: ThreadPoolExecutor
    store: KVStore
    window: int
    step: Callable[[], None]


def measure(
    decoder: Decoder,
    lane: Lane,
    pool: ThreadPoolExecutor,
    store: KVStore,
    window: int,
    prices: Mapping[str, float],
    progress: Progress | None = None,
) -> DeviceProfile:
    """Profile this model on this device, with the device in hand: seconds for a small model on a CPU.

    pool: the loader's threads; window: tokens that the model takes; longer sequences are left out of the grid; prices:
    USD for a GB and month by tier. progress(done, total).
    """
    cached, new, long = _axes(window)
    total, done = len(cached) * len(new) + len(long) + (5 if lane.staged else 4), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    bench = Bench(decoder, lane, pool, store, window, step)
    _prefill_ms(bench, cached[-1], new[-1])  # the first pays for pages and kernels
    about = f"{type(decoder.model).__name__}, {decoder.geometry.layers} layers, {decoder.geometry.dtype}"
    grid = _grid(bench, f"{about} on {decoder.device}", cached, new, long)
    chunk = _made_up(decoder)
    tiers = tuple(_tiers(bench, grid, prices, chunk))
    return DeviceProfile(
        grid.about, grid, tiers, shift_ms=_shift_ms(bench, chunk), watch_ms=_watch_ms(bench, chunk)
    )


def _axes(window: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    cached = tuple(count for count in CACHED if count + NEW[-1] <= window) or (0, 1)
    new = tuple(count for count in NEW if count + cached[-1] <= window)
    return (
        cached if len(cached) > 1 else (0, 1),
        new if len(new) > 1 else (1, 2),
        tuple(n for n in LONG if n <= window),
    )


def _grid(
    bench: Bench, about: str, cached: Sequence[int], new: Sequence[int], long: Sequence[int]
) -> PrefillProfile:
    def layers_ms(behind: int, count: int) -> float:
        (elapsed,) = _medians(lambda: _prefill_ms(bench, behind, count))
        bench.step()
        return elapsed

    short = PrefillProfile.of(about, cached, new, layers_ms)
    measured = {count: layers_ms(0, count) for count in long}

    def ms(behind: int, count: int) -> float:
        if behind == 0 and count in measured:
            return measured[count]
        goes = range(0, count, BATCH_ROWS)  # each has those before it behind it
        return sum(short.ms(behind + first, min(BATCH_ROWS, count - first)) for first in goes)

    return PrefillProfile.of(about, cached, (*new, *long), ms)


def _tiers(bench: Bench, grid: PrefillProfile, prices: Mapping[str, float], chunk: ChunkKV) -> Iterator[Tier]:
    """Every tier that KV may lie in: how fast a loader brings it into new buffers, moved, and what the layers lose."""
    lane = bench.lane
    count = _chunks_that_fit(bench)
    stored = MOVED_TOKENS + count * CHUNK_TOKENS
    fitting = [n for n in NEW if stored + n <= bench.window] or [1]

    def tier(name: str, opened: Opened) -> Tier:
        load_ms = _load_ms(bench, count, opened)
        # As many rows as take longer than the loading: what both take beyond the rows alone is the loading's doing.
        rows = next((n for n in fitting if grid.ms(stored, n) >= load_ms), fitting[-1])
        load_ms, alone_ms, both_ms = _medians(
            lambda: _load_ms(bench, count, opened),
            lambda: _prefill_ms(bench, stored, rows),
            lambda: _load_ms(bench, count, opened, rows),
        )
        bench.step()
        share = min(max((both_ms - max(alone_ms, load_ms)) / load_ms, 0.0), 1.0)
        return Tier(name, count * chunk.nbytes / load_ms * 1e3, prices[name], round(share, 3))

    held = held_copy(HeldChunk.of(chunk), "memory", torch.device("cpu"), pinned=lane.device.type == "cuda")
    if lane.staged:
        on_device = held_copy(held, "device", lane.device, pinned=False)
        yield tier("device", lambda _: on_device)
    yield tier("memory", lambda _: held)
    keys = [ChunkKey(f"{number:064x}") for number in range(count)]  # of no real chunk
    try:
        for key in keys:
            bench.store.put(key, chunk)
        yield tier("disk", lambda number: _cold(bench.store, keys[number], chunk))
    finally:
        for key in keys:
            bench.store.delete(key)


def _shift_ms(bench: Bench, chunk: ChunkKV) -> tuple[float, float, float]:
    """What shifting adds to the same request with the KV in memory.

    Of itself, for each stored token, and for each stored token and row that it learns from.
    """
    held, (most, few_rows), (_, rows) = HeldChunk.of(chunk), _extent(bench), _extent(bench, MORE_SHIFT_ROWS)

    def added_ms(count: int, learnt: int) -> float:
        without, with_ = _medians(
            lambda: _load_ms(bench, count, lambda _: held, learnt),
            lambda: _load_ms(bench, count, lambda _: held, learnt, Shifting(learnt)),
        )
        return max(with_ - without, 0.0)

    few, many = added_ms(1, few_rows), added_ms(most, few_rows)
    pair = 0.0
    if rows > few_rows:
        pair = max(added_ms(most, rows) - many, 0.0) / (most * CHUNK_TOKENS * (rows - few_rows))
    bench.step()
    each = max(many - few, 0.0) / max((most - 1) * CHUNK_TOKENS, 1)
    return max(few - each * CHUNK_TOKENS, 0.0), max(each - pair * few_rows, 0.0), pair


def _watch_ms(bench: Bench, chunk: ChunkKV) -> float:
    """What watching one row in all layers adds to a probe, for each token that it looks at; 0 where none can be."""
    if not bench.decoder.watches:
        bench.step()
        return 0.0
    held, (most, rows) = HeldChunk.of(chunk), _extent(bench)
    layers, tokens = bench.decoder.geometry.layers, MOVED_TOKENS + most * CHUNK_TOKENS + rows
    last, all_of_them = _medians(
        lambda: _load_ms(bench, most, lambda _: held, rows, Watching(rows)),
        lambda: _load_ms(bench, most, lambda _: held, rows, Watching(rows, everywhere=True)),
    )
    bench.step()
    return max(all_of_them - last, 0.0) / (rows * tokens) * layers / max(layers - 1, 1)


def _extent(bench: Bench, rows: int = SHIFT_ROWS) -> tuple[int, int]:
    """How many chunks to load at once, and how many rows to compute behind them, where a difference is measured."""
    most = _chunks_that_fit(bench)
    return most, max(1, min(rows, bench.window - MOVED_TOKENS - most * CHUNK_TOKENS))


def _chunks_that_fit(bench: Bench) -> int:
    return max(1, min(CHUNKS, (bench.window - MOVED_TOKENS - NEW[0]) // CHUNK_TOKENS))


def _medians(*timed: Callable[[], float]) -> list[float]:
    """Of each several times, fewer of what takes long: that is steadier, and a profile should take seconds.

    In turns, because a busy machine is not as busy a second later, and differences are taken of these.
    """
    rounds = [[each() for each in timed]]
    while len(rounds) < REPEATS and sum(map(sum, rounds)) < ENOUGH_MS * len(timed):
        rounds.append([each() for each in timed])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _prefill_ms(bench: Bench, behind: int, count: int) -> float:
    """So many rows of a sequence, with nothing to load."""
    cache = FusedCache(bench.decoder.geometry, behind + count, 0, bench.decoder.device)
    _zero(cache)
    bench.lane.synchronize()
    begun = time.perf_counter()
    _fused(bench, behind + count, (), count, cache, _Nothing(), Recorder(bench.lane))
    bench.lane.synchronize()
    return (time.perf_counter() - begun) * 1e3


def _fused(
    bench: Bench,
    tokens: int,
    spans: tuple[Span, ...],
    rows: int,
    cache: FusedCache,
    loader: "LayerLoader | _Nothing",
    recorder: Recorder,
    policy: Policy | None = None,
) -> None:
    decoder = bench.decoder
    ids = torch.ones(tokens, dtype=torch.int64, device=decoder.device)
    plan = make_plan(ids, spans, decoder.geometry.layers, 0.0, decoder.attention_share)
    fused_prefill(decoder, plan, policy or Spread(rows), cache, loader, recorder)  # type: ignore[arg-type]


def _made_up(decoder: Decoder) -> ChunkKV:
    geometry = decoder.geometry
    shapes = [(geometry.kv_heads, CHUNK_TOKENS, size) for size in (geometry.key_size, geometry.value_size)]
    keys, values = (
        [torch.randn(shape).to(geometry.torch_dtype) for _ in range(geometry.layers)] for shape in shapes
    )
    return ChunkKV(tuple(range(CHUNK_TOKENS)), 0, geometry, keys, values)


def _cold(store: KVStore, key: ChunkKey, chunk: ChunkKV) -> ChunkReader:
    reader = store.open_chunk(key, chunk.token_ids)
    assert isinstance(reader, ChunkReader), "it has just been stored, and nothing brought it up"
    reader.drop_page_cache()
    return reader


def _load_ms(bench: Bench, count: int, opened: Opened, rows: int = 0, policy: Policy | None = None) -> float:
    """Until so many chunks of that source stand in new buffers, moved; and so many rows, if any, are computed."""
    decoder, lane = bench.decoder, bench.lane
    tokens = MOVED_TOKENS + count * CHUNK_TOKENS + rows
    with ExitStack() as sources:
        readers = [sources.enter_context(opened(number)) for number in range(count)]
        spans = tuple(
            Span(MOVED_TOKENS + number * CHUNK_TOKENS, CHUNK_TOKENS, reader)
            for number, reader in enumerate(readers)
        )
        cache = FusedCache(decoder.geometry, tokens, 0, decoder.device)
        recorder = Recorder(lane)
        lane.synchronize()
        begun = time.perf_counter()
        loader = LayerLoader(spans, cache, decoder, lane, bench.pool, recorder)
        try:
            if rows:
                _fused(bench, tokens, spans, rows, cache, loader, recorder, policy)
            else:
                for layer in range(decoder.geometry.layers):
                    loader.wait(layer)
        finally:
            loader.finish()
        lane.synchronize()
        return (time.perf_counter() - begun) * 1e3


def _zero(cache: FusedCache) -> None:
    """Touch the buffers; and bits that happen to be NaN are slower on some CPUs."""
    for layer in range(cache.geometry.layers):
        for tensor in cache.span(layer, 0, cache.prompt_tokens):
            tensor.zero_()
