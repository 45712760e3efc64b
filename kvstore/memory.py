"""MemoryTier: copies of stored values in the memory of the host or of a device.

Every value is also on the disk, so eviction just drops the copy (RAGCache, arXiv 2404.12457, section 5.1). Values are
verified when they are read from the disk, and never change. The ledger gives a value's earlier uses; the tier counts
further uses itself.
"""

import functools
import logging
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, Source
from ragblend.kvstore.counters import Counters, StoreStats
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.policy import (
    DEFAULT_POLICY,
    EVICTION_POLICIES,
    Entry,
    EvictionPolicy,
    clock_after,
    ranked,
    used,
)

log = logging.getLogger(__name__)


@dataclass(eq=False)
class HeldChunk(Source):
    """A value whose tensors are already in memory: keys and values, L tensors (H, T, D) each, which must not change."""

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tier: str = "memory"

    codec = RAW

    @classmethod
    def of(cls, chunk: ChunkKV) -> "HeldChunk":
        """From a chunk, without copying."""
        return cls(chunk.token_ids, chunk.start, chunk.geometry, chunk.keys, chunk.values)

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        assert keys.shape == self.keys[layer].shape, (keys.shape, self.keys[layer].shape)
        keys.copy_(self.keys[layer], non_blocking=True)
        values.copy_(self.values[layer], non_blocking=True)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        parts = [t.contiguous().view(-1).view(torch.uint8) for t in (self.keys[layer], self.values[layer])]
        packed.copy_(torch.cat(parts))


@dataclass(eq=False)
class PackedChunk(Source):
    """A packed value of a memory tier; it stays readable if it is evicted meanwhile.

    layers: L tensors (layer bytes,) uint8, which must not change. A packed value takes less memory, and less time to
    copy to a device; from pinned memory the copy is only queued on the current stream.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    codec: Codec
    layers: Sequence[Tensor]
    tier: str

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        packed = self.layers[layer].to(keys.device, non_blocking=True)
        self.codec.unpack(packed, self.geometry, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        packed.copy_(self.layers[layer], non_blocking=True)


def held_nbytes(source: Source) -> int:
    """Bytes of a copy in memory."""
    return source.geometry.layers * source.codec.layer_nbytes(source.geometry, len(source.token_ids))


def held_copy(source: Source, tier: str, device: torch.device, pinned: bool) -> PackedChunk:
    """A copy of a source in one allocation, because an allocator of pinned memory rounds every allocation up."""
    if device.type != "cpu" and not source.in_memory:  # files are read into the host's memory
        source = held_copy(source, tier, torch.device("cpu"), pinned=False)
    shape = (held_nbytes(source),)
    flat = page_locked(shape, torch.uint8) if pinned else torch.empty(shape, dtype=torch.uint8, device=device)
    layers = flat.view(source.geometry.layers, -1).unbind()
    source.read_packed_layers(0, layers)
    return PackedChunk(source.token_ids, source.start, source.geometry, source.codec, layers, tier)


def page_locked(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Host memory from which a device copies by itself; ordinary memory if that is refused."""
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:  # a limit of locked memory, or a driver without it
        _warn_once(f"memory cannot be page-locked, so copies to the device are slower: {error!r:.200}")
        return torch.empty(shape, dtype=dtype, device="cpu")


@functools.cache
def _warn_once(message: str) -> None:
    log.warning("%s", message)


def layers_of(source: Source) -> Iterator[tuple[Tensor, Tensor]]:
    """Every layer's K and V, each in new memory."""
    g, tokens = source.geometry, len(source.token_ids)
    for layer in range(g.layers):
        keys = torch.empty((g.kv_heads, tokens, g.key_size), dtype=g.torch_dtype)
        values = torch.empty((g.kv_heads, tokens, g.value_size), dtype=g.torch_dtype)
        source.read_layer(layer, keys, values)
        yield keys, values


