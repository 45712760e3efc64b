"""Index: for each key the file that holds its KV, the file's size and the node before it; and the saved ledger.

A `diskcache.Cache` in a folder of its own. Each value is a short row of bytes in SQLite, so diskcache writes, reads and
removes no file. Its triggers count rows and bytes, so that a size is said once. Reads have a connection of their own:
opening diskcache writes, and a question whose passages are all stored must be answered on a full disk.
"""

import re
import sqlite3
import struct
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from diskcache import Cache, Disk
from diskcache.core import MODE_RAW, UNKNOWN

from ragblend.kvstore.errors import CorruptBlobError, StoreError, UsageError
from ragblend.kvstore.files import Closing, identity, is_same_file, make_private_file, make_private_folder
from ragblend.kvstore.layout import INDEX_NAME, value_name
from ragblend.kvstore.sqlite import (
    SQL_ERRORS,
    connect,
    connect_to_read,
    erase_log,
    index_failed,
    integrity,
    is_damage,
    is_no_text,
)

_DIGEST = re.compile("[0-9a-f]{64}")
# The random part of the file's name, its bytes, the parent's digest (zeros: none).
_ROW = struct.Struct("<8sQ32s")
_NO_PARENT = bytes(32)
# Keys that are no digests: the saved ledger, and its number, as SQLite reads a large value whole for its first bytes.
_LEDGER, _SERIAL = "ledger", "ledger-serial"
_ENTRIES = f"SELECT key, value FROM Cache WHERE key NOT IN ('{_LEDGER}', '{_SERIAL}') ORDER BY rowid"


class Row(NamedTuple):
    """What the index knows of a value. filename: below the store's folder; parent: digest of the node before it."""

    filename: str
    nbytes: int
    parent: str | None = None


def _pack(row: Row) -> bytes:
    suffix = bytes.fromhex(row.filename[-19:-3])
    return _ROW.pack(suffix, row.nbytes, bytes.fromhex(row.parent) if row.parent else _NO_PARENT)


def _unpack(digest: str, packed: bytes) -> Row:
    suffix, nbytes, parent = _ROW.unpack(packed)
    return Row(value_name(digest, suffix), nbytes, None if parent == _NO_PARENT else parent.hex())


