"""Opening a store: format, folders, an index that can be trusted, leftovers of whoever was killed here."""

import logging
import shutil
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from diskcache.core import DEFAULT_SETTINGS, METADATA

from ragblend.kvstore import use_rows
from ragblend.kvstore.disk import INDEX_NAME, open_cache
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.files import make_private_folder
from ragblend.kvstore.index import Index
from ragblend.kvstore.layout import LOCK_NAME, check_format, prepare, set_index_aside, value_files
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.mounts import warn_of_network
from ragblend.kvstore.sqlite import BUSY, SQL_ERRORS, error_code, index_failed, integrity, lenient_text
from ragblend.kvstore.upkeep import adopt, sweep
from ragblend.kvstore.uses import Uses

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0
_NOT_DAMAGE = {
    *BUSY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}


@dataclass(frozen=True)
class Opened:
    """What KVStore works with; refused counts the index set aside and the rows that could not be true."""

    lock: WriterLock
    cache: Any
    index: Index
    refused: int


def open_index(root: Path, uses: Uses) -> Opened:
    """Everything open and swept; StoreFormatError, StoreLockedError or StoreError otherwise."""
    try:
        check_format(root)  # before anything is made or tightened in a folder that is not ours
        make_private_folder(root)
        warn_of_network(root)
        lock = WriterLock(root / LOCK_NAME, TIMEOUT_S)
    except OSError as error:
        raise _open_failed(error, root) from error
    try:
        with lock.hold():
            return _open_locked(root, lock, uses)
    except BaseException as error:
        lock.close()
        if isinstance(error, OSError):
            raise _open_failed(error, root) from error
        raise


def default_budget_bytes(root: Path, stored_bytes: int) -> int:
    """A quarter of what values may take there: the disk's free bytes and their own."""
    return (shutil.disk_usage(root).free + stored_bytes) // 4


def _open_failed(error: OSError, root: Path) -> StoreError:
    return StoreError(
        f"opening the KV store at {root} failed: {error}. Check that the folder can be written to and that "
        "the disk has room, or choose another home (RAGBLEND_HOME)."
    )


def _open_locked(root: Path, lock: WriterLock, uses: Uses) -> Opened:
    prepare(root)
    damaged = why_untrusted(root)
    if damaged:
        log.warning("the KV index at %s is set aside, its values are entered anew: %s", root, damaged)
        set_index_aside(root)
        prepare(root)
    try:
        disk_cache = open_cache(root, TIMEOUT_S)
        try:
            index = Index(root, TIMEOUT_S)
        except BaseException:
            disk_cache.close()
            raise
    except SQL_ERRORS as error:
        raise index_failed(error, root / INDEX_NAME) from error
    try:
        index.count_anew()
        if index.totals()[0] == 0:  # set aside now, or by an open that was killed before it had entered them
            adopt(root, index)
        refused = sweep(root, index)
        with index.transaction() as sql:
            uses.settle(sql)
        return Opened(lock, disk_cache, index, refused + bool(damaged))
    except BaseException:
        disk_cache.close()
        index.close()
        raise


def why_untrusted(root: Path) -> str | None:
    """What is wrong with the index; None when it is sound, or new and empty like the rest.

    Looked at with plain SQLite, before diskcache acts on what its Settings table says.
    """
    path = root / INDEX_NAME
    try:
        with closing(sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)) as sql:
            sql.text_factory = lenient_text
            return _why_untrusted(sql, root)
    except SQL_ERRORS as error:
        if error_code(error) in _NOT_DAMAGE:
            raise index_failed(error, path) from error  # the disk's fault, or another program's
        return str(error)


def _why_untrusted(sql: sqlite3.Connection, root: Path) -> str | None:
    problems = integrity(sql, 1)
    if problems:
        return problems[0]
    found = _schema(sql)
    changed = found - _expected_schema() - use_rows.FORMER
    if changed:
        return f"its schema is not diskcache's and ours: {min(changed)}"
    names = {name for name, _ in found}
    if "Cache" not in names and any(file.digest for file in value_files(root)):
        return "it is empty, but there are values"
    if "Cache" in names and "Settings" not in names:
        return "it has lost its settings"
    known = {*DEFAULT_SETTINGS, *METADATA, "sqlite_secure_delete"}
    settings = {key for (key,) in sql.execute("SELECT key FROM Settings")} if "Settings" in names else set()
    return f"unknown settings {sorted(map(str, settings - known))}" if settings - known else None


def _schema(sql: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    rows = sql.execute("SELECT name, COALESCE(sql, '') FROM sqlite_master")
    return frozenset((str(name), str(text)) for name, text in rows)


@cache
def _expected_schema() -> frozenset[tuple[str, str]]:
    """What diskcache and we make of an empty folder: one flipped bit in a trigger's text is found out by comparison."""
    with TemporaryDirectory(prefix="ragblend-") as folder:
        open_cache(Path(folder), TIMEOUT_S).close()
        Index(Path(folder), TIMEOUT_S).close()
        with closing(sqlite3.connect(Path(folder, INDEX_NAME))) as sql:
            return _schema(sql)
