"""Opening a store: format, folders, an index that can be trusted, and the leftovers of whoever was killed here."""

import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diskcache import Timeout  # type: ignore[import-untyped]
from diskcache.core import DEFAULT_SETTINGS, METADATA  # type: ignore[import-untyped]

from ragblend.kvstore.disk import INDEX_NAME, open_cache
from ragblend.kvstore.errors import StoreLockedError
from ragblend.kvstore.files import make_private_folder, write_failed
from ragblend.kvstore.index import COLUMNS, Index, index_failed
from ragblend.kvstore.layout import LOCK_NAME, check_format, prepare, set_index_aside
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.upkeep import adopt, sweep

TIMEOUT_S = 30.0
_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_SETTINGS = {*DEFAULT_SETTINGS, *METADATA, "sqlite_secure_delete"}


@dataclass(frozen=True)
class Opened:
    """What KVStore works with; refused counts the index set aside and the rows that could not be true."""

    lock: WriterLock
    cache: Any
    index: Index
    refused: int


def open_index(root: Path) -> Opened:
    """Everything open and swept; StoreFormatError, StoreLockedError or StoreError otherwise."""
    check_format(root)  # before anything is made or tightened in a folder that is not ours
    try:
        make_private_folder(root)
        lock = WriterLock(root / LOCK_NAME, TIMEOUT_S)
    except OSError as error:
        raise write_failed(error, root, 0) from error
    try:
        with lock.hold():
            return _open_locked(root, lock)
    except OSError as error:
        lock.close()
        raise write_failed(error, root, 0) from error
    except BaseException:
        lock.close()
        raise


def _open_locked(root: Path, lock: WriterLock) -> Opened:
    prepare(root)
    damaged = why_untrusted(root / INDEX_NAME)
    if damaged:
        set_index_aside(root, os.urandom(8).hex())
        prepare(root)
    try:
        cache, index = open_cache(root, TIMEOUT_S), Index(root, TIMEOUT_S)
    except Timeout as error:
        raise StoreLockedError(
            f"opening the KV store at {root}: its index stayed locked; try again"
        ) from error
    except sqlite3.Error as error:
        raise index_failed(error, root / INDEX_NAME) from error
    try:
        if damaged:
            adopt(root, index)
        return Opened(lock, cache, index, sweep(root, index) + bool(damaged))
    except BaseException:
        cache.close()
        index.close()
        raise


def why_untrusted(path: Path) -> str | None:
    """What is wrong with the index; None when it is sound, or new and empty.

    Looked at with plain SQLite, before diskcache acts on what its Settings table says.
    """
    sql = sqlite3.connect(path, timeout=TIMEOUT_S, isolation_level=None)
    try:
        return _why_untrusted(sql)
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF in _BUSY:
            raise StoreLockedError(
                f"opening {path}: another program keeps it locked; close that program"
            ) from error
        if error.sqlite_errorcode & 0xFF in (
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_FULL,
            sqlite3.SQLITE_CANTOPEN,
        ):
            raise index_failed(error, path) from error  # the disk's fault, not the index's
        return str(error)
    finally:
        sql.close()


def _why_untrusted(sql: sqlite3.Connection) -> str | None:
    lines = [str(line) for (line,) in sql.execute("PRAGMA quick_check(1)")]
    if lines != ["ok"]:
        return lines[0]
    tables = {name for (name,) in sql.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return None
    unknown = {key for (key,) in sql.execute("SELECT key FROM Settings")} - _SETTINGS
    sql.execute(f"SELECT {COLUMNS} FROM Cache LIMIT 1")
    return f"unknown settings {sorted(map(str, unknown))}" if unknown else None
