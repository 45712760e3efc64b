"""A small SQLite file of the app's own: private, in WAL, every change one transaction, deleted bytes overwritten."""

import hashlib
import logging
import re
import sqlite3
import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import LibraryError, StoreFullError
from ragblend.kvstore.files import Closing, make_private_file
from ragblend.kvstore.sqlite import (
    BUSY,
    connect,
    erase,
    erase_log,
    error_code,
    integrity,
    lenient_text,
    transaction,
    write_ahead,
)

log = logging.getLogger("ragblend")
BATCH_ROWS = 500
WORD = re.compile(r"[^\W_]+")
READ_ONLY = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True)
class FullText:
    """A table of words (FTS5), which SQLite can build again from the others.

    removed: statements by which a SQLite without FTS5 takes out what would keep it from writing the other tables.
    """

    name: str
    removed: tuple[str, ...]


@dataclass(frozen=True)
class Layout:
    """What is in the file. durable: a commit survives a power cut; else only a kill, and costs no fsync.

    tables: of version 1; upgrades: statements that make each next version of the one before, once, all or none;
    checked: the file is read through when it is opened, and what SQLite finds wrong with it is raised at every use;
    full_text: what the last upgrade makes, which is left out where SQLite has no FTS5.
    """

    what: str
    tables: str
    durable: bool = True
    upgrades: tuple[tuple[str, ...], ...] = ()
    checked: bool = False
    full_text: FullText | None = None

    @property
    def version(self) -> int:
        return 1 + len(self.upgrades)


class Database(Closing):
    """A file of that layout, opened or made: one connection, shared between threads; other processes may have theirs.

    Raises LibraryError. damage: what was wrong with a `checked` file when it was opened; empty when it was sound.
    """

    layout: Layout

    def __init__(self, path: Path) -> None:
        self.path, layout = path, self.layout
        self._mutex = threading.RLock()
        with self._named_errors():
            try:
                # SQLite gives its journal files the mode of the database, so it is right from the first byte.
                make_private_file(path)
            except OSError as error:
                raise LibraryError(
                    f"Opening the {layout.what} {path}: {error.strerror}. Check its rights."
                ) from error
            self._sql = connect(path)
            try:
                self._prepare()
                self.damage = self._check() if layout.checked else ""
            except BaseException:
                self._sql.close()
                raise

    def rows(self, query: str, *values: object) -> list[sqlite3.Row]:
        """All rows of a query. Raises LibraryError."""
        self._demand_sound()
        with self._mutex, self._named_errors():
            return self._sql.execute(query, values).fetchall()

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
        self._demand_sound()
        with self._mutex, self._named_errors(), transaction(self._sql):
            yield self._sql

    @property
    def changes(self) -> int:
        """How many rows this connection has written: another number says that something has moved."""
        return self._sql.total_changes

    def erase_log(self) -> bool:
        """Empty the write-ahead log, where what was deleted would live on; False while others read for long."""
        with self._mutex, self._named_errors():
            return erase_log(self._sql)

    def erase(self) -> bool:
        """Leave no byte of what was deleted in the file; False while others use it for long, or on a full disk."""
        with self._mutex, self._named_errors():
            # FTS5 only notes what is deleted: it goes when the parts of the index are merged.
            return erase(self._sql, self.path.parent, *self._full_text("optimize"))

    def _check(self) -> str:
        """What SQLite finds wrong, or a layout that is not ours. Damaged indexes are made again from the rows."""
        found = integrity(self._sql, 1)
        if found:
            with suppress(sqlite3.Error):
                for statement in ("REINDEX", *self._full_text("rebuild")):
                    self._sql.execute(statement)
                found = integrity(self._sql, 1)
        if not found and _definitions(self._sql, self.layout) != _expected(self.layout, self._version):
            found = ["its tables are not those that were made"]
        return found[0] if found else ""

    def _full_text(self, command: str) -> list[str]:
        """The statement that gives FTS5 a command, if there is such a table."""
        if not self.full_text:
            return []
        name = self.full_text.name
        return [f"INSERT INTO {name} ({name}) VALUES ('{command}')"]

    def _demand_sound(self) -> None:
        if self.damage:
            raise LibraryError(
                f"Using the {self.layout.what} {self.path}: it is damaged ({self.damage}). It cannot be built from "
                "anything else: restore it from a backup, or move it away and ingest the documents again."
            )

    def close(self) -> None:
        with self._mutex:
            self._sql.close()

    def _prepare(self) -> None:
        sql, layout = self._sql, self.layout
        sql.row_factory = sqlite3.Row
        found = sql.execute("PRAGMA user_version").fetchone()[0]
        if not 0 <= found <= layout.version:
            raise LibraryError(
                f"Opening the {layout.what} {self.path}: it has format {found}, this version of RAGBlend reads up to "
                f"{layout.version}. Use the version that made it, or another --home."
            )
        write_ahead(sql, "FULL" if layout.durable else "NORMAL")
        sql.execute("PRAGMA foreign_keys = ON")
        _add_functions(sql)
        self.full_text = layout.full_text if has_full_text(sql) else None
        self._version = layout.version - (self.full_text != layout.full_text)
        if found != self._version:
            if found:
                log.warning(
                    "%s is brought to the form of this version, once; that may take a minute", self.path
                )
            with transaction(sql):
                # Unless another process has done it meanwhile.
                _upgrade(sql, layout, sql.execute("PRAGMA user_version").fetchone()[0], self._version)
        # Text that damage has made no UTF-8 must not keep the sound rows beside it from being read.
        sql.text_factory = lenient_text

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _named(error, self.layout.what, self.path) from error


