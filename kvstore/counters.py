"""What a tier of the store counts: hits, misses, evictions, damaged values."""

import threading
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """How often something happened on a tier."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StoreStats:
    """entries and bytes are the tier's; hits to quarantined are one process's, since it opened the store."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0


class Counters:
    """What this process did on one tier; safe for threads.

    counts: since the store was opened; unsaved: the part that is not in the saved totals of all processes yet.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = self.unsaved = Counts()

    def add(self, **more: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self.counts, self.unsaved = self.counts + Counts(**more), self.unsaved + Counts(**more)

    def saved(self, counts: Counts) -> None:
        """These counts are in the totals now."""
        with self._lock:
            self.unsaved = self.unsaved + Counts(*(-count for count in astuple(counts)))

    def stats(self, entries: int, nbytes: int, budget_bytes: int) -> StoreStats:
        return StoreStats(entries, nbytes, budget_bytes, *astuple(self.counts))
