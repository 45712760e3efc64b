"""Our own view of diskcache's table: plain SQL for what its interface lacks, and the tables beside it."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diskcache.core import MODE_BINARY

from ragblend.kvstore import stats, use_rows
from ragblend.kvstore.disk import INDEX_NAME, digest_in
from ragblend.kvstore.files import identity, is_same_file
from ragblend.kvstore.layout import ValueFile
from ragblend.kvstore.sqlite import SQL_ERRORS, index_failed, integrity, lenient_text, transaction

COLUMNS = "rowid, key, raw, size, mode, filename, value IS NOT NULL"
_ROW = f"SELECT {COLUMNS} FROM Cache"
# Rows that the store could have written, as bytes: a damaged name need not be text.
_NAMED = f"""SELECT CAST(filename AS BLOB), size FROM Cache WHERE raw = 1 AND mode = {MODE_BINARY} AND value IS NULL
    AND CAST(key AS BLOB) = substr(CAST(filename AS BLOB), {len("values/ab/") + 1}, 64)"""
_INSERT = """INSERT OR IGNORE INTO Cache (store_time, access_time, size, mode, filename, key, raw)
    VALUES (?1, ?1, ?2, ?3, ?4, ?5, 1)"""
_SET = """UPDATE Cache SET store_time = ?1, access_time = ?1, size = ?2, mode = ?3, filename = ?4, key = ?5, raw = 1,
    value = NULL, tag = NULL"""
# SQLite writes the index of a column anew whenever the column is named, so it is only where a foreign row filled it.
_UPDATE = f"{_SET} WHERE rowid = ?6 AND expire_time IS NULL"
_UPDATE_FOREIGN = f"{_SET}, expire_time = NULL WHERE rowid = ?6"
# Kept by diskcache's triggers: counting 100,000 rows takes longer than all the rest of a put.
_TOTALS = (
    "SELECT SUM(value) FILTER (WHERE key = 'count'), SUM(value) FILTER (WHERE key = 'size') FROM Settings"
)
_COUNT = "SELECT COUNT(*), COALESCE(SUM(size), 0) FROM Cache"


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

    @property
    def digest(self) -> str | None:
        """The key, if this row is one that the store could have written; None for a foreign row."""
        digest = digest_in(self.filename)
        ours = self.raw == 1 and self.mode == MODE_BINARY and not self.has_value
        return digest if ours and digest == self.key and isinstance(self.size, int) else None


class Index:
    """A connection of our own to the store's SQLite file, safe to share between threads."""

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.path = root / INDEX_NAME
        self._lock = threading.Lock()
        self._sql = sqlite3.connect(
            self.path, timeout=timeout_s, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        try:
            self._sql.text_factory = lenient_text
            for setting in ("secure_delete = 1", "synchronous = 1"):
                self._sql.execute(f"PRAGMA {setting}")
            self._sql.executescript(use_rows.SCHEMA + stats.SCHEMA)
            self._identity = identity(self.path.stat())
        except BaseException:
            self._sql.close()
            raise

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """For statements of one's own, one thread at a time. Whatever SQLite says becomes a StoreError."""
        try:
            with self._lock:
                yield self._sql
        except SQL_ERRORS as error:
            raise index_failed(error, self.path) from error

    @contextmanager
    def transaction(self, committed: Callable[[], None] = lambda: None) -> Iterator[sqlite3.Connection]:
        """All or nothing, for the tables beside diskcache's; `committed` is called if it was all. StoreError."""
        with self.connection() as sql:
            with transaction(sql):
                yield sql
            committed()

    def rows(self) -> list[Row]:
        """All of them, as they were written; a row that was handed on has the number of an older one."""
        with self.connection() as sql:
            return [Row(*fields) for fields in sql.execute(_ROW + " ORDER BY store_time, rowid")]

    def compared(self, files: Set[tuple[bytes, int]]) -> tuple[list[Row], set[tuple[bytes, int]]]:
        """Rows that cannot be true, given name and size of every file; and the files that the other rows name.

        For 100,000 rows, so two sets are compared, and no `Row` is made where all is in order.
        """
        with self.connection() as sql:
            named = set(sql.execute(_NAMED).fetchall())
            (count,) = sql.execute("SELECT COUNT(*) FROM Cache").fetchone()
        if len(named) == count and named <= files:
            return [], named
        named &= files
        return [row for row in self.rows() if not _is_named(row, named)], named

    def row(self, digest: str) -> Row | None:
        with self.connection() as sql:
            fields = sql.execute(_ROW + " WHERE key = ? AND raw = 1", (digest,)).fetchone()
        return Row(*fields) if fields else None

    def totals(self) -> tuple[int, int]:
        """How many values there are, and their bytes."""
        with self.connection() as sql:
            return totals(sql)

    def count_anew(self) -> None:
        """Count the rows, for when the totals may be damaged."""
        with self.transaction() as sql:
            counted = sql.execute(_COUNT).fetchone()
            if sql.execute(_TOTALS).fetchone() != counted:
                pairs = zip(counted, ("count", "size"), strict=True)
                sql.executemany("UPDATE Settings SET value = ? WHERE key = ?", pairs)

    def value_of(self, rowid: int) -> bytes:
        """What a foreign row holds inline, as bytes, for the quarantine; never decoded."""
        with self.connection() as sql:
            found = sql.execute("SELECT CAST(value AS BLOB) FROM Cache WHERE rowid = ?", (rowid,)).fetchone()
        return bytes(found[0]) if found and found[0] is not None else b""

    def remove(self, rowid: int) -> bool:
        """Remove a row, found under the writer's lock; False if there is none."""
        with self.transaction() as sql:
            return drop(sql, rowid)

    def insert(self, files: Iterable[ValueFile]) -> int:
        """Enter value files that no row names, in one transaction; how many whose key had no row."""
        now = time.time()
        rows = [(now, file.nbytes, MODE_BINARY, file.filename, file.digest) for file in files]
        with self.connection() as sql, transaction(sql):
            return sql.executemany(_INSERT, rows).rowcount if rows else 0

    def is_in_place(self) -> bool:
        """Whether this is still the store's index: another process may have set it aside."""
        return is_same_file(self.path, self._identity)

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with its own file."""
        with self.connection() as sql:
            return integrity(sql, 20)

    def truncate_log(self) -> None:
        """Empty the write-ahead log, in which deleted rows would linger; a reader at work can put it off."""
        with self.connection() as sql:
            sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._lock:
            self._sql.close()


def _is_named(row: Row, named: Set[tuple[bytes, int]]) -> bool:
    return row.digest is not None and (str(row.filename).encode(), row.size) in named


def totals(sql: sqlite3.Connection) -> tuple[int, int]:
    """How many values there are, and their bytes."""
    count, nbytes = sql.execute(_TOTALS).fetchone()
    return int(count or 0), int(nbytes or 0)


def enter(sql: sqlite3.Connection, digest: str, filename: str, nbytes: int, rowid: int | None) -> int:
    """Let a row say that this key's value is in that file: the given one, whatever it said, or a new one; which it was.

    As diskcache's `set` does, but in a transaction that evicting and counting are part of too.
    """
    columns = (time.time(), nbytes, MODE_BINARY, filename, digest)
    if rowid is None:
        entered = sql.execute(_INSERT, columns).lastrowid
        assert entered is not None, digest
        return entered
    if sql.execute(_UPDATE, (*columns, rowid)).rowcount == 0:
        sql.execute(_UPDATE_FOREIGN, (*columns, rowid))
    return rowid


def drop(sql: sqlite3.Connection, rowid: int) -> bool:
    """Remove a row, and what is known of the value's use; False if there is none."""
    sql.execute("DELETE FROM Uses WHERE cache_row = ?", (rowid,))
    return sql.execute("DELETE FROM Cache WHERE rowid = ?", (rowid,)).rowcount == 1
