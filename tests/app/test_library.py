"""The registry: changes are atomic, ids are stable, deletion is complete, damage is named."""

import os
import random
import re
import sqlite3
import stat
from contextlib import closing

import numpy as np
import pytest

from ragblend.app.library.documents import DocumentPassage, DocumentState, FileFacts, node_id
from ragblend.app.library.registry import Library
from ragblend.app.library.word_search import by_words
from ragblend.kvstore.errors import LibraryError

FACTS = FileFacts(10, 20, "ab" * 32)


def fill(library, path, texts, recipe="r", notes=()):
    document = library.begin("default", path)
    numbered = enumerate(texts)
    passages = [
        DocumentPassage(node_id(document, i, text), document, i, text, f"p. {i}") for i, text in numbered
    ]
    rows = [np.full((2 + i, 3), i, dtype=np.float32) for i in range(len(texts))]
    library.replace_passages(document, FACTS, recipe, passages, rows, notes)
    return document, [passage.node_id for passage in passages]


def test_round_trip(library, tmp_path):
    document, nodes = fill(library, "/a/b.txt", ["one", "two"])
    library.finish(document)
    library.close()
    with Library(tmp_path / "library.sqlite") as again:
        found = again.document("default", "/a/b.txt")
        assert (found.state, found.facts, found.recipe, found.passages) == (DocumentState.DONE, FACTS, "r", 2)
        assert [passage.text for passage in again.passages_of(document)] == ["one", "two"]
        ids, rows = again.embeddings_of(document)
        assert ids == nodes and [r.dtype for r in rows] == [np.float32] * 2
        assert [r.tolist() for r in rows] == [[[0] * 3] * 2, [[1] * 3] * 3]
        assert again.passages([nodes[1], "unknown"]).keys() == {nodes[1]}


@pytest.mark.parametrize(
    ("separator", "folder"), [("/", "/a"), ("/", "/a/"), ("\\", "C:\\a"), ("\\", "C:\\")]
)
def test_documents_below_a_folder(library, monkeypatch, separator, folder):
    """On Windows there were none: deleted files of a watched folder stayed in the library."""
    inside = [f"{folder.rstrip(separator)}{separator}{name}" for name in ("b.txt", f"b{separator}c.txt")]
    for path in (*inside, f"{folder.rstrip(separator)}.txt", f"D:{separator}a{separator}b.txt"):
        library.begin("default", path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "sep", separator)
        assert library.paths_below("default", folder) == inside


def test_notes_are_stored_with_the_passages_and_replaced_with_them(library):
    document, _ = fill(
        library, "/a", ["one"], notes=["its encoding was guessed: cp1252", "page 3 is damaged"]
    )
    assert library.document("default", "/a").notes == (
        "its encoding was guessed: cp1252",
        "page 3 is damaged",
    )
    library.fail(document, "Another reason.")
    assert len(library.document("default", "/a").notes) == 2, "of the passages, which stay"
    fill(library, "/a", ["two"])
    assert library.document("default", "/a").notes == ()


def test_file_is_private_and_durable(library):
    for suffix in ("", "-wal", "-shm"):
        path = library.path.with_name(library.path.name + suffix)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    values = {name: library.rows(f"PRAGMA {name}")[0][0] for name in ("synchronous", "journal_mode")}
    assert values == {"synchronous": 2, "journal_mode": "wal"}


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
    twice = [DocumentPassage("same", document, 0, "x", ""), DocumentPassage("same", document, 1, "y", "")]
    with pytest.raises(LibraryError, match="Nothing was changed"):
        library.replace_passages(document, FACTS, "r", twice, [np.zeros((1, 3), np.float32)] * 2)
    assert [passage.node_id for passage in library.passages_of(document)] == nodes
    assert library.stale(document) == []


def test_find_by_id_path_and_name(library):
    document, _ = fill(library, "/a/report.txt", ["x"])
    for reference in (document, document[:6], "/a/report.txt", "report.txt"):
        assert library.find("default", reference).id == document
    fill(library, "/b/report.txt", ["x"])
    with pytest.raises(LibraryError, match=r"/a/report.txt, /b/report.txt"):
        library.find("default", "report.txt")
    with pytest.raises(LibraryError, match="docs list"):
        library.find("default", "nothing")


def words_in(path):
    """What the index of words holds, from the file."""
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("CREATE VIRTUAL TABLE temp.vocabulary USING fts5vocab (main, words, row)")
        return {re.sub(r"^x\d+", "", term) for (term,) in sql.execute("SELECT term FROM temp.vocabulary")}


def made_up_words(count, seed):
    """Each unlike all others from its first letters on, and its own stem."""
    chance = random.Random(seed)
    return ["".join(chance.choices("bcdfghjklmnpqrtvwxz", k=12)) for _ in range(count)]


def test_deleted_text_leaves_the_index_of_words(library):
    """FTS5 keeps deleted words in its file. Also those of a document that was chunked again."""
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


def test_damaged_index_of_words_is_rebuilt(library, caplog):
    document, nodes = fill(library, "/a", ["a red boat", "a house", "a mill"])
    with library.transaction() as sql:
        sql.execute("UPDATE words_data SET block = x'ffffffffffff' WHERE id >= 10")
    assert by_words(library, ["default"], "boat", 5) == {}
    assert "store repair" in caplog.records[0].getMessage() and "malformed" in library.words_damage()
    assert len(library.passages_of(document)) == 3
    library.rebuild_words()
    assert by_words(library, ["default"], "boat", 5).keys() == {nodes[0]} and library.words_damage() == ""


def test_a_passage_that_is_no_text_any_more_can_be_removed(library):
    """Python's own decoding would refuse the row, and the document could not be deleted."""
    document, _ = fill(library, "/a", ["one", "two"])
    with closing(sqlite3.connect(library.path)) as sql, sql:
        sql.execute("UPDATE chunks SET text = CAST(x'ff6f6e65' AS TEXT) WHERE position = 0")
    library.remove(document)
    assert library.count_passages("default") == 0


def test_a_passage_scores_by_its_nearest_window(library):
    document = library.begin("default", "/a")
    rows = np.eye(3, dtype=np.float32)
    library.replace_passages(document, FACTS, "r", [DocumentPassage("node", document, 0, "x", "")], [rows])
    for question in rows:
        assert library.scores(["node"], question) == library.nearest("default", question, 1) == {"node": 1.0}