SEAL = "seal"


def sealing(table: str, columns: Sequence[str]) -> tuple[str, ...]:
    """Statements that give every row a checksum over these columns, kept true by SQLite itself at every write.

    SQLite does not notice a bit that flips on the disk. A row that does not fit its checksum cannot be changed, which
    would make the damage look sound; see `is_sound`.
    """
    new, old = (", ".join(f"{row}.{name}" for name in columns) for row in ("new", "old"))
    seal = f"UPDATE {table} SET {SEAL} = sealed({new}) WHERE rowid = new.rowid"
    damaged = f"SELECT RAISE(ABORT, 'a row is damaged') WHERE old.{SEAL} IS NOT sealed({old})"
    return (
        f"ALTER TABLE {table} ADD COLUMN {SEAL} BLOB",
        f"UPDATE {table} SET {SEAL} = sealed({', '.join(columns)})",
        f"CREATE TRIGGER {table}_added AFTER INSERT ON {table} BEGIN {seal}; END",
        f"CREATE TRIGGER {table}_changed AFTER UPDATE OF {', '.join(columns)} ON {table} BEGIN {damaged}; {seal}; END",
    )


def is_sound(row: Mapping[str, object] | sqlite3.Row, columns: Sequence[str]) -> bool:
    """Whether a row is what was written."""
    return bool(row[SEAL] == _sealed(*(row[name] for name in columns)))


def now() -> str:
    """This moment, in local time, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def storable(text: str) -> str:
    """Without halves of surrogate pairs, which SQLite cannot keep and no tokenizer takes.

    A model's tokens and a browser can give them, and so does Python for bytes that are not UTF-8.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def has_full_text(sql: sqlite3.Connection) -> bool:
    """Whether SQLite was built with FTS5."""
    return ("fts5",) in map(tuple, sql.execute("PRAGMA module_list"))


def _upgrade(sql: sqlite3.Connection, layout: Layout, found: int, version: int) -> None:
    steps = list(layout.upgrades[max(0, found - 1) : version - 1])
    if not found:
        steps.insert(0, tuple(layout.tables.strip().split(";\n")))
    elif found > version and layout.full_text:
        steps = [layout.full_text.removed]
    for statement in chain(*steps):
        sql.execute(statement)
    sql.execute(f"PRAGMA user_version = {version}")


def _add_functions(sql: sqlite3.Connection) -> None:
    sql.create_function("folded", 1, _folded, deterministic=True)
    sql.create_function("worded", 2, _worded, deterministic=True)
    sql.create_function("sealed", -1, _sealed, deterministic=True)


def _definitions(sql: sqlite3.Connection, layout: Layout) -> set[tuple[object, ...]]:
    """Of what we made: how SQLite keeps its own tables and those of FTS5 is each version's own.

    Without FTS5 its table itself cannot be dropped, and is there or not.
    """
    rows = {tuple(row) for row in sql.execute("SELECT type, name, tbl_name, sql FROM sqlite_master")}
    name = layout.full_text.name if layout.full_text else "sqlite"
    left = "" if has_full_text(sql) else name
    return {row for row in rows if row[1] != left and not str(row[1]).startswith(("sqlite_", f"{name}_"))}


def _expected(layout: Layout, version: int) -> set[tuple[object, ...]]:
    with closing(connect(":memory:")) as sql:
        _add_functions(sql)
        _upgrade(sql, layout, 0, version)
        return _definitions(sql, layout)


def _sealed(*values: object) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        raw = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
        digest.update(f"{type(value).__name__} {len(raw)} ".encode() + raw)
    return digest.digest()


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
    advice = "Restore it from a backup or move it away."
    if code in READ_ONLY:
        advice = "Check the folder's rights and space."
    elif error.sqlite_errorcode == sqlite3.SQLITE_CORRUPT_VTAB:
        advice = "Run `ragblend store repair`, which makes its index of words again."
    return LibraryError(f"Using the {what} {path}: {error}. Nothing was changed. {advice}")
