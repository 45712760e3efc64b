"""A small SQLite file of the app's own: private, in WAL, every change one transaction, deleted bytes overwritten."""

import hashlib
import os
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ragblend.app import rescue
from ragblend.app.rescue import Mended, Rescued
from ragblend.kvstore.errors import LibraryError, StoreFullError
from ragblend.kvstore.files import Closing, discard_database, identity, make_private_file
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.sqlite import (
    BUSY,
    BUSY_SECONDS,
    SQL_ERRORS,
    connect,
    erase,
    erase_log,
    error_code,
    integrity,
    is_damage,
    lenient_text,
    transaction,
    write_ahead,
)

BATCH_ROWS = 500
WORD = re.compile(r"[^\W_]+")
READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True)
class Layout:
    """What is in the file. durable: a commit survives a power cut; else only a kill, and costs no fsync.

    version: a file of another one is named and left alone; tables: statements that make them; full_text: that one of
    them which is an index of words (FTS5), and can be made again from the others; copied: those tables whose rows are
    all there is to keep; adopted: statements that make again, in a file that was damaged, what other rows belong to;
    mended(connection, gaps): writes down there, before it is used, what was lost.
    """

    what: str
    version: int
    tables: tuple[str, ...]
    copied: tuple[str, ...]
    adopted: tuple[str, ...] = ()
    mended: Mended | None = None
    durable: bool = True
    full_text: str = ""


class Database(Closing):
    """A file of that layout, opened or made: one connection, shared between threads; other processes may have theirs.

    The file is read through when it is opened. A damaged one is set aside, and what can be read of it is in a new one:
    `rescued` says so. Raises LibraryError.
    """

    layout: Layout

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.RLock()
        self.rescued: Rescued | None = None
        with self._named_errors():
            self._sql = self._opened()

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a query. Raises LibraryError."""
        with self._mutex, self._named_errors():
            return self._connected().execute(query, values).fetchall()

    def column(self, query: str, *values: object) -> list[Any]:
        """The first value of each row."""
        return [row[0] for row in self.rows(query, *values)]

    def among(self, query: str, keys: Iterable[object]) -> list[sqlite3.Row]:
        """The rows of a query that ends in `IN`, for any number of keys."""
        everything = list(dict.fromkeys(keys))
        found: list[sqlite3.Row] = []
        for start in range(0, len(everything), BATCH_ROWS):
            batch = everything[start : start + BATCH_ROWS]
            found += self.rows(f"{query} ({', '.join('?' * len(batch))})", *batch)
        return found

    def execute(self, query: str, *values: object) -> sqlite3.Cursor:
        """One statement, all or nothing."""
        with self.transaction() as sql:
            return sql.execute(query, values)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing. Raises LibraryError, StoreFullError when the disk is full."""
        with self._mutex, self._named_errors(), transaction(sql := self._connected()):
            yield sql

    @property
    def changes(self) -> int:
        """How many rows this connection has written: another number says that something has moved."""
        return self._sql.total_changes

    def erase_log(self) -> bool:
        """Empty the write-ahead log, where what was deleted would live on; False while others read for long."""
        with self._mutex, self._named_errors():
            return erase_log(self._connected())

    def erase(self) -> bool:
        """Leave no byte of what was deleted in the file; False while others use it for long, or on a full disk."""
        with self._mutex, self._named_errors():
            # FTS5 only notes what is deleted: it goes when the parts of the index are merged.
            return erase(self._connected(), self.path.parent, *self._full_text("optimize"))

    def _full_text(self, command: str) -> list[str]:
        """The statement that gives FTS5 a command, if there is such a table."""
        name = self.layout.full_text
        if not name:
            return []
        return [f"INSERT INTO {name} ({name}) VALUES ('{command}')"]

    def close(self) -> None:
        with self._mutex:
            self._sql.close()

    def _connected(self) -> sqlite3.Connection:
        """The connection; to the file that another process has put in the place of a damaged one, if it has."""
        if not self._sql.in_transaction:
            with suppress(OSError):  # a file that is gone altogether stays in use, and is not begun anew
                if identity(os.stat(self.path)) != self._identity:
                    self._sql.close()
                    self._sql = self._opened()
        return self._sql

    def _opened(self) -> sqlite3.Connection:
        path, layout = self.path, self.layout
        try:
            if Path(f"{path}.rescued").exists():
                with self._rescuing():
                    rescue.finish(path)
            # SQLite gives its journal files the mode of the database, so it is right from the first byte.
            make_private_file(path)
            sql, why = self._tried()
            if sql is None:
                with self._rescuing():
                    sql, why = self._tried()  # unless another process has done it meanwhile
                    if sql is None:
                        new = _begun(Path(f"{path}.rescuing"), layout)
                        self.rescued = rescue.rescue(
                            path, new, layout.what, why, layout.copied, layout.adopted, layout.mended
                        )
                        sql, why = self._tried()
        except OSError as error:
            raise LibraryError(
                f"Opening the {layout.what} {path}: {error.strerror}. Check its rights."
            ) from error
        if sql is None:
            raise LibraryError(
                f"Opening the {layout.what} {path}: it is damaged ({why}), even after it was made anew."
            )
        self._identity = identity(os.stat(path))
        return sql

    def _rescuing(self) -> AbstractContextManager[None]:
        return WriterLock(self.path.with_name(f".{self.path.name}.lock"), BUSY_SECONDS).hold()

    def _tried(self) -> tuple[sqlite3.Connection | None, str]:
        """A connection to the file, or what is wrong with it."""
        sql = connect(self.path)
        try:
            why = self._prepare(sql)
        except BaseException:
            sql.close()
            raise
        if why:
            sql.close()
        return (None, why) if why else (sql, "")

    def _prepare(self, sql: sqlite3.Connection) -> str:
        """Make the tables of a new file, and read one that is there through. Returns what is wrong with it."""
        layout, sql.row_factory = self.layout, sqlite3.Row
        try:
            found = sql.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, layout.version):
                raise LibraryError(
                    f"Opening the {layout.what} {self.path}: another version of RAGBlend made it (format {found}; this "
                    f"one has {layout.version}). Use that version, or another --home, into which your documents can be "
                    "ingested again. Nothing was changed."
                )
            write_ahead(sql, "FULL" if layout.durable else "NORMAL")
            sql.execute("PRAGMA foreign_keys = ON")
            _add_functions(sql)
            if not found:
                with transaction(sql):
                    if not sql.execute("SELECT 1 FROM sqlite_master").fetchone():
                        _make_tables(sql, layout)
            if why := self._wrong(sql):
                return why
        except SQL_ERRORS as error:
            if not is_damage(error):
                raise
            return str(error)
        # Text that damage has made no UTF-8 must not keep the rows beside it from being read.
        sql.text_factory = lenient_text
        return ""

    def _wrong(self, sql: sqlite3.Connection) -> str:
        """What SQLite finds wrong, or tables that are not ours."""
        found = integrity(sql, 1)
        if not found and _definitions(sql, self.layout) != _expected(self.layout):
            found = ["its tables are not those that were made"]
        return found[0] if found else ""

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _named(error, self.layout.what, self.path) from error


