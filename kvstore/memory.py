"""MemoryTier: values kept in memory, the host's or a device's, above the disk that has them all.

Whatever is here is on the disk too, so eviction is dropping: a value is swapped out once, when it is put (RAGCache,
arXiv 2404.12457, section 5.1). Values are checked when they come up from the disk, and never change.
"""

import threading
from collections.abc import Iterator, Sequence

import torch

from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.held import Held, HeldChunk, Source, held_copy, held_nbytes, whole
from ragblend.kvstore.policy import DEFAULT_POLICY, POLICIES, Policy
from ragblend.kvstore.ranking import History, Ranking
from ragblend.kvstore.stats import Counters, StoreStats


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
        self._held: dict[str, Held] = {}
        self._history, self._ranking = History(policy), Ranking(policy)
        self.counters = Counters()

    # --- reading

    def contains(self, key: ChunkKey) -> bool:
        return key.digest in self._held

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> Held | None:
        """The value, its token ids compared; None is a miss."""
        with self._lock:
            found = self.peek(key, token_ids)
            entry = self._history.used(key.digest)
            if found is not None:
                self._ranking.rank(entry)
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

    def admit(self, key: ChunkKey, source: Source, cost: float = 1.0) -> bool:
        """Keep what `source` reads, which takes `cost` a token to compute; False if it is larger than the whole tier.

        Raises what reading raises; nothing has changed then.
        """
        nbytes = held_nbytes(source)
        if nbytes > self.budget_bytes:
            return False
        chunk = held_copy(source, self.name, self.device, self._pinned)
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
