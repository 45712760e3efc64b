"""MemoryTier: values kept in memory, the host's or a device's, above the disk that has them all.

Whatever is here is on the disk too, so eviction is dropping: a value is swapped out once, when it is put (RAGCache,
arXiv 2404.12457, section 5.1). Values are checked when they come up from the disk, and never change.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from ragblend.kvstore.chunks import ChunkKey, ChunkKV, Geometry
from ragblend.kvstore.policy import DEFAULT_POLICY, POLICIES, Policy
from ragblend.kvstore.ranking import History, Ranking
from ragblend.kvstore.stats import Counters, StoreStats


class Source(Protocol):
    """An open value of any tier."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def start(self) -> int: ...

    @property
    def geometry(self) -> Geometry: ...

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv)."""


@dataclass(frozen=True)
class HeldChunk:
    """A value in memory, open for reading; it stays whole when it is evicted meanwhile.

    keys, values: L tensors each, (H, T, D), which nobody may write to. tier: where it lies.
    """

    token_ids: tuple[int, ...]
    start: int
    geometry: Geometry
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    tier: str

    @classmethod
    def of(cls, chunk: ChunkKV, tier: str = "memory") -> "HeldChunk":
        """That chunk, not copied."""
        return cls(chunk.token_ids, chunk.start, chunk.geometry, tuple(chunk.keys), tuple(chunk.values), tier)

    def layer(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """The layer's tensors themselves, to be copied from; None for a tier that has none in memory."""
        return self.keys[layer], self.values[layer]

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Fill keys (H, T, Dk) and values (H, T, Dv), which may be strided and on another device."""
        assert keys.shape == self.keys[layer].shape, (keys.shape, self.keys[layer].shape)
        assert values.shape == self.values[layer].shape, (values.shape, self.values[layer].shape)
        keys.copy_(self.keys[layer])
        values.copy_(self.values[layer])

    def drop_page_cache(self) -> None:
        """It has no pages in the kernel's cache."""

    def close(self) -> None:
        """Nothing is open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
        self._pinned = pinned
        self._lock = threading.Lock()
        self._held: dict[str, HeldChunk] = {}
        self._history, self._ranking = History(policy), Ranking(policy)
        self.counters = Counters()

    # --- reading

    def contains(self, key: ChunkKey) -> bool:
        return key.digest in self._held

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> HeldChunk | None:
        """The value, its token ids compared; None is a miss."""
        with self._lock:
            found = self.peek(key, token_ids)
            entry = self._history.used(key.digest)
            if found is not None:
                self._ranking.rank(entry)
        self.counters.add(**({"misses": 1} if found is None else {"hits": 1}))
        return found

    def peek(self, key: ChunkKey, token_ids: Sequence[int]) -> HeldChunk | None:
        """The same, but it counts as no use: for moving values about."""
        found = self._held.get(key.digest)
        return found if found is not None and found.token_ids == tuple(token_ids) else None

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
        """The whole value, in memory that the caller owns; None is a miss."""
        found = self.open_chunk(key, token_ids)
        if found is None:
            return None
        keys, values = ([t.to("cpu", copy=True) for t in tensors] for tensors in (found.keys, found.values))
        return ChunkKV(found.token_ids, found.start, found.geometry, keys, values)

    def keys(self) -> Iterator[ChunkKey]:
        with self._lock:
            return iter([ChunkKey(digest) for digest in self._held])

    # --- changing

    def put(self, key: ChunkKey, chunk: ChunkKV) -> bool:
        """Keep a copy of the value, evicting what is worth less; False if it is larger than the whole tier."""
        return self.admit(key, HeldChunk.of(chunk))

    def admit(self, key: ChunkKey, source: Source, cost: float = 1.0) -> bool:
        """Keep what `source` reads, which takes `cost` a token to compute; False if it is larger than the whole tier.

        Raises what reading raises; nothing has changed then.
        """
        nbytes = len(source.token_ids) * source.geometry.token_bytes
        if nbytes > self.budget_bytes:
            return False
        chunk = self._copied(source)
        with self._lock:
            self._held[key.digest] = chunk
            self._ranking.rank(self._history.computed(key.digest, nbytes, len(chunk.token_ids), cost))
            victims = self._ranking.take(self._ranking.nbytes - self.budget_bytes, spare={key.digest})
            for victim in victims:
                del self._held[victim.digest]
                self._history.gone(victim.digest)
        self.counters.add(evictions=len(victims))
        return True

    def delete(self, key: ChunkKey) -> int:
        """Drop the value and what is known of it; bytes freed."""
        with self._lock:
            self._held.pop(key.digest, None)
            dropped = self._ranking.drop(key.digest)
            self._history.forget(key.digest)
        return dropped.nbytes if dropped else 0

    def clear(self) -> None:
        """Drop everything."""
        for key in self.keys():
            self.delete(key)

    def stats(self) -> StoreStats:
        with self._lock:
            entries, nbytes = len(self._held), self._ranking.nbytes
        return self.counters.stats(entries, nbytes, self.budget_bytes)

    def _copied(self, source: Source) -> HeldChunk:
        """In one piece of memory: an allocator of pinned memory rounds every piece up."""
        geometry, tokens = source.geometry, len(source.token_ids)
        flat = torch.empty(
            tokens * geometry.token_bytes // geometry.torch_dtype.itemsize,
            dtype=geometry.torch_dtype,
            device=self.device,
            pin_memory=self._pinned,
        )
        sizes = [geometry.kv_heads * tokens * size for size in (geometry.key_size, geometry.value_size)]
        parts = flat.split(sizes * geometry.layers)
        keys = [part.view(geometry.kv_heads, tokens, geometry.key_size) for part in parts[::2]]
        values = [part.view(geometry.kv_heads, tokens, geometry.value_size) for part in parts[1::2]]
        for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
            source.read_layer(layer, k, v)
        return HeldChunk(source.token_ids, source.start, geometry, tuple(keys), tuple(values), self.name)