def now() -> str:
    """This moment, in local time, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def storable(text: str) -> str:
    """Without halves of surrogate pairs, which SQLite cannot keep and no tokenizer takes.

    A model's tokens and a browser can give them, and so does Python for bytes that are not UTF-8.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def _begun(path: Path, layout: Layout) -> sqlite3.Connection:
    """A new file with the tables, in a transaction: rows may come in any order."""
    discard_database(path)
    make_private_file(path)
    sql = connect(path)
    # Nobody opens it before it is whole, and a kill must leave no journal beside it.
    sql.execute("PRAGMA journal_mode = MEMORY")
    _add_functions(sql)
    sql.execute("BEGIN")
    _make_tables(sql, layout)
    return sql


def _make_tables(sql: sqlite3.Connection, layout: Layout) -> None:
    for statement in layout.tables:
        sql.execute(statement)
    sql.execute(f"PRAGMA user_version = {layout.version}")


def _add_functions(sql: sqlite3.Connection) -> None:
    sql.create_function("folded", 1, _folded, deterministic=True)
    sql.create_function("worded", 2, _worded, deterministic=True)


def _definitions(sql: sqlite3.Connection, layout: Layout) -> set[tuple[object, ...]]:
    """Of what we made: how SQLite keeps its own tables and those of FTS5 is each version's own."""
    rows = {tuple(row) for row in sql.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")}
    others = ("sqlite_", f"{layout.full_text}_") if layout.full_text else ("sqlite_",)
    return {row for row in rows if not str(row[1]).startswith(others)}


def _expected(layout: Layout) -> set[tuple[object, ...]]:
    with closing(connect(":memory:")) as sql:
        _add_functions(sql)
        _make_tables(sql, layout)
        return _definitions(sql, layout)


def _folded(text: object) -> str:
    """What is compared when somebody searches: SQLite's own LIKE folds ASCII alone."""
    return str(text).casefold()


def words_of(collection: str, text: str) -> list[str]:
    """The words of a text as they are indexed: each with its collection, so that no two collections share one.

    Digits and consonants before a word change nothing for FTS5's stemmer.
    """
    mark = int.from_bytes(hashlib.blake2b(collection.encode(), digest_size=6).digest())
    return [f"x{mark}{word}" for word in WORD.findall(unicodedata.normalize("NFKC", text))]


def _worded(collection: str, text: bytes) -> str:
    """Bytes, because damage may have made them no UTF-8, and the row must be deletable all the same."""
    return " ".join(words_of(collection, text.decode("utf-8", "replace")))


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
    advice = "Close every program that uses it: when it is opened again, what can be read is kept."
    if code in READ_ONLY:
        advice = "Check the folder's rights and space."
    elif error.sqlite_errorcode == sqlite3.SQLITE_CORRUPT_VTAB:
        advice = "Run `ragblend store repair`, which makes its index of words again."
    return LibraryError(f"Using the {what} {path}: {error}. Nothing was changed. {advice}")
