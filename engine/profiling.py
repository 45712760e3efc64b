"""Measuring a device for the controller: prefill over a grid, what a request costs beside it, and each tier's reads.

The layers are timed through the very loop that serves requests, with nothing to load; the tiers through a stored chunk
of random values, that is deleted again.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.cache import FusedCache
from ragblend.engine.controller import USD_PER_GB_MONTH, DeviceProfile, Tier
from ragblend.engine.decoder import Decoder
from ragblend.engine.device import Lane
from ragblend.engine.fusion import fused_prefill
from ragblend.engine.plan import Plan, make_plan
from ragblend.engine.selection.base import Policy
from ragblend.engine.trace import Recorder
from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.profile import PrefillProfile
from ragblend.kvstore.store import KVStore

CACHED = (0, 512, 2048, 4096)
NEW = (16, 128, 512, 1024)
REPEATS = 3
LONG_MS = 1000.0  # what takes longer is timed once: it is steady enough, and a profile should take seconds
CHUNK_TOKENS = 512
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
    decoder: Decoder, lane: Lane, store: KVStore, window: int, progress: Progress | None = None
) -> DeviceProfile:
    """Profile this model on this device, with the device in hand: seconds for a small model on a CPU.

    window: tokens that the model takes; longer sequences are left out of the grid. progress(done, total).
    """
    cached = tuple(count for count in CACHED if count + NEW[-1] <= window) or (0, 1)
    new = tuple(count for count in NEW if count + cached[-1] <= window) or (1, 2)
    total, done = len(cached) * len(new) + 2, 0

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
    with _stored(decoder, store) as (chunk, nbytes):
        disk = nbytes / _median(lambda: _read_s(store, chunk, decoder, cold=True), LONG_MS / 1e3)
        step()
        memory = nbytes / _median(lambda: _read_s(store, chunk, decoder, cold=False), LONG_MS / 1e3)
        step()
    tiers = tuple(
        Tier(name, speed, USD_PER_GB_MONTH[name]) for name, speed in (("memory", memory), ("disk", disk))
    )
    return DeviceProfile(grid.about, grid, tiers)


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
    for layer in range(decoder.geometry.layers):  # bits that happen to be NaN are slower on some CPUs
        for tensor in cache.span(layer, 0, tokens):
            tensor.zero_()
    lane.synchronize()
    begun = time.perf_counter()
    fused_prefill(decoder, plan, _Last(count), cache, _Nothing(), Recorder(lane))  # type: ignore[arg-type]
    lane.synchronize()
    return (time.perf_counter() - begun) * 1e3


@contextmanager
def _stored(decoder: Decoder, store: KVStore) -> Iterator[tuple[ChunkKV, int]]:
    geometry = decoder.geometry
    shapes = [(geometry.kv_heads, CHUNK_TOKENS, size) for size in (geometry.key_size, geometry.value_size)]
    keys, values = (
        [torch.randn(shape).to(geometry.torch_dtype) for _ in range(geometry.layers)] for shape in shapes
    )
    chunk = ChunkKV(tuple(range(CHUNK_TOKENS)), 0, geometry, keys, values)
    store.put(_KEY, chunk)
    try:
        yield chunk, CHUNK_TOKENS * geometry.token_bytes
    finally:
        store.delete(_KEY)


def _read_s(store: KVStore, chunk: ChunkKV, decoder: Decoder, cold: bool) -> float:
    """Seconds to read all layers into buffers that are there already, by one thread."""
    geometry = decoder.geometry
    keys = torch.empty(geometry.kv_heads, CHUNK_TOKENS, geometry.key_size, dtype=geometry.torch_dtype)
    values = torch.empty(geometry.kv_heads, CHUNK_TOKENS, geometry.value_size, dtype=geometry.torch_dtype)
    keys.zero_(), values.zero_()
    reader = store.open_chunk(_KEY, chunk.token_ids)
    assert reader is not None, "it has just been stored"
    with reader:
        if cold:
            reader.drop_page_cache()
        begun = time.perf_counter()
        for layer in range(geometry.layers):
            reader.read_layer(layer, keys, values)
        return time.perf_counter() - begun
