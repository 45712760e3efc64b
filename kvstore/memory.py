"""MemoryTier: values kept in memory, the host's or a device's, above the disk that has them all.

Whatever is here is on the disk too, so eviction is dropping: a value is swapped out once, when it is put (RAGCache,
arXiv 2404.12457, section 5.1). Values are checked when they come up from the disk, and never change. How often a value
was used before it came up is the ledger's to say; a tier counts on for what it holds.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec
from ragblend.kvstore.files import Closing
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.policy import DEFAULT_POLICY, POLICIES, Entry, Policy, clock_after, ranked, used
from ragblend.kvstore.uses import Counters, StoreStats, half_life_of


class Source(Protocol):
    """An open value of any tier."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int:
        """Position of the first token when it was encoded."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def codec(self) -> Codec:
        """How its layers are packed."""

    @property
    def tier(self) -> str:
        """Where it lies: `disk`, `memory`, `device`."""

    @property
    def in_memory(self) -> bool:
        """Whether `read_layer` fills tensors of any device, from memory; else only the CPU's, from a file."""

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv). Raises CorruptBlobError."""

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,) uint8, as the codec made it. Raises CorruptBlobError."""


class _Open(Closing):
    """What needs no closing, as a context manager."""

    def drop_page_cache(self) -> None:
        """It has no pages in the kernel's cache."""

    def close(self) -> None:
        """Nothing is open."""


