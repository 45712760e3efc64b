"""Uses: how often each value on the disk was asked for and what it costs, and therefore which one goes next.

The arithmetic is policy.py's, as in the memory tiers; the order is kept by an index of SQLite's, in rows beside those
of the store. So a store of 100,000 values opens without reading them, all processes see one order, and a use or a
victim costs O(log n). Uses are numbered: no clock is asked, so none can jump.

Retrievals wait in memory and are written with the next change: a hit costs no write and no fsync. Who is killed before
that loses the order of these uses and nothing else.
"""

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from ragblend.kvstore.policy import (
    DEFAULT_POLICY,
    HALF_LIFE_USES,
    LARGEST,
    POLICIES,
    Entry,
    Policy,
    clock_after,
    computed,
    is_count,
    joined,
    ranked,
    sound,
    used,
)
from ragblend.kvstore.ranking import REMEMBERED

# stored 0: it was evicted, and only its count goes on (RAGCache's frequency counts retrievals, found or not). These
# have used_at as their priority: the longest unused is the first that is forgotten.
SCHEMA = """
CREATE TABLE IF NOT EXISTS Uses (
    digest TEXT PRIMARY KEY, stored INTEGER NOT NULL, priority REAL NOT NULL, used_at REAL NOT NULL,
    frequency REAL NOT NULL, cost REAL NOT NULL, computations INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS UsesInOrder ON Uses (stored, priority, used_at);
CREATE TABLE IF NOT EXISTS Ranking (
    only INTEGER PRIMARY KEY, policy TEXT NOT NULL, uses REAL NOT NULL, clock REAL NOT NULL
);
"""
_FIELDS = "digest, COALESCE(size, 0), used_at, 0, frequency, cost, computations, priority, stored"
_ENTRY = f"SELECT {_FIELDS} FROM Uses LEFT JOIN Cache ON key = digest AND raw = 1"
# CROSS JOIN: in this order, so that the first rows are there without sorting the rest.
_IN_ORDER = f"""SELECT {_FIELDS} FROM Uses CROSS JOIN Cache ON key = digest AND raw = 1
    WHERE stored = 1 AND digest != ? ORDER BY priority, used_at, digest"""
_SOUND = """typeof(priority) = 'real' AND ABS(priority) < ? AND typeof(used_at) = 'real' AND used_at BETWEEN 0 AND ?
    AND typeof(frequency) = 'real' AND frequency BETWEEN 0 AND ? AND typeof(cost) = 'real' AND cost BETWEEN 0 AND ?
    AND typeof(computations) = 'integer' AND computations >= 0 AND stored IN (0, 1)"""
_ORPHANS = """UPDATE Uses SET stored = 0, priority = used_at
    WHERE stored = 1 AND NOT EXISTS (SELECT 1 FROM Cache WHERE key = digest AND raw = 1)"""
_UNKNOWN = """SELECT key FROM Cache WHERE raw = 1 AND NOT EXISTS
    (SELECT 1 FROM Uses WHERE digest = key AND stored = 1) ORDER BY access_time, Cache.rowid"""
_TOO_MANY_GONE = """DELETE FROM Uses WHERE stored = 0 AND digest IN (SELECT digest FROM Uses WHERE stored = 0
    ORDER BY priority, used_at, digest LIMIT MAX(0, (SELECT COUNT(*) FROM Uses WHERE stored = 0) - ?))"""
_TRIM_EVERY = 1000  # evictions: the rows of what is gone are counted one by one


class State(NamedTuple):
    """What holds for the whole tier, of all processes."""

    policy: Policy
    uses: float
    clock: float


