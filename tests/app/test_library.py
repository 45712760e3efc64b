"""The registry: every change is all or nothing, ids are stable, deletion is complete, damage is named."""

import random
import re
import sqlite3
import stat
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from ragblend.app import database
from ragblend.app import library as registry
from ragblend.app.database import Database, Layout
from ragblend.app.documents import FileFacts, Passage, State, document_id, node_id
from ragblend.app.library import DOCUMENT, INSERT_PASSAGE, Library
from ragblend.kvstore.errors import LibraryError

FACTS = FileFacts(10, 20, "ab" * 32)


def fill(library, path, texts, recipe="r"):
    document = library.begin("default", path)
    numbered = enumerate(texts)
    passages = [Passage(node_id(document, i, text), document, i, text, f"p. {i}") for i, text in numbered]
    rows = [np.full((2 + i, 3), i, dtype=np.float32) for i in range(len(texts))]
    library.replace_passages(document, FACTS, recipe, passages, rows)
    return document, [passage.node_id for passage in passages]


def test_round_trip(library, tmp_path):
    document, nodes = fill(library, "/a/b.txt", ["one", "two"])
    library.finish(document)
    library.close()
    with Library(tmp_path / "library.sqlite") as again:
        found = again.document("default", "/a/b.txt")
        assert (found.state, found.facts, found.recipe, found.passages) == (State.DONE, FACTS, "r", 2)
        assert [passage.text for passage in again.passages_of(document)] == ["one", "two"]
        ids, rows = again.embeddings_of(document)
        assert ids == nodes and [r.dtype for r in rows] == [np.float32] * 2
        assert [r.tolist() for r in rows] == [[[0] * 3] * 2, [[1] * 3] * 3]
        assert again.passages([nodes[1], "unknown"]).keys() == {nodes[1]}
        assert again.damage == ""


def test_file_is_private_and_durable(library):
    for suffix in ("", "-wal", "-shm"):
        path = library.path.with_name(library.path.name + suffix)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    values = {name: library.rows(f"PRAGMA {name}")[0][0] for name in ("synchronous", "journal_mode")}
    assert values == {"synchronous": 2, "journal_mode": "wal"}


def test_ids_are_stable_and_differ():
    document = document_id("default", "/a")
    assert document == document_id("default", "/a") != document_id("other", "/a")
    assert node_id(document, 0, "x") == node_id(document, 0, "x") != node_id(document, 1, "x")


def test_replaced_passages_are_stale_until_finished(library):
    document, before = fill(library, "/a", ["same", "old"])
    _, after = fill(library, "/a", ["same", "new", "more"])
    assert before[0] == after[0]
    assert library.stale(document) == [before[1]]
    fill(library, "/a", ["same", "old"])  # back again before the first change was finished
    assert set(library.stale(document)) == set(after[1:])
    library.finish(document)
    assert library.stale(document) == []


def test_a_failed_change_changes_nothing(library):
    document, nodes = fill(library, "/a", ["one", "two"])
    twice = [Passage("same", document, 0, "x", ""), Passage("same", document, 1, "y", "")]
    with pytest.raises(LibraryError, match="Nothing was changed"):
        library.replace_passages(document, FACTS, "r", twice, [np.zeros((1, 3), np.float32)] * 2)
    assert [passage.node_id for passage in library.passages_of(document)] == nodes
    assert library.stale(document) == []


def test_removed_text_is_not_in_the_file_any_more(library):
    document, _ = fill(library, "/a", ["unmistakable words " * 20])
    fill(library, "/b", ["other"])
    library.remove(document)
    everything = b"".join(path.read_bytes() for path in library.path.parent.iterdir())
    assert b"unmistakable" not in everything and b"other" in everything
    assert library.count_passages("default") == 1


def test_find_by_id_path_and_name(library):
    document, _ = fill(library, "/a/report.txt", ["x"])
    for reference in (document, document[:6], "/a/report.txt", "report.txt"):
        assert library.find("default", reference).id == document
    fill(library, "/b/report.txt", ["x"])
    with pytest.raises(LibraryError, match=r"/a/report.txt, /b/report.txt"):
        library.find("default", "report.txt")
    with pytest.raises(LibraryError, match="docs list"):
        library.find("default", "nothing")


def test_other_format_version_is_refused_untouched(tmp_path):
    path = tmp_path / "library.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(LibraryError, match="format 99"):
        Library(path)
    assert path.read_bytes() == before


def test_damaged_file_is_named_and_kept(tmp_path):
    path = tmp_path / "library.sqlite"
    path.write_bytes(b"this is no database, " * 100)
    with pytest.raises(LibraryError, match="backup"):
        Library(path)
    assert path.read_bytes().startswith(b"this is no database")


