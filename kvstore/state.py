"""What every part of KVStore works with: its folder, lock, index and tiers, and the two ways to use the index."""

import logging
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragblend.kvstore.closing import Closing
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.index import Index
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.opening import Opened
from ragblend.kvstore.stats import Counters
from ragblend.kvstore.uses import Uses

log = logging.getLogger(__name__)
Cost = Callable[[int, int], float]


class StoreState(Closing):
    """An opened store. Reading, changing and looking after are in the classes that derive from it."""

    name = "disk"  # as a tier

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        opened: Opened,
        uses: Uses,
        tiers: Sequence[MemoryTier],
        cost: Cost,
    ) -> None:
        self.root, self.budget_bytes, self.tiers = root, budget_bytes, tuple(tiers)
        self._lock, self._cache, self._index = opened.lock, opened.cache, opened.index
        self._uses, self._cost = uses, cost
        self._counters = Counters()
        self._counted = {tier.name: tier.counters for tier in self.tiers} | {self.name: self._counters}
        self._closed = False

    def close(self) -> None:
        """Write what is pending and let go of the files; closing twice is fine. Open readers go on."""
        if self._closed:
            return
        try:
            self._flush()
        except StoreError as error:
            log.warning("what this session used and counted is lost: %s", error)
        self._closed = True
        for tier in self.tiers:
            tier.clear()
        self._cache.close()
        self._index.close()
        self._lock.close()

    @contextmanager
    def _changing(self, timeout_s: float | None = None) -> Iterator[Index]:
        """Be the only one, of all threads and processes, that changes the store; OSError becomes StoreError."""
        self._live_index()
        try:
            with self._lock.hold(timeout_s):
                index = self._live_index()
                if not (self._lock.is_in_place() and index.is_in_place()):
                    raise StoreError(
                        f"the KV store at {self.root} was moved or removed, or another process set its damaged index "
                        "aside. Open it again."
                    )
                yield index
        except OSError as error:
            raise StoreError(
                f"changing the KV store at {self.root} failed: {error}. Check the disk and the folder's permissions."
            ) from error

    def _live_index(self) -> Index:
        if self._closed:
            raise StoreError(f"the KV store at {self.root} has been closed; open it again")
        return self._index

    @contextmanager
    def _recording(self, counts_at_least: int = 1) -> Iterator[sqlite3.Connection]:
        """A transaction for a change of the index; what was counted, if it is so much, goes into it too. StoreError."""
        with self._index.transaction(self._recorded) as sql:
            self._uses.begun()
            yield sql
            for tier, each in self._counted.items():
                each.write(sql, tier, counts_at_least)

    def _recorded(self) -> None:
        self._uses.flushed()
        for each in self._counted.values():
            each.written()

    def _flush(self) -> None:
        """Write what waits in memory, uses and counts."""
        with self._recording() as sql:
            self._uses.flush(sql)
