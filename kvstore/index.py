"""Index: the value file, its size and the parent node of each key; and the saved ledger.

A `diskcache.Cache` in its own folder. Each value is a short row of bytes in SQLite, so diskcache handles no files, and
its triggers count rows and bytes. Reads use a separate connection: opening diskcache writes, and a question whose
passages are all stored must work on a full disk.
"""

import re
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from diskcache import Cache, Disk
from diskcache.core import MODE_RAW, UNKNOWN

from ragblend.kvstore.errors import CorruptBlobError, UsageError
from ragblend.kvstore.files import is_same_file, make_private_folder
from ragblend.kvstore.layout import INDEX_NAME, value_name
from ragblend.kvstore.sqlite import (
    BUSY,
    BUSY_SECONDS,
    SQL_ERRORS,
    SqliteFile,
    connect,
    damage_error,
    error_code,
    integrity,
    is_damage,
    schema_of,
)

_DIGEST = re.compile("[0-9a-f]{64}")
# The random part of the file's name, the file's size in bytes, the parent's digest (zeros: none).
_ROW = struct.Struct("<8sQ32s")
_NO_PARENT = bytes(32)
_DISK_ERRORS = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
# Keys that are no digests: the saved ledger and its number, which has its own row so that it can be read alone.
_LEDGER, _SERIAL = "ledger", "ledger-serial"
_ENTRIES = f"SELECT key, value FROM Cache WHERE key NOT IN ('{_LEDGER}', '{_SERIAL}') ORDER BY rowid"


class Row(NamedTuple):
    """The index row of a value. filename: below the store's folder; parent: digest of its parent node."""

    filename: str
    nbytes: int
    parent: str | None = None


def _pack(row: Row) -> bytes:
    suffix = bytes.fromhex(row.filename[-19:-3])  # 16 hex digits before `.kv`: see `value_name`
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
        # The value file's size, so that diskcache adds up the bytes of KV.
        nbytes = 0 if key in (_LEDGER, _SERIAL) else _ROW.unpack(value)[1]
        return nbytes, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or type(value) is not bytes:
            raise CorruptBlobError(
                f"the index holds a row of mode {mode!r} that this store did not write; it was not unpickled"
            )
        return value


