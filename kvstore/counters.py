"""Counters of a tier: hits, misses, evictions, damaged values."""

import threading
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """Event counts of a tier."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StoreStats:
    """entries and bytes: content of the tier; the other fields: events in this process since it opened the store."""

    entries: int
    bytes: int
    budget_bytes: int
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0


class Counters:
    """This process's counts of one tier; thread-safe.

    counts: since the store was opened; unsaved: the part that is not yet in the saved totals of all processes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = self.unsaved = Counts()

    def add(self, **more: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self.counts, self.unsaved = self.counts + Counts(**more), self.unsaved + Counts(**more)

    def mark_saved(self, counts: Counts) -> None:
        """Record that these counts were added to the saved totals."""
        with self._lock:
            self.unsaved = self.unsaved + Counts(*(-count for count in astuple(counts)))

    def stats(self, entries: int, nbytes: int, budget_bytes: int) -> StoreStats:
        return StoreStats(entries, nbytes, budget_bytes, *astuple(self.counts))