class BytesOnly(Disk):  # type: ignore[misc]
    """Keys are str and values bytes, kept in the row; nothing is ever unpickled (CVE-2025-69872)."""

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise UsageError(f"a key of the KV store is a str, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if raw != 1 or type(key) is not str:
            raise CorruptBlobError(
                "the index holds a key that this store did not write; it was not unpickled"
            )
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> tuple[int, int, None, bytes]:
        if type(value) is not bytes or read:
            raise UsageError(f"a value of the index is bytes, not {type(value).__name__}")
        nbytes = 0 if key in (_LEDGER, _SERIAL) else _ROW.unpack(value)[1]
        return nbytes, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or type(value) is not bytes:
            raise CorruptBlobError(
                f"the index holds a row of mode {mode!r} that is not ours; it was not unpickled"
            )
        return value


class Index(Closing):
    """Safe for threads; a caller that changes it holds the writer lock.

    Raises StoreError for what SQLite or diskcache raise, and CorruptBlobError for an index that must be rebuilt.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.root, self.path, self._timeout_s = root, root / INDEX_NAME, timeout_s
        self._lock = threading.RLock()
        self._writer: Any = None
        make_private_folder(self.path.parent)
        is_new = not self.path.exists() or not self.path.stat().st_size
        make_private_file(self.path)
        if is_new:
            with self.changing():
                pass
        with self._named_errors():
            self._reader, self._is_for_once = connect_to_read(self.path, timeout_s)
        self._identity = identity(self.path.stat())

    # --- reading

    def get(self, digest: str) -> Row | None:
        """The row of a value; None if there is none."""
        found = self._read("SELECT value FROM Cache WHERE key = ? AND raw = 1", digest)
        if not found:
            return None
        (packed,) = found[0]
        if type(packed) is not bytes or len(packed) != _ROW.size:
            raise CorruptBlobError(f"the index {self.path} holds a row that this store did not write")
        return _unpack(digest, packed)

    def rows(self) -> dict[str, Row]:
        """All of them, in the order they came. CorruptBlobError if one is not ours."""
        found = {}
        for key, packed in self._read(_ENTRIES):
            ours = type(key) is str and type(packed) is bytes
            if not (ours and _DIGEST.fullmatch(key) and len(packed) == _ROW.size):
                raise CorruptBlobError(f"the index {self.path} holds rows that this store did not write")
            found[key] = _unpack(key, packed)
        return found

    @property
    def totals(self) -> tuple[int, int]:
        """How many values there are, and their bytes, as diskcache's triggers count them."""
        known = dict(self._read("SELECT key, value FROM Settings WHERE key IN ('count', 'size')"))
        count, nbytes = int(known["count"]), int(known["size"])
        others = self._read("SELECT 1 FROM Cache WHERE key IN (?, ?)", _LEDGER, _SERIAL)
        return count - len(others), nbytes

    def ledger(self) -> bytes:
        """The saved ledger of uses; empty before there is one."""
        return self._special(_LEDGER)

    def ledger_serial(self) -> int:
        """The number of the last save; 0 before there is one, and for a row that cannot be read."""
        saved = self._special(_SERIAL)
        return int(saved) if saved.isdigit() else 0

    def _special(self, key: str) -> bytes:
        found = self._read("SELECT value FROM Cache WHERE key = ? AND raw = 1", key)
        return found[0][0] if found and type(found[0][0]) is bytes else b""

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with its own file."""
        with self._named_errors(), closing(connect(self.path)) as sql:
            return integrity(sql, 20)

    def is_in_place(self) -> bool:
        """Whether this is still the store's index: another process may have rebuilt it."""
        return is_same_file(self.path, self._identity)

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, self._named_errors():
            if self._is_for_once:
                self._reader.close()
                self._reader, self._is_for_once = connect_to_read(self.path, self._timeout_s)
            return self._reader.execute(query, values).fetchall()

    # --- changing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """One transaction: all or nothing. Errors raised in the block pass through."""
        raised: list[BaseException] = []
        try:
            with self._named_errors(), self._opened().transact():
                try:
                    yield
                except BaseException as error:
                    raised.append(error)
                    raise
        except StoreError:
            if raised and not isinstance(raised[0], SQL_ERRORS):
                raise raised[0] from raised[0].__cause__
            raise
        finally:
            if self._writer is not None:  # a connection is a thread's, and threads come and go
                self._writer.close()

    def set(self, digest: str, row: Row) -> None:
        """Enter or replace a value's row."""
        self._opened().set(digest, _pack(row))

    def delete(self, digest: str) -> bool:
        """Remove a row; False if there is none."""
        return bool(self._opened().delete(digest))

    def set_ledger(self, packed: bytes, serial: int) -> None:
        """Save the ledger of uses, and the number of this save."""
        self._opened().set(_LEDGER, packed)
        self._opened().set(_SERIAL, str(serial).encode())

    def truncate_log(self) -> None:
        """Empty the write-ahead log, in which deleted rows would linger; a reader at work can put it off."""
        with self._named_errors(), closing(connect(self.path)) as sql:
            erase_log(sql)

    def close(self) -> None:
        with self._lock:
            self._reader.close()

    def _opened(self) -> Any:
        if self._writer is None:
            self._writer = Cache(
                str(self.path.parent),
                timeout=self._timeout_s,
                disk=BytesOnly,
                disk_min_file_size=2**62,
                cull_limit=0,
                eviction_policy="none",
                size_limit=2**62,
                statistics=0,
                tag_index=0,
                sqlite_journal_mode="wal",
                sqlite_synchronous=1,
                sqlite_auto_vacuum=1,
                sqlite_cache_size=2**13,
                disk_pickle_protocol=0,  # never used; given so that no setting is taken from the file
                sqlite_secure_delete=1,  # a deleted row leaves no bytes in the file
                sqlite_mmap_size=0,  # a truncated index under mmap would be a SIGBUS, not an error
            )
        return self._writer

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, KeyError, ValueError, sqlite3.Warning, sqlite3.ProgrammingError) as error:
            raise CorruptBlobError(f"the index {self.path} cannot be used: {error}") from error
        except SQL_ERRORS as error:
            if is_no_text(error) or is_damage(error):
                raise CorruptBlobError(f"the index {self.path} is damaged: {error}") from error
            raise index_failed(error, self.path) from error