def read_whole(source: Source) -> ChunkKV:
    """The whole chunk on the CPU, in memory that the caller owns. Raises CorruptBlobError."""
    keys, values = zip(*layers_of(source), strict=True)
    return ChunkKV(source.token_ids, source.start, source.geometry, keys, values)


class MemoryTier:
    """A byte-bounded tier in memory; thread-safe.

    device: of the values; pinned: page-locked host memory, from which an accelerator copies without the CPU.
    """

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        device: torch.device | None = None,
        pinned: bool = False,
        policy: EvictionPolicy = EVICTION_POLICIES[DEFAULT_POLICY],
    ) -> None:
        assert budget_bytes >= 0, budget_bytes
        self.name, self.budget_bytes = name, budget_bytes
        self.device = torch.device("cpu") if device is None else device
        self._pinned, self._policy = pinned, policy
        self._lock = threading.Lock()
        self._held: dict[str, tuple[PackedChunk, Entry]] = {}
        self._uses = self._clock = 0.0
        self.counters = Counters()

    # --- reading

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> PackedChunk | None:
        """The value, if its token ids match; None is a miss."""
        with self._lock:
            self._uses += 1.0
            found = self.peek(key, token_ids)
            if found is not None:
                entry = used(self._held[key.digest][1], self._uses, self._policy.half_life)
                self._held[key.digest] = found, ranked(entry, self._policy, self._clock)
        self.counters.add(**({"misses": 1} if found is None else {"hits": 1}))
        return found

    def peek(self, key: ChunkKey, token_ids: Sequence[int]) -> PackedChunk | None:
        """`open_chunk` without counting a use, a hit or a miss, for copying values between tiers."""
        found, _ = self._held.get(key.digest, (None, None))
        return found if found is not None and found.token_ids == tuple(token_ids) else None

    def keys(self) -> list[ChunkKey]:
        with self._lock:
            return [ChunkKey(digest) for digest in self._held]

    # --- changing

    def admit(self, key: ChunkKey, source: Source, known: Entry | None = None) -> bool:
        """Store a copy of a source, evicting values of lower priority; False if it is larger than the whole tier.

        known: its ledger entry. Raises what reading raises, and then nothing has changed.
        """
        nbytes = held_nbytes(source)
        if self._pinned:  # torch's allocator rounds up, and keeps freed memory
            nbytes = 1 << (nbytes - 1).bit_length()
        if nbytes > self.budget_bytes:
            return False
        chunk = held_copy(source, self.name, self.device, self._pinned)
        with self._lock:
            entry = (known or Entry(key.digest, 0))._replace(nbytes=nbytes, tokens=len(chunk.token_ids))
            entry = entry._replace(used_at=self._uses, frequency=max(entry.frequency, 1.0))
            self._held[key.digest] = chunk, ranked(entry, self._policy, self._clock)
            victims = self._evict(protected=key.digest)
        self.counters.add(evictions=victims)
        return True

    def _evict(self, protected: str) -> int:
        """Evict values of the lowest priority until the budget is met; returns how many.

        All are sorted, which is cheap for a few hundred.
        """
        entries = [entry for _, entry in self._held.values()]
        excess, victims = sum(entry.nbytes for entry in entries) - self.budget_bytes, []
        for entry in sorted(entries, key=lambda entry: (entry.priority, entry.used_at)) if excess > 0 else ():
            if excess > 0 and entry.digest != protected:
                excess -= entry.nbytes
                victims.append(entry)
                del self._held[entry.digest]
        self._clock = clock_after(self._clock, victims)
        return len(victims)

    def delete(self, keys: Collection[ChunkKey]) -> int:
        """Drop these values and their counts; returns the bytes freed."""
        with self._lock:
            dropped = [self._held.pop(key.digest) for key in keys if key.digest in self._held]
        return sum(held.nbytes for _, held in dropped)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    def stats(self) -> StoreStats:
        with self._lock:
            nbytes = sum(entry.nbytes for _, entry in self._held.values())
            return self.counters.stats(len(self._held), nbytes, self.budget_bytes)