def test_a_registry_of_version_one_gets_checksums_once(tmp_path):
    """Homes of before go on working; what Chroma and the conversations may hold of them is to be erased."""
    from ragblend.app.library import TABLES

    path = tmp_path / "old.sqlite"
    sql = sqlite3.connect(path)
    sql.executescript(TABLES + ";PRAGMA user_version = 1")
    sql.execute("INSERT INTO documents VALUES ('d', '/a', 'default', 'done', '', 1, 2, 'x', 'r', 'now')")
    sql.execute("INSERT INTO chunks VALUES ('n', 'd', 0, 'one', '', 1, ?)", (np.ones(3, "<f4").tobytes(),))
    sql.commit()
    sql.close()
    for _ in range(2):
        with Library(path) as library:
            assert [p.text for p in library.passages_of("d")] == ["one"] and library.damaged_documents() == []
            assert library.unerased() == {"default": True} and library.collections() == ["default"]


def words_in(path):
    """What the index of words holds, from the file."""
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab (main, words, row)")
        return {re.sub(r"^x\d+", "", term) for (term,) in sql.execute("SELECT term FROM temp.vocabulary")}


def made_up_words(count, seed):
    """Each unlike all others from its first letters on, and its own stem."""
    chance = random.Random(seed)
    return ["".join(chance.choices("bcdfghjklmnpqrtvwxz", k=12)) for _ in range(count)]


def test_no_word_of_a_deleted_text_stays_in_the_index(library):
    """FTS5 notes what is deleted and keeps it; a document that is cut anew loses words as well."""
    texts = [made_up_words(20, seed) for seed in range(40)]
    documents = [fill(library, f"/{n}", [" ".join(text)])[0] for n, text in enumerate(texts)]
    for document in documents[::3]:
        library.remove(document)
    fill(library, "/1", ["something else"])
    gone = {word for text in [*texts[::3], texts[1]] for word in text}
    kept = {word for text in texts for word in text} - gone
    assert library.erase() and words_in(library.path) == kept | {"someth", "els"}
    content = library.path.read_bytes()
    assert [word for word in gone if word[4:].encode() in content] == []
    assert sum(word[4:].encode() in content for word in kept) == len(kept)
    assert library.words_damage() == ""


def old_registry(path, version, text="a red boat"):
    """As it was made by the version before the index of words."""
    from ragblend.app.library import TABLES, UPGRADES

    class Before(Database):
        layout = Layout("registry", TABLES, upgrades=UPGRADES[: version - 1], checked=True)

    with Before(path) as old, old.transaction() as sql:
        for number in range(5):
            values = (f"d{number}", f"/{number}", "default", "done", "", 1, 2, "x", "r", "now")
            sql.execute(
                f"INSERT INTO documents ({', '.join(DOCUMENT)}) VALUES ({', '.join('?' * 10)})", values
            )
            said = text if number == 3 else f"nothing {number}"
            row = (f"n{number}", f"d{number}", 0, said, "", 1, np.ones(3, "<f4").tobytes())
            sql.execute(INSERT_PASSAGE, row)


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_registry_of_before_has_its_words_indexed_once_and_says_so(tmp_path, caplog, version):
    path = tmp_path / "old.sqlite"
    old_registry(path, version)
    for said in (1, 1):
        with Library(path) as library:
            assert library.by_words(["default"], "Whose is the boat?", 5).keys() == {"n3"}
            assert library.words_damage() == "" and len(caplog.records) == said
    with Library(path) as library:
        library.remove("d3")
        assert library.by_words(["default"], "boat", 5) == {} and library.words_damage() == ""


KILLED = """
import os, sys
from pathlib import Path
from ragblend.app import database, library
found = []
def words_of(*_):
    found.append(1)
    if len(found) == 4:
        os._exit(9)
    return ["word"]
database.words_of = words_of
library.Library(Path(sys.argv[1]))
"""


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_home_killed_while_its_words_are_indexed_opens_again(tmp_path, version):
    path = tmp_path / "old.sqlite"
    old_registry(path, version)
    assert subprocess.run([sys.executable, "-c", KILLED, path], check=False).returncode == 9
    with closing(sqlite3.connect(path)) as sql:
        assert sql.execute("PRAGMA user_version").fetchone() == (version,)
    with Library(path) as library:
        assert library.by_words(["default"], "boat", 5).keys() == {"n3"} and library.words_damage() == ""


