"""What every SQLite file of ours needs: transactions, what damage looks like, errors with names. No torch in here."""

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from diskcache import Timeout

from ragblend.kvstore.errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError

BUSY_SECONDS = 30.0
BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# The last, because SQLite quotes the damaged text of a schema in its message, and Python decodes that strictly.
SQL_ERRORS = (sqlite3.Error, Timeout, UnicodeDecodeError)


_RETRY_SECONDS = 0.005


def connect(path: Path) -> sqlite3.Connection:
    """A connection that threads may share and that waits for other processes; transactions are begun by hand."""
    return sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)


def write_ahead(sql: sqlite3.Connection, synchronous: str = "NORMAL") -> None:
    """Journal ahead, and overwrite what is deleted; whoever else opens the file at that moment is waited for.

    SQLite itself does not wait there: it asks for the lock out of a read, where two could wait for each other.
    """
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            sql.execute("PRAGMA journal_mode = WAL").fetchall()
            break
        except sqlite3.OperationalError as error:
            if error_code(error) not in BUSY or time.monotonic() > give_up:
                raise
        time.sleep(_RETRY_SECONDS)
    for pragma in (f"synchronous = {synchronous}", "secure_delete = ON"):
        sql.execute(f"PRAGMA {pragma}").fetchall()


def connect_rebuildable(
    path: Path, schema: str, version: int, refused: Callable[[int], StoreFormatError]
) -> sqlite3.Connection:
    """Open or make a file whose content can be had again; sqlite3.DatabaseError (SQLITE_CORRUPT) if it is damaged.

    schema: statements that may be run again; refused(found): the error for a file of another version, which is left
    as it is.
    """
    sql = connect(path)
    try:
        found = sql.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, version):
            raise refused(found)
        if problems := integrity(sql, 1):
            damage = sqlite3.DatabaseError(problems[0])
            damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
            raise damage
        write_ahead(sql)
        sql.executescript(schema)
        sql.execute(f"PRAGMA user_version = {version}")
    except BaseException:
        sql.close()
        raise
    return sql


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
