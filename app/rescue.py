"""Rescues a damaged SQLite file: copies all readable rows to a new file, and keeps the damaged one.

    keep a copy as FILE.damaged-1 -> copy rows to FILE.rescuing -> rename to FILE.rescued -> replace FILE

A kill at any step loses nothing: a FILE.rescued is complete, and replaces FILE when that is next opened.
"""

import heapq
import logging
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ragblend.kvstore.errors import LibraryError, StoreFullError
from ragblend.kvstore.files import (
    NO_ROOM,
    discard_database,
    make_private_file,
    sync_file,
)
from ragblend.kvstore.sqlite import connect, error_code, lenient_text
from ragblend.kvstore.system import replace, sync_folder

log = logging.getLogger("ragblend")
LARGEST_ROWID = 2**40
MAX_FAILURES = 20_000  # failing reads per table, after which its rest is given up
Gap = tuple[int, int]  # first and last number of a range of unreadable rows


@dataclass
class Rescued:
    """The result of a rescue. kept: the damaged file's new path; copied: rows by table; gaps: unreadable rows."""

    why: str
    kept: Path
    copied: dict[str, int] = field(default_factory=dict)
    gaps: dict[str, list[Gap]] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = ", ".join(f"{rows:,} of {table}" for table, rows in self.copied.items() if rows)
        lost = ", ".join(f"{len(gaps)} in {table}" for table, gaps in self.gaps.items() if gaps)
        missing = f"; places that could not be read: {lost}" if lost else "; nothing is missing"
        return (
            f"it was damaged ({self.why}). What could be read is in a new file (rows: {rows}){missing}. The damaged "
            f"one is kept as {self.kept}: it has your text in it, so remove it once you do not need it."
        )


def set_aside_files(path: Path) -> list[Path]:
    """The damaged files of that database which were set aside."""
    kept = path.parent.glob(f"{path.name}.damaged-*")
    return sorted(each for each in kept if each.name.rpartition("-")[2].isdigit())


def finish(path: Path) -> None:
    """Complete a rescue, if there is one: FILE.rescued replaces FILE."""
    rescued = Path(f"{path}.rescued")
    if rescued.exists():
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        replace(rescued, path)
        sync_folder(path.parent)


def rescue(
    path: Path,
    new: sqlite3.Connection,
    what: str,
    why: str,
    copied: Sequence[str],
    adopted: Sequence[str],
    mark_lost: Callable[[sqlite3.Connection, dict[str, list[Gap]]], None],
) -> Rescued:
    """Copy all readable rows, and replace the file. Nothing else may use it meanwhile.

    new: an empty database at `FILE.rescuing` with the tables, without foreign keys, in a transaction; it is closed.
    what: the file's name in messages; why: its damage; copied, adopted, mark_lost: as in `Database`.
    Raises LibraryError if nothing can be read (the file then stays), StoreFullError if the disk cannot hold two copies.
    """
    kept = next(each for number in count(1) if not (each := Path(f"{path}.damaged-{number}")).exists())
    found = Rescued(why, kept)
    try:
        with closing(new):
            _copy_file(path, kept)
            with closing(connect(path)) as old:
                old.text_factory = lenient_text
                _copy_tables(old, new, copied, adopted, found)
            if not any(found.copied.values()):
                raise LibraryError(
                    f"Opening the {what} {path}: it is damaged ({why}), and nothing of it can be read. It cannot be "
                    "built from anything else: restore it from a backup, or move it away and ingest the documents "
                    "again."
                )
            mark_lost(new, found.gaps)
            new.execute("COMMIT")
        rescuing = Path(f"{path}.rescuing")
        sync_file(rescuing)
        replace(rescuing, f"{path}.rescued")
        sync_folder(path.parent)
    except BaseException as error:
        discard_database(kept)
        discard_database(Path(f"{path}.rescuing"))
        if _is_disk_full(error):
            raise StoreFullError(
                f"Opening the {what} {path}: it is damaged ({why}), and the disk has no room for a copy of what can "
                "be read. Free some space; nothing was changed."
            ) from error
        raise
    finish(path)
    log.warning("the %s %s: %s", what, path, found)
    return found


def _is_disk_full(error: BaseException) -> bool:
    if isinstance(error, sqlite3.Error):
        return error_code(error) == sqlite3.SQLITE_FULL
    return isinstance(error, OSError) and error.errno in NO_ROOM


class _UnreadableError(Exception):
    """A row of the damaged file cannot be read."""


