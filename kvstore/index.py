"""Our own view of diskcache's table: plain SQL for what its interface lacks (sizes, order, exact removal).

The order of use is diskcache's `access_time` column, which its policy "none" never writes after the insert.
Touches wait in memory and are written in one go at the next change: a hit costs no write and no fsync.
"""

import math
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diskcache.core import MODE_BINARY

from ragblend.kvstore.disk import INDEX_NAME, digest_in
from ragblend.kvstore.files import identity, is_same_file
from ragblend.kvstore.layout import ValueFile
from ragblend.kvstore.policy import Entry
from ragblend.kvstore.sqlite import SQL_ERRORS, index_failed, integrity, lenient_text, transaction

COLUMNS = "rowid, key, raw, size, mode, filename, value IS NOT NULL, access_time"
_ROW = f"SELECT {COLUMNS} FROM Cache"
_INSERT = """INSERT OR IGNORE INTO Cache (key, raw, store_time, access_time, size, mode, filename)
    VALUES (?, 1, ?, ?, ?, ?, ?)"""
_LATER = "SELECT rowid FROM Cache WHERE access_time > ? ORDER BY access_time DESC"


@dataclass(frozen=True)
class Row:
    """One row as it is found, whoever wrote it."""

    rowid: int
    key: object
    raw: object
    size: object
    mode: object
    filename: object
    has_value: int
    access_time: object

    @property
    def digest(self) -> str | None:
        """The key, if this row is one that the store could have written; None for a foreign row."""
        digest = digest_in(self.filename)
        ours = self.raw == 1 and self.mode == MODE_BINARY and not self.has_value
        return digest if ours and digest == self.key and isinstance(self.size, int) else None

    @property
    def entry(self) -> Entry:
        """What the eviction policy sees; a foreign row or an impossible size weighs nothing."""
        size = self.size if isinstance(self.size, int) and self.size > 0 else 0
        used_at = self.access_time if isinstance(self.access_time, float) else 0.0
        return Entry(str(self.key), size, used_at if math.isfinite(used_at) else 0.0)


class Index:
    """A connection of our own to the store's SQLite file, safe to share between threads."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.path = root / INDEX_NAME
        self._lock = threading.Lock()
        self._touched: dict[str, float] = {}
        self._now = 0.0
        self._sql = sqlite3.connect(
            self.path, timeout=timeout_s, isolation_level=None, check_same_thread=False, cached_statements=16
        )
        self._sql.text_factory = lenient_text
        self._sql.execute("PRAGMA secure_delete = 1")
        self._sql.execute("PRAGMA synchronous = 1")
        self._identity = identity(self.path.stat())

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._lock:
                yield self._sql
        except SQL_ERRORS as error:
            raise index_failed(error, self.path) from error

    def rows(self) -> list[Row]:
        with self._connection() as sql:
            return [Row(*fields) for fields in sql.execute(_ROW + " ORDER BY rowid")]

    def row(self, digest: str) -> Row | None:
        with self._connection() as sql:
            fields = sql.execute(_ROW + " WHERE key = ? AND raw = 1", (digest,)).fetchone()
        return Row(*fields) if fields else None

    def totals(self) -> tuple[int, int]:
        """How many values there are, and their bytes."""
        with self._connection() as sql:
            count, nbytes = sql.execute("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM Cache").fetchone()
        return int(count), int(nbytes)

    def value_of(self, rowid: int) -> bytes:
        """What a foreign row holds inline, as bytes, for the quarantine; never decoded."""
        with self._connection() as sql:
            found = sql.execute("SELECT CAST(value AS BLOB) FROM Cache WHERE rowid = ?", (rowid,)).fetchone()
        return bytes(found[0]) if found and found[0] is not None else b""

    def remove(self, rowid: int) -> bool:
        """Remove a row, found under the writer's lock; False if there is none."""
        with self._connection() as sql:
            return sql.execute("DELETE FROM Cache WHERE rowid = ?", (rowid,)).rowcount == 1

    def insert(self, files: Iterable[ValueFile]) -> int:
        """Enter value files that no row names, in one transaction; how many whose key had no row."""
        now = time.time()
        rows = [(file.digest, now, now, file.nbytes, MODE_BINARY, file.filename) for file in files]
        with self._connection() as sql, transaction(sql):
            return sql.executemany(_INSERT, rows).rowcount if rows else 0

    def touch(self, digest: str) -> None:
        """Note that a value was used now; written by the next `flush_touches`."""
        with self._lock:
            # Two uses within one tick of the clock keep their order.
            self._now = max(time.time(), self._now + 1e-6)
            self._touched[digest] = self._now

    def stored(self, digest: str) -> None:
        """Note a put: diskcache stamped it with the clock's time, which may have been set back meanwhile."""
        if time.time() <= self._now:
            self.touch(digest)

    def forget_the_future(self) -> None:
        """What was used later than now (the clock was set back) was used just now, in the same order.

        Otherwise it would stay for ever, and everything new would be the first to go.
        """
        now = time.time()
        with self._connection() as sql:
            later = sql.execute(_LATER, (now,)).fetchall()
            if later:
                stamps = [(now - 1e-6 * before, *row) for before, row in enumerate(later)]
                with transaction(sql):
                    sql.executemany("UPDATE Cache SET access_time = ? WHERE rowid = ?", stamps)
        self._now = max(self._now, now)

    def is_in_place(self) -> bool:
        """Whether this is still the store's index: another process may have set it aside."""
        return is_same_file(self.path, self._identity)

    def flush_touches(self) -> None:
        with self._connection() as sql:
            if self._touched:
                _write_touches(sql, self._touched.items())
                self._touched = {}

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with its own file."""
        with self._connection() as sql:
            return integrity(sql, 20)

    def truncate_log(self) -> None:
        """Empty the write-ahead log, in which deleted rows would linger; a reader at work can put it off."""
        with self._connection() as sql:
            sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock:
            self._sql.close()


def _write_touches(sql: sqlite3.Connection, touched: Iterable[tuple[str, float]]) -> None:
    newest_first = [(used_at, digest, used_at) for digest, used_at in touched]
    with transaction(sql):
        sql.executemany(
            "UPDATE Cache SET access_time = ? WHERE key = ? AND raw = 1 AND access_time < ?", newest_first
        )
