"""The ledger: how often each value was asked for and what it costs, and so which one goes next; and what was counted.

The arithmetic is policy.py's; the order is kept by an index of SQLite's, in a file of its own beside the store's index.
So a store of 100,000 values opens without reading them, all processes see one order, and a use or a victim costs
O(log n). Uses are numbered: no clock is asked, so none can jump. Tiers in memory rank what comes up to them by the same
entries. The store's index has the last word on what is stored: the ledger is brought in line with it at every open, and
a damaged one begins anew.

Retrievals wait in memory and are written with the next change: a hit costs no write and no fsync. Who is killed before
that loses the order of these uses and nothing else.
"""

import sqlite3
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path

from ragblend.kvstore import tree
from ragblend.kvstore.keys import FORMAT_VERSION
from ragblend.kvstore.policy import (
    DEFAULT_POLICY,
    HALF_LIFE_USES,
    POLICIES,
    Entry,
    Policy,
    clock_after,
    computed,
    joined,
    ranked,
    used,
)
from ragblend.kvstore.sqlite import Rebuildable, RebuildableFile

REMEMBERED = 20_000  # values that are gone and whose count goes on; about 5 MB
_TRIM_EVERY = 1000  # evictions: the rows of what is gone are counted one by one
# Uses with 0 bytes are of what was evicted, whose count goes on (RAGCache's frequency counts retrievals, found or not).
# SQLite's integrity check finds numbers that damage has made impossible.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS Uses (
    digest TEXT PRIMARY KEY, bytes INTEGER NOT NULL, used_at REAL NOT NULL, frequency REAL NOT NULL,
    cost REAL NOT NULL, computations INTEGER NOT NULL, priority REAL NOT NULL,
    CHECK (typeof(digest) = 'text' AND typeof(bytes) = 'integer' AND typeof(used_at) = 'real'
        AND typeof(frequency) = 'real' AND typeof(cost) = 'real' AND typeof(computations) = 'integer'
        AND typeof(priority) = 'real'),
    CHECK (bytes >= 0 AND used_at BETWEEN 0 AND 1e15 AND frequency BETWEEN 0 AND 1e15 AND cost BETWEEN 0 AND 1e15
        AND computations >= 0 AND ABS(priority) <= 1e30)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS UsesInOrder ON Uses (priority, used_at) WHERE bytes > 0;
CREATE TABLE IF NOT EXISTS Ranking (
    only INTEGER PRIMARY KEY, policy TEXT NOT NULL, uses REAL NOT NULL, clock REAL NOT NULL,
    CHECK (typeof(uses) = 'real' AND typeof(clock) = 'real')
);
CREATE TABLE IF NOT EXISTS Totals (
    tier TEXT PRIMARY KEY, hits INTEGER NOT NULL, misses INTEGER NOT NULL, evictions INTEGER NOT NULL,
    quarantined INTEGER NOT NULL,
    CHECK (typeof(hits) = 'integer' AND typeof(misses) = 'integer' AND typeof(evictions) = 'integer'
        AND typeof(quarantined) = 'integer')
) WITHOUT ROWID;
"""
ParentOf = Callable[[str], str | None]
_REMEDY = "values count as put one after the other, and uses are counted anew"
_KIND = Rebuildable("ledger of uses", _SCHEMA + tree.SCHEMA, FORMAT_VERSION, _REMEDY)
# An Entry's fields.
_SELECT = "SELECT digest, bytes, used_at, 0, frequency, cost, computations, priority FROM Uses"
_WRITE = "INSERT OR REPLACE INTO Uses VALUES (?, ?, ?, ?, ?, ?, ?)"
_IN_ORDER = f"""{_SELECT} WHERE bytes > 0 AND digest != ? AND {tree.IS_LEAF} ORDER BY priority, used_at"""
_ADD = """INSERT INTO Totals VALUES (?, ?, ?, ?, ?) ON CONFLICT (tier) DO UPDATE SET hits = hits + excluded.hits,
    misses = misses + excluded.misses, evictions = evictions + excluded.evictions,
    quarantined = quarantined + excluded.quarantined"""
_TOO_MANY_GONE = """DELETE FROM Uses WHERE bytes = 0 AND digest NOT IN
    (SELECT digest FROM Uses WHERE bytes = 0 ORDER BY used_at DESC, digest DESC LIMIT ?)"""


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
    """What this process did on one tier, counted by several threads.

    It waits in memory until a change of the store writes it to everybody's totals, a put only many at once: neither a
    hit nor a put shall cost a write for the sake of counting. Who is killed before that is not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = self.waiting = Counts()

    def add(self, **more: int) -> None:
        """Add to the named counters."""
        with self._lock:
            self.counts, self.waiting = self.counts + Counts(**more), self.waiting + Counts(**more)

    def stats(self, entries: int, nbytes: int, budget_bytes: int) -> StoreStats:
        return StoreStats(entries, nbytes, budget_bytes, *astuple(self.counts))

    def take(self, at_least: int) -> Counts:
        """What waits, if it is so much, and waits no longer."""
        with self._lock:
            if sum(map(abs, astuple(self.waiting))) < at_least:
                return Counts()
            taken, self.waiting = self.waiting, Counts()
            return taken

    def give_back(self, taken: Counts) -> None:
        """It could not be written."""
        with self._lock:
            self.waiting = self.waiting + taken


