"""Rows of how values were used, one at a time: what is known of a value, and entering it where it belongs in the order.

All functions take a connection inside a transaction; who calls them, and why, is in uses.py.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ragblend.kvstore.policy import HALF_LIFE_USES, LARGEST, POLICIES, Entry, Policy, is_count, ranked, sound

# Uses: of what is stored, by the rowid of its row in Cache, so that 100,000 are soon checked and joined. Gone: of what
# was evicted, whose count goes on (RAGCache's frequency counts retrievals, found or not).
SCHEMA = """
CREATE TABLE IF NOT EXISTS Uses (
    cache_row INTEGER PRIMARY KEY, priority REAL NOT NULL, used_at REAL NOT NULL, frequency REAL NOT NULL,
    cost REAL NOT NULL, computations INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS UsesInOrder ON Uses (priority, used_at);
CREATE TABLE IF NOT EXISTS Gone (
    digest TEXT PRIMARY KEY, used_at REAL NOT NULL, frequency REAL NOT NULL, cost REAL NOT NULL,
    computations INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS Ranking (
    only INTEGER PRIMARY KEY, policy TEXT NOT NULL, uses REAL NOT NULL, clock REAL NOT NULL
);
DROP INDEX IF EXISTS GoneInOrder;
"""
# What stores of before have in their schema as well, until they are opened.
FORMER = frozenset({("GoneInOrder", "CREATE INDEX GoneInOrder ON Gone (used_at)")})
_FIELDS = """Cache.key, size, Uses.used_at, 0, Uses.frequency, Uses.cost, Uses.computations, priority, Cache.rowid,
    filename"""
_STORED = f"SELECT {_FIELDS} FROM Cache LEFT JOIN Uses ON cache_row = Cache.rowid WHERE raw = 1"
_GONE_FIELDS = "digest, 0, Gone.used_at, 0, Gone.frequency, Gone.cost, Gone.computations, Gone.used_at"
_GONE = f"SELECT {_GONE_FIELDS} FROM Gone WHERE digest = ?"
_STATE = "SELECT policy, uses, clock FROM Ranking"
# What there is to know before a value comes in, by one statement. Triggers of diskcache keep the size: to add up
# 100,000 rows takes longer than all the rest of a put.
_KNOWN = f"""SELECT policy, uses, clock, (SELECT value FROM Settings WHERE key = 'size'),
    {_FIELDS}, {_GONE_FIELDS}
    FROM (SELECT 1) LEFT JOIN Ranking LEFT JOIN Cache ON Cache.key = ?1 AND raw = 1
    LEFT JOIN Uses ON cache_row = Cache.rowid LEFT JOIN Gone ON digest = ?1"""
# CROSS JOIN: in this order, so that the first rows are there without sorting the rest.
_IN_ORDER = f"""SELECT {_FIELDS} FROM Uses CROSS JOIN Cache ON Cache.rowid = cache_row
    WHERE key != ? AND raw = 1 ORDER BY priority, used_at, cache_row"""
_SOUND = """typeof(priority) = 'real' AND ABS(priority) < ? AND typeof(used_at) = 'real' AND used_at BETWEEN 0 AND ?
    AND typeof(frequency) = 'real' AND frequency BETWEEN 0 AND ? AND typeof(cost) = 'real' AND cost BETWEEN 0 AND ?
    AND typeof(computations) = 'integer' AND computations >= 0"""
# One pass for both: rows of no value, and damaged ones.
_AMISS = (
    f"SELECT cache_row FROM Uses LEFT JOIN Cache ON rowid = cache_row WHERE raw IS NOT 1 OR NOT ({_SOUND})"
)
_TOO_MANY_GONE = """DELETE FROM Gone WHERE digest IN (SELECT digest FROM Gone ORDER BY used_at, digest
    LIMIT MAX(0, (SELECT COUNT(*) FROM Gone) - ?))"""


class State(NamedTuple):
    """What holds for the whole tier, of all processes."""

    policy: Policy
    uses: float
    clock: float


class Stored(NamedTuple):
    """A value that is stored: what is known of it, and its row; known False: nothing is, beside its bytes."""

    entry: Entry
    rowid: int
    filename: str | None
    known: bool


class Known(NamedTuple):
    """What is known before a value comes in. before: its own row, if it is replaced; gone: of its evicted self."""

    state: State
    stored_bytes: int
    before: Stored | None
    gone: Entry | None


def half_life_of(policy: Policy) -> float | None:
    """Of a retrieval, in uses; None if all count alike."""
    return HALF_LIFE_USES if policy.fades else None


def _entry(fields: Sequence[Any]) -> Entry:
    return sound(Entry(*fields[:8]))


def _found(fields: Sequence[Any]) -> Stored:
    size = fields[1] if is_count(fields[1]) else 0
    known = fields[2] is not None
    entry = _entry((fields[0], size, *fields[2:8])) if known else Entry(fields[0], size)
    return Stored(entry, fields[8], fields[9], known)


def read_known(sql: sqlite3.Connection, digest: str, otherwise: Policy) -> Known:
    """What there is to know before that value comes in; `otherwise` as in `read_state`."""
    fields = sql.execute(_KNOWN, (digest,)).fetchone()
    stored, gone = fields[4:14], fields[14:]
    return Known(
        _state(sql, fields[:3], otherwise),
        int(fields[3] or 0),
        None if stored[0] is None else _found(stored),
        None if gone[0] is None else _entry(gone),
    )


def read_stored(sql: sqlite3.Connection, digest: str) -> Stored | None:
    """That value; None if it is not stored."""
    fields = sql.execute(f"{_STORED} AND key = ?", (digest,)).fetchone()
    return None if fields is None else _found(fields)


def in_order(sql: sqlite3.Connection, spare: str) -> Iterator[Stored]:
    """The values but `spare`, the one to evict first first; each is looked up when it is asked for."""
    return map(_found, sql.execute(_IN_ORDER, (spare,)))


def enter(sql: sqlite3.Connection, state: State, rowid: int, entry: Entry) -> None:
    """Put a stored value where its entry belongs in the order."""
    entry = ranked(entry, state.policy, state.clock)
    row = (rowid, entry.priority, entry.used_at, entry.frequency, entry.cost, entry.computations)
    sql.execute("INSERT OR REPLACE INTO Uses VALUES (?, ?, ?, ?, ?, ?)", row)


def read_gone(sql: sqlite3.Connection, digest: str) -> Entry | None:
    """What is remembered of a value that was evicted."""
    fields = sql.execute(_GONE, (digest,)).fetchone()
    return None if fields is None else _entry(fields)


def keep(sql: sqlite3.Connection, entry: Entry) -> None:
    """Remember a value that is not stored."""
    row = (entry.digest, entry.used_at, entry.frequency, entry.cost, entry.computations)
    sql.execute("INSERT OR REPLACE INTO Gone VALUES (?, ?, ?, ?, ?)", row)


def forget(sql: sqlite3.Connection, digest: str) -> None:
    """Remember it no longer."""
    sql.execute("DELETE FROM Gone WHERE digest = ?", (digest,))


def trim_gone(sql: sqlite3.Connection, at_most: int) -> None:
    """The longest unused are forgotten."""
    sql.execute(_TOO_MANY_GONE, (at_most,))


def mend(sql: sqlite3.Connection, state: State) -> None:
    """Drop rows of no value; what is damaged counts as never used."""
    for (rowid,) in sql.execute(_AMISS, (LARGEST,) * 4).fetchall():
        fields = sql.execute(f"{_STORED} AND Cache.rowid = ?", (rowid,)).fetchone()
        if fields is None:
            sql.execute("DELETE FROM Uses WHERE cache_row = ?", (rowid,))
        else:
            enter(sql, state, rowid, _found(fields).entry)


def rank_anew(sql: sqlite3.Connection, state: State) -> State:
    """By another policy than the rows were, in the order of use."""
    for fields in sql.execute(f"{_STORED} AND cache_row IS NOT NULL ORDER BY used_at, cache_row").fetchall():
        found = _found(fields)
        enter(sql, state, found.rowid, found.entry)
    if not state.policy.fades:
        sql.execute("DELETE FROM Gone")
    return state


def rank_the_unranked(sql: sqlite3.Connection, state: State) -> State:
    """Values without a row here (of an older version, or entered into a new index), as put one after the other."""
    counts = sql.execute("SELECT (SELECT COUNT(*) FROM Uses), (SELECT COUNT(*) FROM Cache)").fetchone()
    if counts[0] == counts[1]:
        return state
    for fields in sql.execute(
        f"{_STORED} AND cache_row IS NULL ORDER BY access_time, Cache.rowid"
    ).fetchall():
        state, found = state._replace(uses=state.uses + 1.0), _found(fields)
        enter(sql, state, found.rowid, found.entry._replace(used_at=state.uses, frequency=1.0))
    return state


def read_state(sql: sqlite3.Connection, otherwise: Policy) -> State:
    """What holds for all values; `otherwise` ranks them where no known policy is named."""
    return _state(sql, sql.execute(_STATE).fetchone() or (None, None, None), otherwise)


def _state(sql: sqlite3.Connection, fields: Sequence[Any], otherwise: Policy) -> State:
    name, uses, clock = fields
    policy = POLICIES.get(name, otherwise)
    if is_count(uses) and isinstance(clock, float) and is_count(abs(clock)):
        return State(policy, float(uses), clock)
    # New, or damaged: numbering goes on behind the latest use, the clock from the lowest value's priority.
    (latest,) = sql.execute("SELECT MAX(used_at) FROM Uses WHERE used_at < ?", (LARGEST,)).fetchone()
    lowest_sound = "SELECT MIN(priority) FROM Uses WHERE priority BETWEEN 0 AND ?"
    (lowest,) = sql.execute(lowest_sound, (LARGEST,)).fetchone()
    return State(policy, float(latest or 0.0), float(lowest or 0.0))


def save_state(sql: sqlite3.Connection, state: State) -> None:
    row = state.policy.name, state.uses, state.clock
    sql.execute("INSERT OR REPLACE INTO Ranking VALUES (1, ?, ?, ?)", row)
