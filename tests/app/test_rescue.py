"""A damaged registry, conversations, jobs: set aside, what can be read is in a new file, and a kill loses nothing."""

import os
import sqlite3
import stat

import numpy as np
import pytest
from app_fakes import Killed
from doubles import raising

from ragblend.app import database, rescue
from ragblend.app.answering.chats import Chats
from ragblend.app.database import Database
from ragblend.app.library.documents import DocumentPassage, FileFacts
from ragblend.app.library.job_store import JobStore
from ragblend.app.library.registry import Library
from ragblend.app.library.word_search import by_words
from ragblend.app.rescue import merge_gaps, set_aside_files
from ragblend.kvstore.errors import LibraryError, StoreFullError

PAGE = 4096
TEXT = "a line of text that fills pages, " * 20


class Notes(Database):
    what, version = "notes", 1
    tables = (
        "CREATE TABLE folders (name TEXT PRIMARY KEY)",
        "CREATE TABLE notes (id INTEGER PRIMARY KEY, folder TEXT NOT NULL REFERENCES folders (name), text TEXT)",
        "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID",
    )
    copied = ("folders", "notes", "facts")


@pytest.fixture
def path(tmp_path):
    """Two hundred notes in two folders, and a fact."""
    path = tmp_path / "notes.sqlite"
    with Notes(path) as notes, notes.transaction() as sql:
        sql.executemany("INSERT INTO folders VALUES (?)", [("a",), ("b",)])
        rows = [(n, "ab"[n % 2], f"{n} {TEXT}") for n in range(1, 201)]
        sql.executemany("INSERT INTO notes VALUES (?, ?, ?)", rows)
        sql.execute("INSERT INTO facts VALUES ('mode', 'quiet')")
    return path


def page_with(path, text):
    return path.read_bytes().index(text) // PAGE


def overwrite(path, page, by=bytes(PAGE)):
    content = bytearray(path.read_bytes())
    content[page * PAGE : (page + 1) * PAGE] = by
    path.write_bytes(content)


def root_of(path, table):
    with sqlite3.connect(path) as sql:
        root = sql.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchone()[0]
    sql.close()
    return root - 1


