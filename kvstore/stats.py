"""What a store holds, and what this process asked of it."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StoreStats:
    """entries and bytes are the store's; hits to quarantined are one process's, since it opened it."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0


class Counters:
    """The counting half of StoreStats, for several threads.

    Not on disk: a hit would then cost a write, and what a user asks is how *this* session went.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = StoreStats(0, 0, 0)

    def add(self, **more: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self._now = replace(
                self._now, **{name: getattr(self._now, name) + count for name, count in more.items()}
            )

    def stats(self, entries: int, nbytes: int, budget_bytes: int) -> StoreStats:
        with self._lock:
            return replace(self._now, entries=entries, bytes=nbytes, budget_bytes=budget_bytes)