class Uses:
    """How values were used, for one process. Methods that take a connection are called inside a transaction of it.

    wanted: what to rank by, None for whatever the rows are ranked by; `settle` makes it everybody's, until somebody
    opens the store who wants another. `policy` is the one that was so when the rows were last looked at.
    """

    def __init__(self, wanted: Policy | None = None, remembered: int = REMEMBERED) -> None:
        self._wanted, self.remembered = wanted, remembered
        self.policy = wanted or POLICIES[DEFAULT_POLICY]
        self._lock = threading.Lock()
        # used_at of what waits counts this process's retrievals; the rows know all but those since _written.
        self._count, self._written = 0.0, 0.0
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        self._flushing: OrderedDict[str, Entry] = OrderedDict()
        self._in_transaction: tuple[float, list[str]] = 0.0, []
        self._evicted = 0

    def used(self, digest: str) -> None:
        """Count a retrieval, found or not; the next `flush` writes it."""
        with self._lock:
            self._count += 1.0
            before = self._waiting.pop(digest, Entry(digest, 0))
            self._waiting[digest] = used(before, self._count, half_life_of(self.policy))
            _forget_oldest(self._waiting, self.remembered)

    @property
    def waiting(self) -> int:
        """Values whose retrievals are not written."""
        return len(self._waiting)

    def flush(self, sql: sqlite3.Connection) -> State:
        """Write the retrievals that wait, as later than all that others have written; what holds then.

        Those of a value without a row (never stored, or deleted) stay in memory until it is put: of what was deleted
        nothing may come back. If the transaction fails, everything still waits.
        """
        state = self._state(sql)
        self.policy = state.policy
        waiting, count = self._waiting_now()
        shift, known = state.uses - self._written, []
        state = state._replace(uses=count + shift)
        for entry in waiting:
            found = sql.execute(f"{_ENTRY} WHERE digest = ?", (entry.digest,)).fetchone()
            if found is not None:
                known.append(entry.digest)
                later = entry._replace(used_at=entry.used_at + shift)
                _enter(sql, state, joined(_entry(found), later, half_life_of(state.policy)), bool(found[-1]))
        self._in_transaction = count, known
        self._save(sql, state)
        return state

    def flushed(self) -> None:
        """The transaction of the last `flush` is committed."""
        with self._lock:
            self._written, known = self._in_transaction
            self._in_transaction = self._written, []
            for digest in known:
                self._flushing.pop(digest, None)

    def stored(self, sql: sqlite3.Connection, digest: str, cost: float) -> None:
        """A value whose row is there was computed, at `cost` a token, and written; nobody having asked counts as once.

        Else all that one ingests would go before anything that was asked for once, however long ago.
        """
        state = self.flush(sql)
        found = sql.execute(f"{_ENTRY} WHERE digest = ?", (digest,)).fetchone()
        entry = _entry(found) if found else self._never_stored(sql, digest, state)
        entry = computed(entry, cost)
        if not entry.frequency:
            state = state._replace(uses=state.uses + 1.0)
            entry = entry._replace(used_at=state.uses, frequency=1.0)
        _enter(sql, state, entry, stored=True)
        self._save(sql, state)

    def victims(self, sql: sqlite3.Connection, excess_bytes: int, spare: str) -> list[Entry]:
        """The lowest values that together free `excess_bytes`; fewer if only `spare` is left."""
        victims: list[Entry] = []
        if excess_bytes > 0:
            for fields in sql.execute(_IN_ORDER, (spare,)):
                victims.append(_entry(fields))
                excess_bytes -= victims[-1].nbytes
                if excess_bytes <= 0:
                    break
        return victims

    def gone(self, sql: sqlite3.Connection, victims: Sequence[Entry]) -> None:
        """These were evicted; the clock moves on, and their counts are kept if the policy wants them."""
        state = self._state(sql)
        for victim in victims:
            if state.policy.fades:
                _enter(sql, state, victim, stored=False)
            else:
                sql.execute("DELETE FROM Uses WHERE digest = ?", (victim.digest,))
        self._save(sql, state._replace(clock=clock_after(state.clock, victims)))
        self._evicted += len(victims)
        if self._evicted >= _TRIM_EVERY:
            self._evicted = 0
            sql.execute(_TOO_MANY_GONE, (self.remembered,))

    def forget(self, sql: sqlite3.Connection, digests: Iterable[str]) -> None:
        """These were deleted: nothing of them may stay, their counts included."""
        for digest in digests:
            sql.execute("DELETE FROM Uses WHERE digest = ?", (digest,))
            with self._lock:
                self._waiting.pop(digest, None)
                self._flushing.pop(digest, None)

    def keep_only(self, sql: sqlite3.Connection, wanted: Collection[str]) -> None:
        """Forget every other value."""
        with self._lock:
            known = {*self._waiting, *self._flushing}
        known.update(digest for (digest,) in sql.execute("SELECT digest FROM Uses"))
        self.forget(sql, known - set(wanted))

    def settle(self, sql: sqlite3.Connection) -> None:
        """Bring the rows in line with the store's after a kill, damage or an older version; rank by our policy."""
        sql.execute(_ORPHANS)
        state, wanted = self._state(sql), self._wanted
        if wanted is not None and wanted.name != state.policy.name:
            state = self._ranked_anew(sql, state._replace(policy=wanted, clock=0.0))
        self._wanted, self.policy = None, state.policy
        for fields in sql.execute(f"{_ENTRY} WHERE NOT ({_SOUND})", (LARGEST,) * 4).fetchall():
            _enter(sql, state, _entry(fields), bool(fields[-1]))
        for (digest,) in sql.execute(_UNKNOWN).fetchall():
            state = state._replace(uses=state.uses + 1.0)
            size = sql.execute("SELECT size FROM Cache WHERE key = ? AND raw = 1", (digest,)).fetchone()[0]
            _enter(sql, state, sound(Entry(digest, size, state.uses, frequency=1.0)), stored=True)
        self._save(sql, state)
        sql.execute(_TOO_MANY_GONE, (self.remembered,))

    def _ranked_anew(self, sql: sqlite3.Connection, state: State) -> State:
        """By another policy than the rows were, in the order of use; what is gone keeps its place."""
        for fields in sql.execute(f"{_ENTRY} WHERE stored = 1 ORDER BY used_at, digest").fetchall():
            _enter(sql, state, _entry(fields), stored=True)
        if not state.policy.fades:
            sql.execute("DELETE FROM Uses WHERE stored = 0")
        return state

    def _state(self, sql: sqlite3.Connection) -> State:
        found: tuple[Any, Any, Any] = sql.execute("SELECT policy, uses, clock FROM Ranking").fetchone() or (
            "",
            None,
            None,
        )
        policy = POLICIES.get(found[0], self.policy)
        if is_count(found[1]) and isinstance(found[2], float) and is_count(abs(found[2])):
            return State(policy, float(found[1]), found[2])
        # New, or damaged: numbering goes on behind the latest use, the clock from the lowest value's priority.
        (latest,) = sql.execute("SELECT MAX(used_at) FROM Uses WHERE used_at < ?", (LARGEST,)).fetchone()
        (lowest,) = sql.execute(
            "SELECT MIN(priority) FROM Uses WHERE stored = 1 AND priority BETWEEN 0 AND ?", (LARGEST,)
        ).fetchone()
        return State(policy, float(latest or 0.0), float(lowest or 0.0))

    def _save(self, sql: sqlite3.Connection, state: State) -> None:
        row = state.policy.name, state.uses, state.clock
        sql.execute("INSERT OR REPLACE INTO Ranking VALUES (1, ?, ?, ?)", row)

    def _waiting_now(self) -> tuple[list[Entry], float]:
        with self._lock:
            half_life = half_life_of(self.policy)
            for digest, entry in self._waiting.items():
                before = self._flushing.pop(
                    digest, None
                )  # of a flush that failed, or of a value without a row
                self._flushing[digest] = joined(before, entry, half_life) if before else entry
            self._waiting.clear()
            _forget_oldest(self._flushing, self.remembered)
            return list(self._flushing.values()), self._count

    def _never_stored(self, sql: sqlite3.Connection, digest: str, state: State) -> Entry:
        (size,) = sql.execute("SELECT size FROM Cache WHERE key = ? AND raw = 1", (digest,)).fetchone() or (
            0,
        )
        with self._lock:
            asked = self._flushing.pop(digest, None)
        if asked is None or not state.policy.fades:  # others count from when the value came in
            return Entry(digest, size)
        return asked._replace(nbytes=size, used_at=asked.used_at + state.uses - self._count)


def half_life_of(policy: Policy) -> float | None:
    """Of a retrieval, in uses; None if all count alike."""
    return HALF_LIFE_USES if policy.fades else None


def _entry(fields: Sequence[Any]) -> Entry:
    return sound(Entry(*fields[:8]))


def _enter(sql: sqlite3.Connection, state: State, entry: Entry, stored: bool) -> None:
    if stored:
        entry = ranked(entry, state.policy, state.clock)
    priority = entry.priority if stored else entry.used_at
    row = (entry.digest, stored, priority, entry.used_at, entry.frequency, entry.cost, entry.computations)
    sql.execute("INSERT OR REPLACE INTO Uses VALUES (?, ?, ?, ?, ?, ?, ?)", row)


def _forget_oldest(entries: OrderedDict[str, Entry], at_most: int) -> None:
    while len(entries) > at_most:
        entries.popitem(last=False)