def test_all_but_the_damaged_page_is_in_a_new_file_and_that_is_said(path, caplog):
    overwrite(path, page_with(path, b"100 a line"))
    damaged = path.read_bytes()
    with Notes(path) as notes:
        left = notes.column("SELECT id FROM notes ORDER BY id")
        assert 190 <= len(left) < 200 and 100 not in left
        assert all(
            text.startswith(f"{n} ") for n, text in map(tuple, notes.rows("SELECT id, text FROM notes"))
        )
        assert notes.column("SELECT name FROM folders") == ["a", "b"]
        assert notes.column("SELECT value FROM facts") == ["quiet"]
        (gap,) = notes.rescued.gaps["notes"]
        assert sorted({*range(1, 201)} - {*left}) == list(range(gap[0], gap[1] + 1))
        (kept,) = set_aside_files(path)
        assert notes.rescued.kept == kept and kept.read_bytes()[PAGE:] == damaged[PAGE:]
        assert stat.S_IMODE(kept.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o600
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(kept) in said and f"{len(left)} of notes" in said and "1 in notes" in said
    with Notes(path) as notes:
        assert notes.rescued is None and len(notes.column("SELECT id FROM notes")) == len(left)
    assert sorted(each.name for each in path.parent.iterdir() if "rescu" in each.name) == []


def test_what_belongs_to_a_lost_row_is_left_out_and_counted(path):
    """A note without its folder would violate a foreign key."""
    with sqlite3.connect(path) as sql:
        sql.execute("DELETE FROM folders WHERE name = 'b'")
    sql.close()
    overwrite(path, page_with(path, b"100 a line"))
    with Notes(path) as notes:
        assert set(notes.column("SELECT folder FROM notes")) == {"a"}
        assert notes.rescued.copied["notes"] == len(notes.column("SELECT id FROM notes"))


def test_a_table_whose_root_is_gone_is_named_and_the_others_are_kept(path):
    overwrite(path, root_of(path, "notes"), b"\xff" * PAGE)
    with Notes(path) as notes:
        assert notes.column("SELECT name FROM folders") == ["a", "b"]
        assert notes.column("SELECT count(*) FROM notes") == [0]
        assert notes.rescued.gaps["notes"]


def test_what_is_in_the_log_alone_is_kept_too(path):
    with Notes(path) as writing:
        writing.execute("INSERT INTO facts VALUES ('last', 'thing')")
        log = path.with_name(f"{path.name}-wal").read_bytes()
    overwrite(path, page_with(path, b"100 a line"))
    path.with_name(f"{path.name}-wal").write_bytes(log)  # as after a kill
    with Notes(path) as notes:
        assert notes.rescued is not None
        assert set(notes.column("SELECT name FROM facts")) == {"mode", "last"}


def test_a_file_of_which_nothing_can_be_read_stays_as_it_is(path):
    rubbish = b"this is no database, " * 1000
    path.write_bytes(rubbish)
    with pytest.raises(LibraryError, match="backup"):
        Notes(path)
    assert path.read_bytes() == rubbish and set_aside_files(path) == []


@pytest.mark.parametrize("found", [2, 99])
def test_a_file_of_another_version_is_named_and_left_alone(path, found):
    with sqlite3.connect(path) as sql:
        sql.execute(f"PRAGMA user_version = {found}")
    sql.close()
    before = path.read_bytes()
    with pytest.raises(
        LibraryError, match=rf"format {found}; this one has 1.*ingested again.*Nothing was changed"
    ):
        Notes(path)
    assert path.read_bytes() == before and set_aside_files(path) == []


@pytest.mark.parametrize("step", range(8))
def test_a_kill_at_any_step_of_a_rescue_loses_nothing(path, monkeypatch, step):
    """The process is killed after that many changes of the folder; the next one finds the same rows."""
    overwrite(path, page_with(path, b"100 a line"))
    copy = path.with_name("copy.sqlite")
    copy.write_bytes(path.read_bytes())
    with Notes(copy) as notes:
        expected = notes.column("SELECT id FROM notes")
    done = 0

    def dying(real):
        def call(*arguments, **more):
            nonlocal done
            done += 1
            if done > step:
                raise Killed
            return real(*arguments, **more)

        return call

    with monkeypatch.context() as patched:
        for module, name in (
            (os, "replace"),
            (rescue, "sync_file"),
            (rescue, "sync_folder"),
            (rescue, "make_private_file"),
        ):
            patched.setattr(module, name, dying(getattr(module, name)))
        patched.setattr(rescue, "discard_database", lambda path: None)  # a killed process tidies nothing
        try:
            Notes(path).close()
        except Killed:
            assert done > step
    with Notes(path) as notes:
        assert notes.column("SELECT id FROM notes") == expected
        assert notes.column("SELECT value FROM facts") == ["quiet"]
    assert set_aside_files(path)


@pytest.mark.parametrize("when", ["copying the file", "writing the new one"])
def test_a_full_disk_changes_nothing(path, monkeypatch, when):
    """Rows that the new file had no room for were taken for unreadable rows of the old one."""
    overwrite(path, page_with(path, b"100 a line"))
    before, connect = path.read_bytes(), database.connect

    def small(path):
        sql = connect(path)
        sql.execute("PRAGMA max_page_count = 20")
        return sql

    if when == "copying the file":
        monkeypatch.setattr(rescue.shutil, "copyfile", raising(OSError(28, "No space left on device")))
    else:
        monkeypatch.setattr(database, "connect", small)
    with pytest.raises(StoreFullError, match="no room"):
        Notes(path)
    assert path.read_bytes()[PAGE:] == before[PAGE:] and set_aside_files(path) == []


def test_a_process_that_has_the_file_open_goes_on_with_the_new_one(path):
    with Notes(path) as first:
        first.execute("INSERT INTO facts VALUES ('one', '1')")
        first.erase_log()
        overwrite(path, page_with(path, b"100 a line"))
        with Notes(path) as second:
            assert second.rescued is not None
            first.execute("INSERT INTO facts VALUES ('two', '2')")
            assert set(second.column("SELECT name FROM facts")) == {"mode", "one", "two"}


def test_conversations_and_jobs_are_rescued_alike(tmp_path):
    with Chats(tmp_path / "chats.sqlite") as chats:
        chat = chats.create()
        for number in range(60):
            chats.add(chat.id, "user", f"message {number:03} {TEXT}")
    with JobStore(tmp_path / "jobs.sqlite") as jobs:
        jobs.add("ingest", "default", [(f"/{n:04}/{'x' * 200}", 1) for n in range(200)])
        jobs.set_fact("name", "value")
    overwrite(tmp_path / "chats.sqlite", page_with(tmp_path / "chats.sqlite", b"message 030"))
    overwrite(tmp_path / "jobs.sqlite", page_with(tmp_path / "jobs.sqlite", b"/0100/"))
    with Chats(tmp_path / "chats.sqlite") as chats:
        assert 50 < len(chats.messages(chat.id)) < 60
        assert chats.add(chat.id, "user", "And on.").id > 60, "the numbers of lost messages do not come back"
    with JobStore(tmp_path / "jobs.sqlite") as jobs:
        assert 150 < jobs.counts()["queued"] < 200 and jobs.fact("name") == "value"


def test_messages_whose_conversation_is_lost_are_kept_in_one_without_a_title(tmp_path):
    path = tmp_path / "chats.sqlite"
    with Chats(path) as chats:
        for number in range(3):
            chats.add(chats.create("A title").id, "user", f"message {number}")
    overwrite(path, root_of(path, "chats"))
    with Chats(path) as chats:
        assert [chat.title for chat in chats.page()[0]] == ["", "", ""]
        assert [chats.messages(n)[0].text for n in (1, 2, 3)] == ["message 0", "message 1", "message 2"]


def letters(library, *texts):
    """A document of these passages, erased from the log and closed; and its passages."""
    document = library.begin("letters", "/a.txt")
    passages = [DocumentPassage(f"node{n}", document, n, text, "") for n, text in enumerate(texts)]
    rows = [np.ones((1, 3), np.float32)] * len(texts)
    library.replace_passages(document, FileFacts(1, 2, "x"), "r", passages, rows)
    library.finish(document)
    library.erase()
    library.close()
    return document, passages


def test_documents_of_which_only_an_index_is_left_are_named_and_keep_their_passages(library):
    document, passages = letters(library, "Dear Ada", "Dear Bo", "Dear Cy")
    overwrite(library.path, root_of(library.path, "documents"))
    with Library(library.path) as again:
        (found,) = again.incomplete_documents()
        assert (found.id, found.path, found.collection) == (document, "/a.txt", "letters")
        assert again.passages_of(document) == passages
        assert by_words(again, ["letters"], "Ada", 5).keys() == {"node0"}


def test_a_row_that_breaks_a_rule_is_had_again_from_an_index_or_counted(library):
    """One flipped bit in a document's state lost the document and its passages without a message."""
    document, passages = letters(library, "Dear Ada")
    content = library.path.read_bytes()
    at = content.index(b"/a.txtlettersdone") + len(b"/a.txtletters")
    library.path.write_bytes(content[:at] + b"dqne" + content[at + 4 :])
    with Library(library.path) as again:
        assert again.rescued is not None and again.rescued.gaps["documents"]
        (found,) = again.incomplete_documents()
        assert (found.id, found.path) == (document, "/a.txt") and again.passages_of(document) == passages


def test_documents_that_lost_passages_are_named_whoever_puts_the_file_in_its_place(library, monkeypatch):
    """After a kill before the rename, the next process only renames the file."""
    document, _ = letters(library, *(f"{n} {TEXT}" for n in range(40)))
    overwrite(library.path, page_with(library.path, b"20 a line"))

    def killed(path):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(rescue, "finish", killed)
        with pytest.raises(Killed):
            Library(library.path)
    with Library(library.path) as again:
        assert again.rescued is None
        assert [each.id for each in again.incomplete_documents()] == [document]


def test_gaps_that_touch_are_one() -> None:
    assert merge_gaps([(5, 6), (1, 2), (3, 3), (8, 9)]) == [(1, 3), (5, 6), (8, 9)]