def test_a_damaged_index_of_words_harms_nothing_else_and_is_made_again(library, caplog):
    document, nodes = fill(library, "/a", ["a red boat", "a house", "a mill"])
    with library.transaction() as sql:
        sql.execute("UPDATE words_data SET block = x'ffffffffffff' WHERE id >= 10")
    assert library.by_words(["default"], "boat", 5) == {}
    assert "store repair" in caplog.records[0].getMessage() and "malformed" in library.words_damage()
    assert len(library.passages_of(document)) == 3
    library.index_words()
    assert library.by_words(["default"], "boat", 5).keys() == {nodes[0]} and library.words_damage() == ""


def test_a_passage_that_is_no_text_any_more_can_be_removed(library):
    """Python's own decoding would refuse the row, and the document could not be deleted."""
    document, _ = fill(library, "/a", ["one", "two"])
    with closing(sqlite3.connect(library.path)) as sql, sql:
        sql.execute("DROP TRIGGER chunks_changed")
        sql.execute("UPDATE chunks SET text = CAST(x'ff6f6e65' AS TEXT) WHERE position = 0")
    library.remove(document)
    assert library.count_passages("default") == 0


@pytest.fixture
def sqlite_without_fts5(monkeypatch):
    """As far as a connection can tell: FTS5 is not among the modules, and what asks for its table fails."""

    def allowed(action, first, *_):
        if action == sqlite3.SQLITE_PRAGMA and first == "module_list":
            return sqlite3.SQLITE_IGNORE
        used = (
            sqlite3.SQLITE_INSERT,
            sqlite3.SQLITE_READ,
            sqlite3.SQLITE_CREATE_VTABLE,
            sqlite3.SQLITE_DROP_VTABLE,
        )
        return sqlite3.SQLITE_DENY if action in used and first == "words" else sqlite3.SQLITE_OK

    def connect(*arguments):
        made = real(*arguments)
        made.set_authorizer(allowed)
        return made

    real = database.connect
    registry.say_no_words.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(database, "connect", connect)
        yield patched.undo


def test_without_fts5_a_registry_works_and_says_once_that_words_are_not_found(
    tmp_path, sqlite_without_fts5, caplog
):
    for name in ("a", "b"):
        with Library(tmp_path / f"{name}.sqlite") as library:
            document, _ = fill(library, "/a", ["a red boat", "a house"])
            assert library.by_words(["default"], "boat", 5) == {} and library.words_damage() == ""
            library.index_words()
            library.remove(document)
            assert library.erase() and not library.damage
    (said,) = [each.getMessage() for each in caplog.records]
    assert "without FTS5" in said and "--search vectors" in said


def test_a_home_is_used_in_turns_with_fts5_and_without(tmp_path, request):
    """A trigger that writes to the index would refuse every change, and words of what is deleted would stay."""
    path, texts = tmp_path / "registry.sqlite", [" ".join(made_up_words(5, seed)) for seed in range(6)]
    with Library(path) as library:
        documents = [fill(library, f"/{n}", [text])[0] for n, text in enumerate(texts)]
    back = request.getfixturevalue("sqlite_without_fts5")
    with Library(path) as library:
        assert not library.damage and len(library.documents("default")) == 6
        library.remove(documents[0])
        fill(library, "/new", ["a red boat"])
        assert library.erase()
    assert not [word for text in texts for word in text.split()[:1] if word[4:].encode() in index_of(path)]
    with Library(path) as library:
        assert not library.damage
    back()
    with Library(path) as library:
        assert not library.damage and library.words_damage() == ""
        assert len(library.by_words(["default"], "boat", 5)) == 1
        assert library.by_words(["default"], texts[0], 5) == {}
        assert len(library.by_words(["default"], texts[1], 5)) == 1


def index_of(path):
    """The bytes of the index of words."""
    with closing(sqlite3.connect(path)) as sql:
        return b"".join(block for (block,) in sql.execute("SELECT block FROM words_data"))


def test_an_embedding_of_which_a_part_is_gone_has_no_score(library):
    """Words find a passage whatever became of its embedding."""
    _, nodes = fill(library, "/a", ["a red boat", "a house"])
    library.execute("UPDATE chunks SET embedding = x'00' WHERE node_id = ?", nodes[0])
    assert library.scores(nodes, np.ones(3, np.float32)).keys() == {nodes[1]}


def test_a_passage_scores_by_its_nearest_window(library):
    document = library.begin("default", "/a")
    rows = np.eye(3, dtype=np.float32)
    library.replace_passages(document, FACTS, "r", [Passage("node", document, 0, "x", "")], [rows])
    for question in rows:
        assert library.scores(["node"], question) == library.nearest("default", question, 1) == {"node": 1.0}
