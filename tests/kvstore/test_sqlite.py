"""Helpers for our SQLite files: first openings take turns, and a damaged schema is rebuilt."""

import sqlite3
import threading
import time
from contextlib import closing
from types import SimpleNamespace

import pytest
from waiting import started

from ragblend.kvstore import sqlite
from ragblend.kvstore.sqlite import SqliteFile, connect, enable_write_ahead_log


@pytest.fixture
def being_read(tmp_path):
    """(path, reader) of a file that is not in WAL yet, and that somebody else is reading at this moment."""
    path = tmp_path / "rows.sqlite"
    with closing(connect(path)) as reader:
        reader.executescript("CREATE TABLE rows (n); INSERT INTO rows VALUES (1), (2)")
        reader.execute("BEGIN")
        assert reader.execute("SELECT n FROM rows").fetchone() == (1,)
        yield path, reader


def _impatient(path):
    """A connection for which SQLite does not wait, as it does not when two switch to WAL at the same moment."""
    sql = connect(path)
    sql.execute("PRAGMA busy_timeout = 0")
    return sql


def test_switching_to_wal_waits_for_readers(being_read, monkeypatch):
    path, reader = being_read
    waited, modes = threading.Event(), []
    monkeypatch.setattr(
        sqlite, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: waited.set())
    )

    def open_it():
        with closing(_impatient(path)) as sql:
            enable_write_ahead_log(sql)
            modes.append(sql.execute("PRAGMA journal_mode").fetchone()[0])

    opener = started(open_it)
    assert waited.wait(60)
    reader.execute("COMMIT")
    opener.join(60)
    assert modes == ["wal"]


def test_switching_to_wal_times_out(being_read, monkeypatch):
    path, _ = being_read
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)
    with closing(_impatient(path)) as sql, pytest.raises(sqlite3.OperationalError, match="locked"):
        enable_write_ahead_log(sql)


class Totals(SqliteFile):
    what, version = "totals", 1
    tables = ("CREATE TABLE Totals (tier TEXT PRIMARY KEY, hits INTEGER, CHECK (hits >= 0))",)


@pytest.mark.parametrize(("was", "became"), [(b"(tier TEXT", b"(uier TEXT"), (b"(hits >= 0", b"(hits <= 0")])
def test_a_file_with_a_damaged_schema_is_rebuilt(tmp_path, was, became):
    """SQLite finds nothing wrong with such a file, and every statement failed from then on."""
    path = tmp_path / "totals.db"
    with Totals(path) as file:
        file.execute("INSERT INTO Totals VALUES ('disk', 3)")
    with Totals(path) as file:
        assert file.rows("SELECT hits FROM Totals") == [(3,)]
    content = path.read_bytes()
    assert content.count(was) == 1
    path.write_bytes(content.replace(was, became))
    with Totals(path) as file:
        assert file.rows("SELECT tier FROM Totals") == []
        file.execute("INSERT INTO Totals VALUES ('disk', 3)")


class Interrupted(Totals):
    """While it is erased, another file is too."""

    def _full_text(self, command):
        self.thread = started(self.other.erase)
        self.thread.join(0.5)
        self.folder = self.column("PRAGMA temp_store_directory")[0]
        return []


def test_a_file_that_is_erased_has_its_own_temporary_folder(tmp_path):
    """SQLite has one setting for the whole process: another file's took its place, and the copy went to /tmp."""
    (tmp_path / "one").mkdir()
    with Interrupted(tmp_path / "one" / "totals.db") as one, Totals(tmp_path / "other.db") as one.other:
        assert one.erase()
        one.thread.join(60)
    assert one.folder == str(tmp_path / "one")
