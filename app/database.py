"""The app's own SQLite files: a damaged one is set aside, and its readable rows are copied to a new file."""

import hashlib
import re
import sqlite3
import unicodedata
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from ragblend.app import rescue
from ragblend.app.rescue import Gap, Rescued
from ragblend.kvstore.errors import LibraryError, StoreFullError
from ragblend.kvstore.files import discard_database, is_same_file, make_private_file
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.sqlite import (
    BUSY,
    BUSY_SECONDS,
    SqliteFile,
    connect,
    error_code,
    lenient_text,
)

BATCH_ROWS = 500
# Combining marks, which Python does not count as letters: accents, vowels of Indic scripts.
SIGNS = "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u0900-\u0963\u0966-\u0dff"
WORD = re.compile(rf"(?:[^\W_]|[{SIGNS}])+")
# Scripts whose blanks do not separate words: they have none, or endings are joined to a word (Korean).
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai and Lao, Burmese, Khmer
    "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Japanese, Chinese
    "\uac00-\ud7a3"  # Korean
)
# A word, or a run of letters without spaces.
RUN = re.compile(rf"[{UNSPACED}]+|(?:(?![{UNSPACED}])(?:[^\W_]|[{SIGNS}]))+")
IS_UNSPACED = re.compile(rf"[{UNSPACED}]")
NO_ACCESS = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)


class Database(SqliteFile):
    """An SQLite file whose content cannot be rebuilt from anything else. Raises LibraryError, StoreFullError.

    rescued: the result if the file was damaged and its readable rows were copied to a new one. copied: the tables that
    a rescue copies; adopted: statements that restore lost rows to which other rows refer.
    """

    synchronous = "FULL"
    copied: ClassVar[tuple[str, ...]]
    adopted: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: Path) -> None:
        self.rescued: Rescued | None = None
        super().__init__(path)

    @staticmethod
    def mark_lost(sql: sqlite3.Connection, gaps: dict[str, list[Gap]]) -> None:
        """Mark in the new file what could not be read of the damaged one."""

    def among(self, query: str, keys: Iterable[object], *values: object) -> list[sqlite3.Row]:
        """The rows of a query that ends in `IN`, for any number of keys; values: of the parameters before `IN`."""
        distinct = list(dict.fromkeys(keys))
        found: list[sqlite3.Row] = []
        for start in range(0, len(distinct), BATCH_ROWS):
            batch = distinct[start : start + BATCH_ROWS]
            found += self.rows(f"{query} ({', '.join('?' * len(batch))})", *values, *batch)
        return found

    @property
    def changes(self) -> int:
        """How many rows this connection has written so far."""
        with self.connection() as sql:
            return sql.total_changes

    # --- opening

    def _must_reopen(self) -> bool:
        # A deleted file stays open: reopening would replace it by an empty one.
        return super()._must_reopen() and self.path.exists()

    def _open(self) -> sqlite3.Connection:
        if Path(f"{self.path}.rescued").exists():
            with self._rescue_lock() as lock, lock.hold():
                rescue.finish(self.path)
        return super()._open()

    def _configure(self, sql: sqlite3.Connection) -> None:
        sql.row_factory = sqlite3.Row
        # Text that is not UTF-8 because of damage must not make other rows unreadable.
        sql.text_factory = lenient_text
        sql.execute("PRAGMA foreign_keys = ON")
        sql.create_function("folded", 1, lambda text: folded(str(text)), deterministic=True)
        sql.create_function("worded", 2, _indexed_text, deterministic=True)

    # --- damage and errors

    def _handle_damage(self, why: str) -> None:
        self._disconnect()
        with self._rescue_lock() as lock, lock.hold():
            if is_same_file(self.path, self._identity):  # else another process has rescued it
                new = self._new_file(Path(f"{self.path}.rescuing"))
                self.rescued = rescue.rescue(
                    self.path, new, self.what, why, self.copied, self.adopted, self.mark_lost
                )

    def _rescue_lock(self) -> WriterLock:
        return WriterLock(self.path.with_name(f".{self.path.name}.lock"), BUSY_SECONDS)

    def _new_file(self, path: Path) -> sqlite3.Connection:
        """A new file with the tables, in a transaction, so that rows may be inserted in any order."""
        discard_database(path)
        make_private_file(path)
        sql = connect(path)
        self._configure(sql)
        # No other process opens it before it is complete, and a kill must not leave a journal.
        for setting in ("journal_mode = MEMORY", "foreign_keys = OFF"):
            sql.execute(f"PRAGMA {setting}")
        sql.execute("BEGIN")
        self._make_tables(sql)
        return sql

    def _other_version_error(self, found: int) -> Exception:
        return LibraryError(
            f"Opening the {self.what} {self.path}: another version of RAGBlend made it (format {found}; this one has "
            f"{self.version}). Use that version, or another --home, into which your documents can be ingested again. "
            "Nothing was changed."
        )

    def _named_error(self, error: Exception) -> Exception:
        if isinstance(error, OSError):
            return LibraryError(f"Opening the {self.what} {self.path}: {error.strerror}. Check its rights.")
        code = error_code(error)
        if code == sqlite3.SQLITE_FULL:
            return StoreFullError(
                f"Writing to the {self.what} {self.path}: the disk is full. Free some space; nothing was lost."
            )
        if code in BUSY:
            return LibraryError(
                f"Using the {self.what} {self.path}: another program has locked it. Close that program, and try again."
            )
        advice = "Close every program that uses it: when it is opened again, what can be read is kept."
        if code in NO_ACCESS:
            advice = "Check the folder's rights and space."
        elif getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CORRUPT_VTAB:
            advice = "Run `ragblend store repair`, which rebuilds its index of words."
        return LibraryError(f"Using the {self.what} {self.path}: {error}. Nothing was changed. {advice}")


def now() -> str:
    """This moment, in local time, to the second."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def storable(text: str) -> str:
    """Replace lone surrogates, which SQLite cannot store and no tokenizer accepts.

    They come from a model's tokens, a browser, or Python's decoding of bytes that are not UTF-8.
    """
    return text.encode("utf-8", "replace").decode("utf-8")


def folded(text: str) -> str:
    """The text for comparisons: without case, in Unicode's form NFKC."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def split_words(text: str) -> list[str]:
    """The words of a text, folded; for scripts without spaces, each pair of neighbouring letters."""
    return [word for run in RUN.findall(folded(text)) for word in _words(run)]


def indexed_words(collection: str, text: str) -> list[str]:
    """The words of a text as they are indexed: each prefixed by its collection, so that collections share none.

    The prefix does not affect FTS5's stemmer.
    """
    prefix = int.from_bytes(hashlib.blake2b(collection.encode(), digest_size=6).digest())
    return [f"x{prefix}{word}" for word in split_words(text)]


def _words(run: str) -> list[str]:
    """The run, or each pair of neighbouring letters if its script has no spaces between words."""
    if len(run) < 2 or not IS_UNSPACED.match(run):
        return [run]
    return [run[at : at + 2] for at in range(len(run) - 1)]


def _indexed_text(collection: str, text: bytes) -> str:
    """SQL's `worded`: what the index of words stores of a text.

    text is bytes, because a damaged row that is not UTF-8 must still be deletable.
    """
    return " ".join(indexed_words(collection, text.decode("utf-8", "replace")))