def half_life_of(policy: Policy) -> float | None:
    """Of a retrieval, in uses; None if all count alike."""
    return HALF_LIFE_USES if policy.fades else None


class Ledger(RebuildableFile):
    """Everybody's ledger, and the retrievals of this process that wait to be written there.

    policy: what to rank by from now on; None for whatever others rank by. remembered: how many values' counts go on
    that are not stored. counters: of this process, by the names of its tiers.
    """

    def __init__(
        self,
        path: Path,
        policy: Policy | None,
        counters: Mapping[str, Counters],
        remembered: int = REMEMBERED,
    ) -> None:
        super().__init__(path, _KIND)
        self._wanted, self.policy = policy, policy or POLICIES[DEFAULT_POLICY]
        self._counters, self._remembered = counters, remembered
        self._guard = threading.Lock()
        self._count = 0.0
        self._waiting: dict[str, Entry] = {}  # used_at counts this process's retrievals
        # Asked for, and in no row: of what was deleted nothing may come back.
        self._unknown: dict[str, Entry] = {}
        self._evicted = 0

    # --- in memory

    def used(self, digest: str) -> None:
        """Count a retrieval, found or not; the next change writes it."""
        with self._guard:
            self._count += 1.0
            entry = used(self._waiting.pop(digest, Entry(digest, 0)), self._count, half_life_of(self.policy))
            _remember(self._waiting, entry, self._remembered)

    @property
    def waiting(self) -> int:
        """Values whose retrievals are not written."""
        return len(self._waiting)

    def _take(self) -> tuple[float, dict[str, Entry]]:
        """All that waits, and how many retrievals there were."""
        with self._guard:
            taken, count, self._waiting, self._count = self._waiting, self._count, {}, 0.0
        return count, taken

    def _give_back(self, count: float, taken: dict[str, Entry]) -> None:
        with self._guard:
            recent, self._waiting, self._count = self._waiting, taken, self._count + count
            for digest, entry in recent.items():
                later = entry._replace(used_at=entry.used_at + count)
                before = self._waiting.pop(digest, Entry(digest, 0))
                self._waiting[digest] = joined(before, later, half_life_of(self.policy))

    # --- reading

    def asked(self) -> dict[str, float]:
        """The count of what is not stored, evicted or never put, and of what waits."""
        with self.connection() as sql:
            gone = dict(sql.execute("SELECT digest, frequency FROM Uses WHERE bytes = 0").fetchall())
        with self._guard:
            recent = self._unknown | self._waiting
        return gone | {digest: entry.frequency for digest, entry in recent.items()}

    def entry(self, digest: str) -> Entry:
        """All that is known of a value, with what waits."""
        with self.connection() as sql:
            found = _read(sql, digest)
        found = found or self._unknown.get(digest, Entry(digest, 0))
        later = self._waiting.get(digest, Entry(digest, 0))
        return joined(found, later._replace(used_at=0.0), None)

    def sizes(self) -> dict[str, int]:
        """The bytes of every value that it takes for stored."""
        with self.connection() as sql:
            return dict(sql.execute("SELECT digest, bytes FROM Uses WHERE bytes > 0").fetchall())

    def totals(self) -> dict[str, Counts]:
        """What all processes did on each tier, by its name, this one included."""
        with self.connection() as sql:
            rows = sql.execute("SELECT tier, hits, misses, evictions, quarantined FROM Totals").fetchall()
        found = {tier: Counts(*counts) for tier, *counts in rows}
        own = {tier: each.waiting for tier, each in self._counters.items()}
        return {tier: found.get(tier, Counts()) + own.get(tier, Counts()) for tier in {**own, **found}}

    # --- changing

    @contextmanager
    def changing(self, counts_at_least: int = 1) -> Iterator["Change"]:
        """All or nothing; retrievals that wait, and counts, if they are so many, go into it. StoreError."""
        count, taken = self._take()
        counted = {tier: each.take(counts_at_least) for tier, each in self._counters.items()}
        try:
            with self.transaction() as sql:
                change = Change(sql, self.policy, self._unknown)
                change.use(taken, count)
                yield change
                if self._evicted + change.evicted >= _TRIM_EVERY:
                    change.trim(self._remembered)
                change.save(counted)
        except BaseException:
            self._give_back(count, taken)
            for tier, each in self._counters.items():
                each.give_back(counted[tier])
            raise
        self.policy, self._evicted = change.policy, (self._evicted + change.evicted) % _TRIM_EVERY
        for digest, entry in change.unknown.items():
            later = joined(self._unknown.pop(digest, Entry(digest, 0)), entry, half_life_of(self.policy))
            _remember(self._unknown, later, self._remembered)

    def settle(self, stored: Mapping[str, int], parent_of: ParentOf) -> None:
        """Bring the rows in line with what is stored, by digest and bytes, and rank by the policy wanted.

        parent_of: the node that a value stands behind, asked of those without a row.
        """
        with self.changing() as change:
            change.settle(stored, self._wanted, parent_of)
            change.trim(self._remembered)
        self._wanted = None


