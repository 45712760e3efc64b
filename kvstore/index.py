"""Index: which file holds the value of a key. diskcache keeps it, and its public interface is used.

diskcache writes no file here, reads none and removes none: what it is given are files that are there, and what it would
remove it only names, because inside a transaction it removes before the commit.
"""

import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from diskcache import Cache, Disk
from diskcache.core import MODE_BINARY, UNKNOWN

from ragblend.kvstore.errors import CorruptBlobError, StoreError, UsageError
from ragblend.kvstore.files import Closing, identity, is_same_file
from ragblend.kvstore.layout import INDEX_NAME, ValueFile, digest_in
from ragblend.kvstore.sqlite import SQL_ERRORS, connect, erase_log, index_failed, integrity, is_no_text

_DIGEST = re.compile("[0-9a-f]{64}")
FOREIGN = ""  # in a list of keys: one that this store did not write, and that was not unpickled


class FileNames(Disk):  # type: ignore[misc]
    """Keys are digests and values files; what any other row holds is never decoded (CVE-2025-69872)."""

    def __init__(self, directory: str, **settings: object) -> None:
        super().__init__(directory, **settings)
        self.unnamed: list[str] = []  # files that no row names any more

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise UsageError(f"a key of the KV store is a str, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        return key if raw == 1 and type(key) is str and _DIGEST.fullmatch(key) else FOREIGN

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> tuple[int, int, str, None]:
        if type(value) is not ValueFile or value.digest != key or read:
            raise UsageError(f"a value of the KV store is a file of its key's name, not {value!r}")
        return value.nbytes, MODE_BINARY, value.filename, None

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        if mode != MODE_BINARY or value is not None or digest_in(filename) is None:
            raise CorruptBlobError(
                f"the index holds a row of mode {mode!r} that is not ours; it was not unpickled"
            )
        return str(filename)

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> NoReturn:
        raise AssertionError("files have their names before they come here")

    def remove(self, file_path: object) -> None:
        if digest_in(file_path) is not None:
            self.unnamed.append(str(file_path))


class _Connection:
    """A thread's connection to the index, closed where the thread ends.

    sqlite3 keeps a connection and its statements in a cycle, and a server's old garbage is not looked for in hours: a
    thread a request would leave two open files each time.
    """

    def __init__(self, sql: sqlite3.Connection) -> None:
        self.sql, self.is_checked = sql, False

    def __del__(self) -> None:
        with suppress(sqlite3.ProgrammingError):  # the index went first, in another thread
            self.sql.close()


class Index(Closing):
    """Safe for threads; who changes it holds the writer's lock. Raises StoreError for what SQLite or diskcache raise.

    CorruptBlobError for an index that holds what diskcache itself cannot read: it must be made anew.
    """

    def __init__(self, root: Path, timeout_s: float) -> None:
        self.root, self.path, self._mine = root, root / INDEX_NAME, threading.local()
        with self._named_errors():
            self._opened: Any = Cache(
                str(root),
                timeout=timeout_s,
                disk=FileNames,
                disk_min_file_size=0,
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
            self._check_writable()
        self._identity = identity(self.path.stat())

    @property
    def _cache(self) -> Any:
        """diskcache's; its `_con` is the one private name of it that is used, as it alone names the connection."""
        sql, mine = self._opened._con, getattr(self._mine, "connection", None)
        if mine is None or mine.sql is not sql:
            self._mine.connection = _Connection(sql)
        return self._opened

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, sqlite3.Warning, sqlite3.ProgrammingError) as error:  # of settings that are none
            raise CorruptBlobError(f"the index {self.path} cannot be used: {error}") from error
        except SQL_ERRORS as error:
            if is_no_text(error):
                raise CorruptBlobError(f"the index {self.path} has an unreadable row: {error}") from error
            raise index_failed(error, self.path) from error

    def _check_writable(self) -> None:
        """Once for each thread's connection: where a file could not be opened for writing, SQLite opens it for reading.

        Without a word, and for as long as the connection lives; so that one is closed, and the next use makes another.
        """
        cache, mine = self._cache, self._mine.connection
        if not mine.is_checked:
            try:
                cache.reset("cull_limit", 0)
            except SQL_ERRORS:
                cache.close()
                raise
            mine.is_checked = True

    @contextmanager
    def changing(self) -> Iterator[list[str]]:
        """All or nothing. When it was all, the list has the files that no row names any more.

        What others raise meanwhile, out of another file, is theirs to name.
        """
        unnamed, theirs = list[str](), list[Exception]()
        try:
            with self._named_errors():
                self._check_writable()
                with self._cache.transact():
                    self._cache.disk.unnamed = unnamed
                    try:
                        yield unnamed
                    except Exception as error:
                        theirs.append(error)
                        raise
        except StoreError:
            if theirs:
                raise theirs[0] from theirs[0].__cause__
            raise

    def filename(self, digest: str) -> str | None:
        """The value's file, below `root`; None if there is none. CorruptBlobError for a row that cannot be true."""
        with self._named_errors():
            found: str | None = self._cache.get(digest)
        if found is not None and digest_in(found) != digest:
            raise CorruptBlobError(f"the index names the file of another key, {found}")
        return found

    def digests(self) -> list[str]:
        """All keys, in the order they came, FOREIGN for those of others. CorruptBlobError if one cannot be read."""
        with self._named_errors():
            return list(self._cache)

    def set(self, file: ValueFile) -> None:
        """Let that file be the value of the key that its name says."""
        with self._named_errors():
            self._cache.set(file.digest, file)

    def delete(self, digest: str) -> bool:
        """Remove the key; False if there is no such row. One that damage has made expire goes as well."""
        with self._named_errors():
            return bool(self._cache.delete(digest) or self._cache.expire())

    @property
    def totals(self) -> tuple[int, int]:
        """How many values there are, and their bytes: diskcache counts them as they come and go."""
        with self._named_errors():
            return len(self._cache), int(self._cache.reset("size"))

    def recount(self, count: int, nbytes: int) -> None:
        """Correct the totals, for when they may be damaged."""
        with self._named_errors():
            if self.totals != (count, nbytes):
                self._cache.reset("count", count)
                self._cache.reset("size", nbytes)

    def is_in_place(self) -> bool:
        """Whether this is still the store's index: another process may have made it anew."""
        return is_same_file(self.path, self._identity)

    def integrity(self) -> list[str]:
        """What SQLite finds wrong with its own file."""
        with self._named_errors(), closing(connect(self.path)) as sql:
            return integrity(sql, 20)

    def truncate_log(self) -> None:
        """Empty the write-ahead log, in which deleted rows would linger; a reader at work can put it off."""
        with self._named_errors(), closing(connect(self.path)) as sql:
            erase_log(sql)

    def close(self) -> None:
        """Close this thread's connection; those of others end with their threads."""
        self._opened.close()
