"""What a store holds, what this process asked of each tier, and what all processes ever did."""

import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass

COUNTED = ("hits", "misses", "evictions", "quarantined")
SCHEMA = """
CREATE TABLE IF NOT EXISTS Totals (
    tier TEXT PRIMARY KEY, hits INTEGER NOT NULL, misses INTEGER NOT NULL, evictions INTEGER NOT NULL,
    quarantined INTEGER NOT NULL
) WITHOUT ROWID;
"""
_ADD = """INSERT INTO Totals VALUES (?, ?, ?, ?, ?) ON CONFLICT (tier) DO UPDATE SET hits = hits + excluded.hits,
    misses = misses + excluded.misses, evictions = evictions + excluded.evictions,
    quarantined = quarantined + excluded.quarantined"""


@dataclass(frozen=True)
class Counts:
    """How often something happened on a tier."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    quarantined: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.hits + other.hits,
            self.misses + other.misses,
            self.evictions + other.evictions,
            self.quarantined + other.quarantined,
        )

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(
            self.hits - other.hits,
            self.misses - other.misses,
            self.evictions - other.evictions,
            self.quarantined - other.quarantined,
        )


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
    """What this process did on one tier, counted by several threads; `write` adds it to everybody's totals.

    In memory until a change of the store writes them, a put only many at once: neither a hit nor a put shall cost a
    write for the sake of counting. Who is killed before that is not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self._written = self._writing = Counts()

    def add(self, **more: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self._now = self._now + Counts(**more)

    def stats(self, entries: int, nbytes: int, budget_bytes: int) -> StoreStats:
        now = self._now
        return StoreStats(entries, nbytes, budget_bytes, *(getattr(now, name) for name in COUNTED))

    def unwritten(self) -> Counts:
        """What everybody's totals lack."""
        with self._lock:
            return self._now - self._written

    def write(self, sql: sqlite3.Connection, tier: str, at_least: int = 1) -> None:
        """Add what is new, if it is so much, to the totals of that tier; `written` is told when that was committed."""
        with self._lock:
            new = self._now - self._written
            enough = sum(abs(getattr(new, name)) for name in COUNTED) >= at_least
            self._writing = self._now if enough else self._written
        if enough:
            sql.execute(_ADD, (tier, *(getattr(new, name) for name in COUNTED)))

    def written(self) -> None:
        with self._lock:
            self._written = self._writing


def read_totals(sql: sqlite3.Connection) -> dict[str, Counts]:
    """What all processes did on each tier, by its name; a damaged row counts nothing."""
    rows = sql.execute("SELECT tier, hits, misses, evictions, quarantined FROM Totals").fetchall()
    return {
        str(tier): Counts(*counts) if all(isinstance(count, int) for count in counts) else Counts()
        for tier, *counts in rows
    }


def with_unwritten(totals: Mapping[str, Counts], counters: Mapping[str, Counters]) -> dict[str, Counts]:
    """The totals, and what this process has not written yet."""
    new = {tier: each.unwritten() for tier, each in counters.items()}
    return {tier: totals.get(tier, Counts()) + new.get(tier, Counts()) for tier in {**new, **totals}}
