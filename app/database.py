"""A small SQLite file of the app's own: private, in WAL, every change one transaction, deleted bytes overwritten."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ragblend.app.home import FILE_MODE
from ragblend.kvstore.closing import Closing
from ragblend.kvstore.errors import LibraryError, StoreFullError
from ragblend.kvstore.sqlite import BUSY, connect, error_code, transaction, write_ahead

READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True)
class Layout:
    """What is in the file. durable: a commit survives a power cut; else only a kill, and costs no fsync.

    later: what came after the first version and earlier ones do not look at; statements that may be run again.
    """

    what: str
    tables: str
    version: int = 1
    durable: bool = True
    later: tuple[str, ...] = ()


class Database(Closing):
    """One connection, shared between threads; other processes may have theirs."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self._layout = path, layout
        self._mutex = threading.RLock()
        with self._named_errors():
            try:
                # SQLite gives its journal files the mode of the database, so it is right from the first byte.
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
            except OSError as error:
                raise LibraryError(
                    f"Opening the {layout.what} {path}: {error.strerror}. Check its rights."
                ) from error
            self._sql = connect(path)
            try:
                self._prepare()
            except BaseException:
                self._sql.close()
                raise

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a query. Raises LibraryError."""
        with self._mutex, self._named_errors():
            return self._sql.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Raises LibraryError, StoreFullError when the disk is full."""
        with self._mutex, self._named_errors(), transaction(self._sql):
            yield self._sql

    @property
    def changes(self) -> int:
        """How many rows this connection has written: another number says that something has moved."""
        return self._sql.total_changes

    def erase_log(self) -> None:
        """Empty the write-ahead log, where what was deleted would live on. Nothing happens while others read."""
        with self._mutex, self._named_errors():
            self._sql.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        with self._mutex:
            self._sql.close()

    def _prepare(self) -> None:
        sql, layout = self._sql, self._layout
        sql.row_factory = sqlite3.Row
        found = sql.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, layout.version):
            raise LibraryError(
                f"Opening the {layout.what} {self.path}: it has format {found}, this version of RAGBlend reads "
                f"{layout.version}. Use the version that made it, or another --home."
            )
        write_ahead(sql, "FULL" if layout.durable else "NORMAL")
        sql.execute("PRAGMA foreign_keys = ON")
        sql.create_function("folded", 1, _folded, deterministic=True)
        if found == 0:
            with transaction(sql):
                # Unless another process has made them meanwhile.
                if sql.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for statement in layout.tables.strip().split(";\n"):
                        sql.execute(statement)
                    sql.execute(f"PRAGMA user_version = {layout.version}")
        for statement in layout.later:
            sql.execute(statement)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _named(error, self._layout.what, self.path) from error


def now() -> str:
    """This moment, in local time, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def _folded(text: object) -> str:
    """What is compared when somebody searches: SQLite's own LIKE folds ASCII alone."""
    return str(text).casefold()


def _named(error: sqlite3.Error, what: str, path: Path) -> LibraryError | StoreFullError:
    code = error_code(error)
    if code == sqlite3.SQLITE_FULL:
        return StoreFullError(
            f"Writing to the {what} {path}: the disk is full. Free some space; nothing was lost."
        )
    if code in BUSY:
        return LibraryError(
            f"Using the {what} {path}: another program keeps it locked. Close that, and try again."
        )
    advice = (
        "Check the folder's rights and space."
        if code in READ_ONLY
        else "Restore it from a backup or move it away."
    )
    return LibraryError(f"Using the {what} {path}: {error}. Nothing was changed. {advice}")
