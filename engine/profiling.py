"""Measuring a device for the controller: prefill over a grid, and loading from each tier.

The layers are timed through the very loop that serves requests, with nothing to load; the tiers through the very
loader, with nothing to compute, on a chunk of random values.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.controller import DeviceProfile, Tier
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import Lane
from ragblend.engine.fusion import fused_prefill
from ragblend.engine.loader import LayerLoader
from ragblend.engine.plan import Plan, Span, make_plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.trace import Recorder
from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.held import HeldChunk, Source, held_copy
from ragblend.kvstore.profile import PrefillProfile
from ragblend.kvstore.reader import ChunkReader
from ragblend.kvstore.store import KVStore

CACHED = (0, 512, 2048, 4096)
NEW = (16, 128, 512, 1024)
REPEATS = 3
LONG_MS = 1000.0  # what takes longer is timed once: it is steady enough, and a profile should take seconds
CHUNK_TOKENS = 512
MOVED_TOKENS = 8  # so that keys have to be moved, as they nearly always have
_KEY = ChunkKey("0" * 64)  # of no real chunk
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Last(Policy):
    """Computes the last rows of a sequence, as many as it is told."""

    count: int = 0
    name: str = field(default="profile", kw_only=True)

    def rows(self, plan: Plan) -> Tensor:
        return torch.arange(plan.tokens - self.count, plan.tokens, device=plan.token_ids.device)


class _Nothing:
    """A loader that has nothing to load."""

    def wait(self, layer: int) -> None:
        pass


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
    cached = tuple(count for count in CACHED if count + NEW[-1] <= window) or (0, 1)
    new = tuple(count for count in NEW if count + cached[-1] <= window) or (1, 2)
    total, done = len(cached) * len(new) + (3 if lane.staged else 2), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    def layers_ms(behind: int, count: int) -> float:
        elapsed = _median(lambda: _prefill_ms(decoder, lane, behind, count), LONG_MS)
        step()
        return elapsed

    _prefill_ms(decoder, lane, cached[-1], new[-1])  # the first pays for pages and kernels
    about = f"{type(decoder.model).__name__}, {decoder.geometry.layers} layers, {decoder.geometry.dtype}"
    grid = PrefillProfile.of(f"{about} on {decoder.device}", cached, new, layers_ms)
    return DeviceProfile(grid.about, grid, tuple(_tiers(decoder, lane, pool, store, prices, step)))


def _tiers(
    decoder: Decoder,
    lane: Lane,
    pool: ThreadPoolExecutor,
    store: KVStore,
    prices: Mapping[str, float],
    step: Callable[[], None],
) -> Iterator[Tier]:
    """Every tier that KV may lie in, by how fast a loader brings it into the fused buffers, moved."""
    chunk = _made_up(decoder)
    nbytes = chunk.nbytes

    def tier(name: str, opened: Callable[[], AbstractContextManager[Source]]) -> Tier:
        seconds = _median(lambda: _load_s(decoder, lane, pool, opened), LONG_MS / 1e3)
        step()
        return Tier(name, nbytes / seconds, prices[name])

    held = held_copy(HeldChunk.of(chunk), "memory", torch.device("cpu"), pinned=lane.device.type == "cuda")
    if lane.staged:
        on_device = held_copy(held, "device", lane.device, pinned=False)
        yield tier("device", lambda: on_device)
    yield tier("memory", lambda: held)
    store.put(_KEY, chunk)
    try:
        yield tier("disk", lambda: _cold(store, chunk))
    finally:
        store.delete(_KEY)


def _median(timed: Callable[[], float], long: float) -> float:
    first = timed()
    return first if first > long else statistics.median([first, *(timed() for _ in range(REPEATS - 1))])


def _prefill_ms(decoder: Decoder, lane: Lane, behind: int, count: int) -> float:
    tokens = behind + count
    plan = make_plan(
        torch.ones(tokens, dtype=torch.int64, device=decoder.device),
        (),
        decoder.geometry.layers,
        0.0,
        decoder.attention_share,
    )
    cache = FusedCache(decoder.geometry, tokens, 0, decoder.device)
    _zero(cache)
    lane.synchronize()
    begun = time.perf_counter()
    fused_prefill(decoder, plan, _Last(count), cache, _Nothing(), Recorder(lane))  # type: ignore[arg-type]
    lane.synchronize()
    return (time.perf_counter() - begun) * 1e3


def _made_up(decoder: Decoder) -> ChunkKV:
    geometry = decoder.geometry
    shapes = [(geometry.kv_heads, CHUNK_TOKENS, size) for size in (geometry.key_size, geometry.value_size)]
    keys, values = (
        [torch.randn(shape).to(geometry.torch_dtype) for _ in range(geometry.layers)] for shape in shapes
    )
    return ChunkKV(tuple(range(CHUNK_TOKENS)), 0, geometry, keys, values)


def _cold(store: KVStore, chunk: ChunkKV) -> ChunkReader:
    reader = store.open_chunk(_KEY, chunk.token_ids)
    assert isinstance(reader, ChunkReader), "it has just been stored, and nothing brought it up"
    reader.drop_page_cache()
    return reader


def _load_s(
    decoder: Decoder,
    lane: Lane,
    pool: ThreadPoolExecutor,
    opened: Callable[[], AbstractContextManager[Source]],
) -> float:
    """Seconds until a chunk of that source stands in buffers that are there already, moved by a few tokens."""
    cache = FusedCache(decoder.geometry, MOVED_TOKENS + CHUNK_TOKENS, 0, decoder.device)
    _zero(cache)
    lane.synchronize()
    with opened() as source:
        begun = time.perf_counter()
        span = Span(MOVED_TOKENS, CHUNK_TOKENS, source)
        loader = LayerLoader([span], cache, decoder, lane, pool, Recorder(lane))
        try:
            for layer in range(decoder.geometry.layers):
                loader.wait(layer)
        finally:
            loader.finish()
        lane.synchronize()
        return time.perf_counter() - begun


def _zero(cache: FusedCache) -> None:
    """Touch the buffers; and bits that happen to be NaN are slower on some CPUs."""
    for layer in range(cache.geometry.layers):
        for tensor in cache.span(layer, 0, cache.prompt_tokens):
            tensor.zero_()