class Change:
    """The ledger inside a transaction. unknown: retrievals without a row to be written to; before: of earlier ones.

    grown_bytes: by how much the values' bytes have grown in it.
    """

    def __init__(self, sql: sqlite3.Connection, otherwise: Policy, before: dict[str, Entry]) -> None:
        self._sql, self.evicted, self.grown_bytes = sql, 0, 0
        self._row = sql.execute("SELECT policy, uses, clock FROM Ranking").fetchone()
        row: tuple[str, float, float] = self._row or (otherwise.name, 0.0, 0.0)
        name, self._uses, self._clock = row
        self.policy, self.unknown = POLICIES.get(name, otherwise), dict[str, Entry]()
        self._before = before

    def use(self, waiting: Mapping[str, Entry], count: float) -> None:
        """Write retrievals, as later than all that others have written."""
        shift, half_life = self._uses, half_life_of(self.policy)
        self._uses += count
        for entry in waiting.values():
            later = entry._replace(used_at=entry.used_at + shift)
            found = _read(self._sql, entry.digest)
            if found is None:
                self.unknown[entry.digest] = later
            else:
                self._write(joined(found, later, half_life))

    def arrive(self, digest: str, nbytes: int, cost: float, parent: str | None = None) -> None:
        """Rank a value that was computed, at `cost` a token; one that nobody has asked for counts as used once.

        Else all that one ingests would go before anything that was asked for once, however long ago.
        """
        nothing, found = Entry(digest, 0), _read(self._sql, digest)
        self.grown_bytes += nbytes - (found or nothing).nbytes
        before, asked = self._before.pop(digest, nothing), self.unknown.pop(digest, nothing)
        if found is None and self.policy.fades:
            found = joined(before, asked, half_life_of(self.policy))
        entry = computed((found or nothing)._replace(nbytes=nbytes), cost)
        if not entry.frequency:
            entry = self._used_once(entry)
        self._write(entry)
        self._place(digest, parent)

    def in_order(self, spare: str) -> Iterator[Entry]:
        """The values but `spare` that no other stands behind, the one to evict first first.

        Each is looked up when it is asked for. It ends with one that has a parent, which may be next when that is
        evicted: ask again then.
        """
        for entry in map(Entry._make, self._sql.execute(_IN_ORDER, (spare,))):
            yield entry
            if self._sql.execute("SELECT 1 FROM Branches WHERE digest = ?", (entry.digest,)).fetchone():
                return

    def _place(self, digest: str, parent: str | None) -> None:
        if parent is not None:
            self._sql.execute("INSERT OR REPLACE INTO Branches VALUES (?, ?)", (digest, parent))

    def evict(self, victims: Collection[Entry]) -> None:
        """These were evicted: the clock moves on, and their counts go on if the policy wants them."""
        for victim in victims:
            self.grown_bytes -= victim.nbytes
            if self.policy.fades:
                self._write(victim._replace(nbytes=0))
            else:
                self._delete(victim.digest)
        self._clock = clock_after(self._clock, victims)
        self.evicted += len(victims)

    def forget(self, digests: Iterable[str]) -> None:
        """These were deleted: nothing of them may stay, their counts included."""
        for digest in digests:
            self.grown_bytes -= (_read(self._sql, digest) or Entry(digest, 0)).nbytes
            self._delete(digest)
            self._before.pop(digest, None)
            self.unknown.pop(digest, None)

    def below(self, digest: str) -> list[str]:
        """That value, and every node that stands behind it."""
        return tree.below(self._sql, digest)

    def unreachable(self) -> list[str]:
        """Nodes that stand behind what is not stored."""
        return tree.unreachable(self._sql)

    def keep_only(self, wanted: Collection[str]) -> None:
        """Forget every other value."""
        rows = {digest for (digest,) in self._sql.execute("SELECT digest FROM Uses")}
        self.forget((rows | set(self._before) | set(self.unknown)) - set(wanted))

    def _delete(self, digest: str) -> None:
        for table in ("Uses", "Branches"):
            self._sql.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))

    def settle(self, stored: Mapping[str, int], wanted: Policy | None, parent_of: ParentOf) -> None:
        """See `Ledger.settle`; what no row tells of was put in the order of `stored`."""
        self._rank_anew(wanted or self.policy)
        known = {entry.digest: entry for entry in map(Entry._make, self._sql.execute(_SELECT).fetchall())}
        for digest in [digest for digest, entry in known.items() if entry.nbytes and digest not in stored]:
            self._delete(digest)  # a row of what was deleted may not become a memory of it
        for digest, nbytes in stored.items():
            entry = known.get(digest, Entry(digest, 0))
            if not entry.nbytes:
                self._write(self._used_once(Entry(digest, nbytes)))
                self._place(digest, parent_of(digest))
            elif entry.nbytes != nbytes:  # replaced, and the ledger had not heard of it
                self._write(entry._replace(nbytes=nbytes))

    def _rank_anew(self, policy: Policy) -> None:
        """By another policy than the rows were, also one that is no more, in the order of use."""
        if self._row is not None and self._row[0] == policy.name:
            return
        self.policy, self._clock = policy, 0.0
        if not policy.fades:
            self.trim(0)
        rows = self._sql.execute(f"{_SELECT} ORDER BY used_at, digest").fetchall()
        for entry in map(Entry._make, rows):
            self._write(entry)
            self._uses = max(self._uses, entry.used_at)

    def trim(self, at_most: int) -> None:
        """Of what is not stored the longest unused are forgotten."""
        self._sql.execute(_TOO_MANY_GONE, (at_most,))
        self._sql.execute(tree.FORGET_GONE)

    def save(self, counted: Mapping[str, Counts]) -> None:
        row = self.policy.name, self._uses, self._clock
        self._sql.execute("INSERT OR REPLACE INTO Ranking VALUES (1, ?, ?, ?)", row)
        for tier, counts in counted.items():
            if counts != Counts():
                self._sql.execute(_ADD, (tier, *astuple(counts)))

    def _used_once(self, entry: Entry) -> Entry:
        self._uses += 1.0
        return entry._replace(used_at=self._uses, frequency=1.0)

    def _write(self, entry: Entry) -> None:
        entry = ranked(entry, self.policy, self._clock)
        row = (entry.used_at, entry.frequency, entry.cost, entry.computations, entry.priority)
        self._sql.execute(_WRITE, (entry.digest, entry.nbytes, *row))


def _read(sql: sqlite3.Connection, digest: str) -> Entry | None:
    found = sql.execute(f"{_SELECT} WHERE digest = ?", (digest,)).fetchone()
    return None if found is None else Entry._make(found)


def _remember(entries: dict[str, Entry], entry: Entry, at_most: int) -> None:
    """Add it as the latest; the first ones go where there are too many."""
    entries[entry.digest] = entry
    while len(entries) > at_most:
        del entries[next(iter(entries))]
