"""The registry: every change is all or nothing, ids are stable, deletion is complete, damage is named."""

import sqlite3
import stat

import numpy as np
import pytest

from ragblend.app.documents import FileFacts, Passage, State, document_id, node_id
from ragblend.app.library import Library
from ragblend.kvstore.errors import LibraryError

FACTS = FileFacts(10, 20, "ab" * 32)


@pytest.fixture
def library(tmp_path):
    opened = Library(tmp_path / "library.sqlite")
    yield opened
    opened.close()


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
