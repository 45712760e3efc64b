"""What every SQLite file of ours needs: transactions, what damage looks like, errors with names. No torch in here."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from diskcache import Timeout

from ragblend.kvstore.errors import StoreError, StoreFullError, StoreLockedError

BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# The last, because SQLite quotes the damaged text of a schema in its message, and Python decodes that strictly.
SQL_ERRORS = (sqlite3.Error, Timeout, UnicodeDecodeError)


def lenient_text(raw: bytes) -> str:
    """Text as SQLite has it: a damaged row must be listed to be removed, so it may not raise while it is read."""
    return raw.decode("utf-8", "replace")


def integrity(sql: sqlite3.Connection, at_most: int) -> list[str]:
    """What SQLite finds wrong with a file; also what it raises when the file is too damaged to look at."""
    try:
        found = [str(line) for (line,) in sql.execute(f"PRAGMA integrity_check({at_most})")]
    except UnicodeDecodeError as error:
        return [f"its schema is not text: {error}"]
    except sqlite3.DatabaseError as error:
        if error_code(error) not in DAMAGED:
            raise
        return [str(error)]
    return [] if found == ["ok"] else found


@contextmanager
def transaction(sql: sqlite3.Connection) -> Iterator[None]:
    """All or nothing. SQLite itself rolls back on a full disk; doing so again would raise, and hide why."""
    sql.execute("BEGIN IMMEDIATE")
    try:
        yield
        sql.execute("COMMIT")
    except BaseException:
        if sql.in_transaction:
            sql.execute("ROLLBACK")
        raise


def error_code(error: Exception) -> int:
    """SQLite's primary code; 0 for what Python's module raises by itself (text that is not UTF-8, say)."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def index_failed(error: Exception, path: Path) -> StoreError:
    """The named error for an exception out of SQLite or diskcache."""
    if isinstance(error, Timeout) and isinstance(error.__context__, sqlite3.Error):
        error = error.__context__  # diskcache calls every failed BEGIN a timeout, a full disk too
    code = error_code(error)
    if code in BUSY or isinstance(error, Timeout):
        return StoreLockedError(
            f"using {path}: another program kept it locked. Close that program, or try again."
        )
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(
            f"writing to {path}: the disk is full. Free some space; what is stored is untouched."
        )
    return StoreError(
        f"using {path} failed: {error}. If it persists, close every program that uses this home and run "
        "`ragblend store repair`; KV can be rebuilt, and no document is in there."
    )