@dataclass(frozen=True)
class HeldChunk(_Open):
    """A value in memory, open for reading; it stays whole when it is evicted meanwhile.

    keys, values: L tensors each, (H, T, D), which nobody may write to. tier: where it lies.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tier: str

    in_memory = True
    codec = RAW

    @classmethod
    def of(cls, chunk: ChunkKV, tier: str = "memory") -> "HeldChunk":
        """That chunk, not copied."""
        return cls(chunk.token_ids, chunk.start, chunk.geometry, tuple(chunk.keys), tuple(chunk.values), tier)

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), which may be strided and on another device.

        From pinned memory the copy to a device is only given to the current stream.
        """
        assert keys.shape == self.keys[layer].shape, (keys.shape, self.keys[layer].shape)
        assert values.shape == self.values[layer].shape, (values.shape, self.values[layer].shape)
        keys.copy_(self.keys[layer], non_blocking=True)
        values.copy_(self.values[layer], non_blocking=True)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,) uint8 with keys, then values."""
        parts = [t.contiguous().view(-1).view(torch.uint8) for t in (self.keys[layer], self.values[layer])]
        packed.copy_(torch.cat(parts))


@dataclass(frozen=True)
class PackedChunk(_Open):
    """A value in memory as its codec packed it: fewer bytes to hold, and to send to a device.

    layers: L tensors (layer bytes,) uint8, which nobody may write to.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    codec: Codec
    layers: tuple[Tensor, ...]
    tier: str

    in_memory = True

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv): unpacked on the device that they are on."""
        packed = self.layers[layer].to(keys.device, non_blocking=True)
        self.codec.unpack(packed, self.geometry, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        """Fill packed (layer bytes,) uint8."""
        packed.copy_(self.layers[layer], non_blocking=True)


Held = HeldChunk | PackedChunk


def held_nbytes(source: Source) -> int:
    """Bytes that a copy of it takes in memory."""
    return source.geometry.layers * source.codec.layer_nbytes(source.geometry, len(source.token_ids))


def held_copy(source: Source, tier: str, device: torch.device, pinned: bool) -> Held:
    """What `source` reads, in one piece of memory: an allocator of pinned memory rounds every piece up."""
    if device.type != "cpu" and not source.in_memory:  # files are read into the host's memory
        source = held_copy(source, tier, torch.device("cpu"), pinned=False)
    geometry, tokens = source.geometry, len(source.token_ids)
    if source.codec is RAW:
        flat = _memory(
            held_nbytes(source) // geometry.torch_dtype.itemsize, geometry.torch_dtype, device, pinned
        )
        sizes = [geometry.kv_heads * tokens * size for size in (geometry.key_size, geometry.value_size)]
        parts = flat.split(sizes * geometry.layers)
        keys = [part.view(geometry.kv_heads, tokens, geometry.key_size) for part in parts[::2]]
        values = [part.view(geometry.kv_heads, tokens, geometry.value_size) for part in parts[1::2]]
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            source.read_layer(layer, k, v)
        return HeldChunk(source.token_ids, source.start, geometry, tuple(keys), tuple(values), tier)
    flat = _memory(held_nbytes(source), torch.uint8, device, pinned)
    layers = flat.view(geometry.layers, -1).unbind()
    for layer, packed in enumerate(layers):
        source.read_packed(layer, packed)
    return PackedChunk(source.token_ids, source.start, geometry, source.codec, layers, tier)


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


def _memory(numbers: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> Tensor:
    return torch.empty(numbers, dtype=dtype, device=device, pin_memory=pinned)


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
        policy: Policy = POLICIES[DEFAULT_POLICY],
    ) -> None:
        assert budget_bytes >= 0, budget_bytes
        self.name, self.budget_bytes = name, budget_bytes
        self.device = torch.device("cpu") if device is None else device
        self._pinned, self._policy = pinned, policy
        self._lock = threading.Lock()
        self._held: dict[str, Held] = {}
        self._entries: dict[str, Entry] = {}  # of what is held
        self._uses = self._clock = 0.0
        self.counters = Counters()

    # --- reading

    def contains(self, key: ChunkKey) -> bool:
        return key.digest in self._held

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> Held | None:
        """The value, its token ids compared; None is a miss."""
        with self._lock:
            self._uses += 1.0
            found = self.peek(key, token_ids)
            if found is not None:
                entry = used(self._entries[key.digest], self._uses, half_life_of(self._policy))
                self._entries[key.digest] = ranked(entry, self._policy, self._clock)
        self.counters.add(**({"misses": 1} if found is None else {"hits": 1}))
        return found

    def peek(self, key: ChunkKey, token_ids: Sequence[int]) -> Held | None:
        """The same, but it counts as no use: for moving values about."""
        found = self._held.get(key.digest)
        return found if found is not None and found.token_ids == tuple(token_ids) else None

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
        """The whole value, in memory that the caller owns; None is a miss."""
        found = self.open_chunk(key, token_ids)
        if found is None:
            return None
        return whole(found)

    def keys(self) -> Iterator[ChunkKey]:
        with self._lock:
            return iter([ChunkKey(digest) for digest in self._held])

    # --- changing

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Keep a copy of the value, evicting what is worth less; False if it is larger than the whole tier."""
        return self.admit(key, HeldChunk.of(chunk))

    def admit(self, key: ChunkKey, source: Source, known: Entry | None = None) -> bool:
        """Keep what `source` reads; False if it is larger than the whole tier. known: what the ledger says of it.

        Raises what reading raises; nothing has changed then.
        """
        nbytes = held_nbytes(source)
        if nbytes > self.budget_bytes:
            return False
        chunk = held_copy(source, self.name, self.device, self._pinned)
        with self._lock:
            entry = (known or Entry(key.digest, 0))._replace(nbytes=nbytes, tokens=len(chunk.token_ids))
            entry = entry._replace(used_at=self._uses, frequency=max(entry.frequency, 1.0))
            self._held[key.digest] = chunk
            self._entries[key.digest] = ranked(entry, self._policy, self._clock)
            victims = self._evict(spare=key.digest)
        self.counters.add(evictions=victims)
        return True

    def _evict(self, spare: str) -> int:
        """Drop the lowest until the budget is kept; how many. A tier holds hundreds, so they are sorted anew."""
        excess = sum(entry.nbytes for entry in self._entries.values()) - self.budget_bytes
        order = (
            sorted(self._entries.values(), key=lambda entry: (entry.priority, entry.used_at))
            if excess > 0
            else []
        )
        victims = []
        for entry in order:
            if excess > 0 and entry.digest != spare:
                excess -= entry.nbytes
                victims.append(entry)
                del self._held[entry.digest], self._entries[entry.digest]
        self._clock = clock_after(self._clock, victims)
        return len(victims)

    def delete(self, key: ChunkKey) -> int:
        """Drop the value and what is known of it; bytes freed."""
        with self._lock:
            self._held.pop(key.digest, None)
            dropped = self._entries.pop(key.digest, None)
        return dropped.nbytes if dropped else 0

    def clear(self) -> None:
        """Drop everything."""
        for key in self.keys():
            self.delete(key)

    def stats(self) -> StoreStats:
        with self._lock:
            entries, nbytes = len(self._held), sum(entry.nbytes for entry in self._entries.values())
        return self.counters.stats(entries, nbytes, self.budget_bytes)
