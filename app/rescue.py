"""A damaged SQLite file: what can still be read of it goes into a new one, and it is kept beside that.

    keep a copy as FILE.damaged-1 -> copy rows to FILE.rescuing -> rename to FILE.rescued -> put in the place of FILE

A kill at any of these steps loses nothing: a FILE.rescued is whole, and is put in its place when FILE is next opened.
"""

import heapq
import logging
import os
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
from ragblend.kvstore.posix import sync_folder
from ragblend.kvstore.sqlite import connect, lenient_text

log = logging.getLogger("ragblend")
LARGEST_ROWID = 2**40
MOST_FAILURES = 20_000  # reads of a table that end in damage; behind them the rest is given up
Gap = tuple[int, int]  # rows from the first number to the last that cannot be read


@dataclass
class Rescued:
    """What became of a damaged file. kept: where it is now; copied: rows by table; gaps: what could not be read."""

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
    """The damaged files that a database of that path once was."""
    kept = path.parent.glob(f"{path.name}.damaged-*")
    return sorted(each for each in kept if each.name.rpartition("-")[2].isdigit())


def finish(path: Path) -> None:
    """Put a rescued file in its place, if there is one."""
    rescued = Path(f"{path}.rescued")
    if rescued.exists():
        for suffix in ("-wal", "-shm"):
            Path(f"{path}{suffix}").unlink(missing_ok=True)
        os.replace(rescued, path)
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
    """Copy what can be read, and put it in the place of the file. Nobody else may use it meanwhile.

    new: an empty database at `FILE.rescuing` with its tables, without foreign keys, in a transaction; it is closed.
    what: the file's name in messages; why: what is wrong with it; copied, adopted, mark_lost: as `Database` has them.
    Raises LibraryError where nothing at all can be read: then the file stays; StoreFullError without room for two more
    copies of it.
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
        os.replace(rescuing, f"{path}.rescued")
        sync_folder(path.parent)
    except BaseException as error:
        discard_database(kept)
        discard_database(Path(f"{path}.rescuing"))
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise StoreFullError(
                f"Opening the {what} {path}: it is damaged ({why}), and the disk has no room for a copy of what can "
                "be read. Free some space; nothing was changed."
            ) from error
        raise
    finish(path)
    log.warning("the %s %s: %s", what, path, found)
    return found


def _copy_tables(
    old: sqlite3.Connection,
    new: sqlite3.Connection,
    copied: Sequence[str],
    adopted: Sequence[str],
    found: Rescued,
) -> None:
    """All rows that can be read, but for those that belong to lost ones; counted in `found`."""
    for table in copied:
        found.copied[table], found.gaps[table] = _copy_rows(old, new, table)
    for statement in adopted:
        new.execute(statement)
    for table, number, *_ in new.execute("PRAGMA foreign_key_check").fetchall():
        new.execute(f"DELETE FROM {table} WHERE rowid = ?", (number,))
        found.copied[table] -= 1
        found.gaps[table].append((number, number))
    found.gaps = {table: joined(gaps) for table, gaps in found.gaps.items()}


def _copy_file(path: Path, kept: Path) -> None:
    for suffix in ("", "-wal"):
        source, target = Path(f"{path}{suffix}"), Path(f"{kept}{suffix}")
        if source.exists():
            make_private_file(target)
            shutil.copyfile(source, target)
            sync_file(target)


def _copy_rows(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> tuple[int, list[Gap]]:
    """How many rows were copied, and what could not be."""
    about = new.execute(f"PRAGMA table_info({table})").fetchall()
    names = [str(row[1]) for row in about]
    numbered = new.execute("SELECT wr FROM pragma_table_list WHERE name = ?", (table,)).fetchone()[0] == 0
    if numbered and not any(row[2] == "INTEGER" and row[5] for row in about):
        names.insert(0, "rowid")
    columns = ", ".join(names)
    insert = f"INSERT OR IGNORE INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
    gaps: list[Gap] = []
    if numbered:
        gaps = list(_each_range(old, new, f"SELECT rowid, {columns} FROM {table} NOT INDEXED", insert))
    else:  # small tables, read from both ends
        for order in ("", " ORDER BY 1 DESC"):
            with suppress(sqlite3.Error):
                for row in old.execute(f"SELECT {columns} FROM {table}{order}"):
                    new.execute(insert, tuple(row))
                break
        else:
            gaps = [(0, 0)]
    if gaps:
        _copy_from_indexes(old, new, table)
    return int(new.execute(f"SELECT count(*) FROM {table}").fetchone()[0]), gaps


def _copy_from_indexes(old: sqlite3.Connection, new: sqlite3.Connection, table: str) -> None:
    """Rows of which an index still has what they cannot do without; the rest of them is as in a new row."""
    for _, index, *_ in new.execute(f"PRAGMA index_list({table})").fetchall():
        names = ", ".join(str(row[2]) for row in new.execute(f"PRAGMA index_info({index})"))
        marks = ", ".join("?" * len(names.split(", ")))
        with suppress(sqlite3.Error):
            for row in old.execute(f"SELECT {names} FROM {table} INDEXED BY {index}"):
                new.execute(f"INSERT OR IGNORE INTO {table} ({names}) VALUES ({marks})", tuple(row))


def _each_range(old: sqlite3.Connection, new: sqlite3.Connection, select: str, insert: str) -> Iterator[Gap]:
    """Copy all rows that can be read, the widest ranges of their numbers first; those that cannot are yielded."""
    ranges, failures = [(-LARGEST_ROWID, 1, LARGEST_ROWID)], 0
    while ranges:
        _, first, last = heapq.heappop(ranges)
        at = first - 1  # the last that was read
        try:
            for number, *row in old.execute(
                f"{select} WHERE rowid BETWEEN ? AND ? ORDER BY rowid", (first, last)
            ):
                at = number
                if new.execute(insert, row).rowcount < 1:  # it breaks what the table promises
                    yield number, number
            continue
        except sqlite3.DatabaseError:
            failures += 1
        first = at + 1
        if first >= last or failures > MOST_FAILURES:
            if first <= last:
                yield first, last
            continue
        middle = (first + last) // 2
        for low, high in ((first, middle), (middle + 1, last)):
            heapq.heappush(ranges, (low - high, low, high))


def joined(gaps: Iterable[Gap]) -> list[Gap]:
    """The same rows, in as few gaps as there are."""
    found: list[Gap] = []
    for first, last in sorted(gaps):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return found