class Index(SqliteFile):
    """The index of a store. Thread-safe; to change it, the caller holds the writer lock.

    Raises StoreError for errors of SQLite or diskcache, and CorruptBlobError for an index that must be rebuilt.
    """

    what = "KV index"

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.root, self._timeout_s = root, timeout_s
        self._writer: Any = None
        make_private_folder((root / INDEX_NAME).parent)
        super().__init__(root / INDEX_NAME)

    # --- reading

    def get(self, digest: str) -> Row | None:
        """The row of a value; None if there is none."""
        found = self.column("SELECT value FROM Cache WHERE key = ? AND raw = 1", digest)
        if not found:
            return None
        packed = found[0]
        if type(packed) is not bytes or len(packed) != _ROW.size:
            raise CorruptBlobError(f"the index {self.path} holds a row that this store did not write")
        return _unpack(digest, packed)

    def entries(self) -> dict[str, Row]:
        """All rows in insertion order. CorruptBlobError if this store did not write one of them."""
        found = {}
        for key, packed in self.rows(_ENTRIES):
            ours = type(key) is str and type(packed) is bytes
            if not (ours and _DIGEST.fullmatch(key) and len(packed) == _ROW.size):
                raise CorruptBlobError(f"the index {self.path} holds rows that this store did not write")
            found[key] = _unpack(key, packed)
        return found

    @property
    def totals(self) -> tuple[int, int]:
        """Number of values and their bytes, as diskcache's triggers count them."""
        known = dict(self.rows("SELECT key, value FROM Settings WHERE key IN ('count', 'size')"))
        count, nbytes = int(known["count"]), int(known["size"])
        ledger_rows = self.rows("SELECT 1 FROM Cache WHERE key IN (?, ?)", _LEDGER, _SERIAL)
        return count - len(ledger_rows), nbytes

    def ledger(self) -> bytes:
        """The saved ledger; empty before the first save."""
        return self._ledger_value(_LEDGER)

    def ledger_serial(self) -> int:
        """The number of the last save; 0 before the first, and for an unreadable row."""
        saved = self._ledger_value(_SERIAL)
        return int(saved) if saved.isdigit() else 0

    def _ledger_value(self, key: str) -> bytes:
        found = self.column("SELECT value FROM Cache WHERE key = ? AND raw = 1", key)
        return found[0] if found and type(found[0]) is bytes else b""

    def integrity(self) -> list[str]:
        """SQLite's own integrity check of the file."""
        with self.connection() as sql:
            return integrity(sql, 20)

    def is_in_place(self) -> bool:
        """Whether this is still the store's index; False if another process has replaced it."""
        return is_same_file(self.path, self._identity)

    # --- changing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context manager: one transaction. Errors raised in the block pass through."""
        try:
            with ExitStack() as change:
                try:
                    change.enter_context(self._cache().transact())
                except (TypeError, KeyError, ValueError, sqlite3.Warning, sqlite3.ProgrammingError) as error:
                    raise CorruptBlobError(f"the index {self.path} cannot be used: {error}") from error
                yield
        except SQL_ERRORS as error:
            raise self._named_error(error) from error
        finally:
            if (
                self._writer is not None
            ):  # close this thread's connection: diskcache would keep one per thread
                self._writer.close()

    def set(self, digest: str, row: Row) -> None:
        """Insert or replace a value's row."""
        self._cache().set(digest, _pack(row))

    def delete(self, digest: str) -> bool:
        """Remove a row; False if there is none."""
        return bool(self._cache().delete(digest))

    def set_ledger(self, packed: bytes, serial: int) -> None:
        """Save the ledger, and the number of this save."""
        self._cache().set(_LEDGER, packed)
        self._cache().set(_SERIAL, str(serial).encode())

    def _cache(self) -> Any:
        """diskcache's own connection, for changes; opened on first use."""
        if self._writer is None:
            self._writer = _cache_in(self.path.parent, self._timeout_s)
        return self._writer

    # --- opening and damage

    def _must_reopen(self) -> bool:
        # An index that another process has rebuilt is opened under the writer lock: see `is_in_place`.
        return self._is_single_use

    def _prepare(self, sql: sqlite3.Connection) -> None:
        if self.generation:
            return  # it was checked when it was opened
        try:
            if problems := integrity(sql, 1):
                raise damage_error(problems[0])
            if not sql.execute("SELECT 1 FROM sqlite_master").fetchone():
                with self.changing():  # diskcache creates its tables
                    pass
            differences = _tables_and_settings(sql) ^ _expected_schema()
        except SQL_ERRORS as error:
            if error_code(error) in _DISK_ERRORS | BUSY:
                raise
            raise damage_error(str(error)) from error
        if differences:
            raise damage_error(f"its schema is not diskcache's: {min(differences)}")

    def _handle_damage(self, why: str) -> None:
        """Raise, because only the store can rebuild its index."""
        raise CorruptBlobError(f"the index {self.path} is damaged: {why}")

    def _named_error(self, error: Exception) -> Exception:
        if isinstance(error, SQL_ERRORS) and is_damage(error):
            return CorruptBlobError(f"the index {self.path} is damaged: {error}")
        return super()._named_error(error)


def _tables_and_settings(sql: sqlite3.Connection) -> frozenset[tuple[str, str]]:
    """Tables, triggers, and names of settings, which diskcache inserts into SQL statements unquoted."""
    found = schema_of(sql)
    settings = sql.execute("SELECT key FROM Settings").fetchall() if "Settings" in found else []
    return frozenset(found.items()) | {(str(name), "setting") for (name,) in settings}


@cache
def _expected_schema() -> frozenset[tuple[str, str]]:
    """The schema that diskcache creates in an empty folder, for comparison: it reveals damaged triggers."""
    with TemporaryDirectory(prefix="ragblend-") as folder:
        _cache_in(Path(folder), BUSY_SECONDS).close()
        with closing(connect(Path(folder, Path(INDEX_NAME).name))) as sql:
            return _tables_and_settings(sql)


def _cache_in(folder: Path, timeout_s: float) -> Any:
    return Cache(
        str(folder),
        timeout=timeout_s,
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
        disk_pickle_protocol=0,  # unused; given so that no setting is read from the file
        sqlite_secure_delete=1,  # a deleted row leaves no bytes in the file
        sqlite_mmap_size=0,  # a truncated index under mmap would be a SIGBUS, not an error
    )