def _read(old: sqlite3.Connection, select: str, *arguments: int) -> Iterator[sqlite3.Row]:
    """The rows; raises _UnreadableError at damage. Errors of writing the rows elsewhere are not caught here."""
    try:
        yield from old.execute(select, arguments)
    except sqlite3.Error as error:
        raise _UnreadableError from error


def _copy_tables(
    old: sqlite3.Connection,
    new: sqlite3.Connection,
    copied: Sequence[str],
    adopted: Sequence[str],
    found: Rescued,
) -> None:
    """Copy all readable rows, except those that refer to a lost row; records their number and the gaps in `found`."""
    for table in copied:
        found.copied[table], found.gaps[table] = _copy_rows(old, new, table)
    for statement in adopted:
        new.execute(statement)
    for table, number, *_ in new.execute("PRAGMA foreign_key_check").fetchall():
        new.execute(f"DELETE FROM {table} WHERE rowid = ?", (number,))
        found.copied[table] -= 1
        found.gaps[table].append((number, number))
    found.gaps = {table: merge_gaps(gaps) for table, gaps in found.gaps.items()}


def _copy_file(path: Path, kept: Path) -> None:
    for suffix in ("", "-wal"):
        source, target = Path(f"{path}{suffix}"), Path(f"{kept}{suffix}")
        if source.exists():
            make_private_file(target)
            shutil.copyfile(source, target)
            sync_file(target)


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> tuple[int, list[Gap]]:
    """Copy a table; returns the number of rows, and the gaps."""
    table_columns = new.execute(f"PRAGMA table_info({table})").fetchall()
    names = [str(row[1]) for row in table_columns]
    # wr: WITHOUT ROWID. An INTEGER PRIMARY KEY is the rowid.
    has_rowid = new.execute("SELECT wr FROM pragma_table_list WHERE name = ?", (table,)).fetchone()[0] == 0
    if has_rowid and not any(row[2] == "INTEGER" and row[5] for row in table_columns):
        names.insert(0, "rowid")
    columns = ", ".join(names)
    insert = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
    gaps: list[Gap] = []
    if has_rowid:
        gaps = list(_copy_ranges(old, new, f"SELECT rowid, {columns} FROM {table} NOT INDEXED", insert))
    else:  # for small tables, which are read from both ends
        for order in ("", " ORDER BY 1 DESC"):
            with suppress(_UnreadableError):
                for row in _read(old, f"SELECT {columns} FROM {table}{order}"):
                    new.execute(insert, tuple(row))
                break
        else:
            gaps = [(0, 0)]  # which rows are missing is unknown
    if gaps:
        _copy_from_indexes(old, new, table)
    return int(new.execute(f"SELECT count(*) FROM {table}").fetchone()[0]), gaps


def _copy_from_indexes(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    """Restore rows whose required columns are all in an index; other columns get their defaults."""
    for _, index, *_ in new.execute(f"PRAGMA index_list({table})").fetchall():
        names = ", ".join(str(row[2]) for row in new.execute(f"PRAGMA index_info({index})"))
        marks = ", ".join("?" * len(names.split(", ")))
        with suppress(_UnreadableError):
            for row in _read(old, f"SELECT {names} FROM {table} INDEXED BY {index}"):
                new.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(row))


def _copy_ranges(old: sqlite3.Connection, new: sqlite3.Connection, select: str, insert: str) -> Iterator[Gap]:
    """Copy all readable rows, the widest ranges of row numbers first; yields the gaps."""
    ranges, failures = [(-LARGEST_ROWID, 1, LARGEST_ROWID)], 0
    while ranges:
        _, first, last = heapq.heappop(ranges)
        last_read = first - 1
        try:
            for number, *row in _read(
                old, f"{select} WHERE rowid BETWEEN ? AND ? ORDER BY rowid", first, last
            ):
                last_read = number
                if new.execute(insert, row).rowcount < 1:  # it violates a constraint
                    yield number, number
            continue
        except _UnreadableError:
            failures += 1
        first = last_read + 1
        if first >= last or failures > MAX_FAILURES:
            if first <= last:
                yield first, last
            continue
        middle = (first + last) // 2
        for low, high in ((first, middle), (middle + 1, last)):
            heapq.heappush(ranges, (low - high, low, high))


def merge_gaps(gaps: Iterable[Gap]) -> list[Gap]:
    """Merge gaps that overlap or follow each other directly."""
    merged: list[Gap] = []
    for first, last in sorted(gaps):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged
