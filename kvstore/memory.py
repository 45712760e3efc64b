"""MemoryTier: values kept in memory, the host's or a device's, above the disk that has them all.

Whatever is here is on the disk too, so eviction is dropping: a value is swapped out once, when it is put (RAGCache,
arXiv 2404.12457, section 5.1). Values are checked when they come up from the disk, and never change. How often a value
was used before it came up is the ledger's to say; a tier counts on for what it holds.
"""

import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, Source
from ragblend.kvstore.counters import Counters, StoreStats
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.policy import DEFAULT_POLICY, POLICIES, Entry, EvictionPolicy, clock_after, ranked, used


@dataclass(eq=False)
class HeldChunk(Source):
    """A value whose tensors lie in memory anyway: keys, values L each, (H, T, D), which are never changed."""

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tier: str = "memory"

    codec = RAW

    @classmethod
    def of(cls, chunk: ChunkKV) -> "HeldChunk":
        """That chunk, not copied."""
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
    """A value of a tier in memory, as its codec packed it; it stays whole when it is evicted meanwhile.

    layers: L tensors (layer bytes,) uint8, which are never changed. Packed are fewer bytes to hold, and to send to a
    device; from pinned memory, sending is only given to the current stream.
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
    """Bytes that a copy of it takes in memory."""
    return source.geometry.layers * source.codec.layer_nbytes(source.geometry, len(source.token_ids))


def held_copy(source: Source, tier: str, device: torch.device, pinned: bool) -> PackedChunk:
    """What `source` reads, in one piece of memory: an allocator of pinned memory rounds every piece up."""
    if device.type != "cpu" and not source.in_memory:  # files are read into the host's memory
        source = held_copy(source, tier, torch.device("cpu"), pinned=False)
    flat = torch.empty(held_nbytes(source), dtype=torch.uint8, device=device, pin_memory=pinned)
    layers = flat.view(source.geometry.layers, -1).unbind()
    for layer, packed in enumerate(layers):
        source.read_packed(layer, packed)
    return PackedChunk(source.token_ids, source.start, source.geometry, source.codec, layers, tier)


def layers_of(source: Source) -> Iterator[tuple[Tensor, Tensor]]:
    """Every layer's K and V, each in new memory."""
    g, tokens = source.geometry, len(source.token_ids)
    for layer in range(g.layers):
        keys = torch.empty((g.kv_heads, tokens, g.key_size), dtype=g.torch_dtype)
        values = torch.empty((g.kv_heads, tokens, g.value_size), dtype=g.torch_dtype)
        source.read_layer(layer, keys, values)
        yield keys, values


def whole(source: Source) -> ChunkKV:
    """All of it, on the CPU, in memory that the caller owns. Raises CorruptBlobError."""
    keys, values = zip(*layers_of(source), strict=True)
    return ChunkKV(source.token_ids, source.start, source.geometry, keys, values)


class MemoryTier:
    """A byte-bounded tier in memory; safe for threads.

    device: where the values lie; pinned: page-locked host memory, from which an accelerator copies by itself.
    """

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        device: torch.device | None = None,
        pinned: bool = False,
        policy: EvictionPolicy = POLICIES[DEFAULT_POLICY],
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
        """The value, its token ids compared; None is a miss."""
        with self._lock:
            self._uses += 1.0
            found = self.peek(key, token_ids)
            if found is not None:
                entry = used(self._held[key.digest][1], self._uses, self._policy.half_life)
                self._held[key.digest] = found, ranked(entry, self._policy, self._clock)
        self.counters.add(**({"misses": 1} if found is None else {"hits": 1}))
        return found

    def peek(self, key: ChunkKey, token_ids: Sequence[int]) -> PackedChunk | None:
        """The same, but it counts as no use: for moving values about."""
        found, _ = self._held.get(key.digest, (None, None))
        return found if found is not None and found.token_ids == tuple(token_ids) else None

    def keys(self) -> list[ChunkKey]:
        with self._lock:
            return [ChunkKey(digest) for digest in self._held]

    # --- changing

    def admit(self, key: ChunkKey, source: Source, known: Entry | None = None) -> bool:
        """Keep a copy of what `source` reads, evicting what is worth less; False if it is larger than the whole tier.

        known: what the ledger says of it. Raises what reading raises; nothing has changed then.
        """
        nbytes = held_nbytes(source)
        if self._pinned:  # torch's allocator rounds up, and keeps
            nbytes = 1 << (nbytes - 1).bit_length()
        if nbytes > self.budget_bytes:
            return False
        chunk = held_copy(source, self.name, self.device, self._pinned)
        with self._lock:
            entry = (known or Entry(key.digest, 0))._replace(nbytes=nbytes, tokens=len(chunk.token_ids))
            entry = entry._replace(used_at=self._uses, frequency=max(entry.frequency, 1.0))
            self._held[key.digest] = chunk, ranked(entry, self._policy, self._clock)
            victims = self._evict(spare=key.digest)
        self.counters.add(evictions=victims)
        return True

    def _evict(self, spare: str) -> int:
        """Drop the lowest until the budget is kept; how many. A tier holds hundreds: sorting them is cheap."""
        entries = [entry for _, entry in self._held.values()]
        excess, victims = sum(entry.nbytes for entry in entries) - self.budget_bytes, []
        for entry in sorted(entries, key=lambda entry: (entry.priority, entry.used_at)) if excess > 0 else ():
            if excess > 0 and entry.digest != spare:
                excess -= entry.nbytes
                victims.append(entry)
                del self._held[entry.digest]
        self._clock = clock_after(self._clock, victims)
        return len(victims)

    def delete(self, keys: Collection[ChunkKey]) -> int:
        """Drop these values and what is known of them; bytes freed."""
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
