"""The vector index: exact cosine, our embeddings only, one collection each, rebuilt from nothing."""

from contextlib import closing
from functools import partial

import numpy as np
import pytest
from waiting import at_once

from ragblend.integrations.chroma import VectorIndex, separate_vectors
from ragblend.integrations.chroma_sweep import HEADER
from ragblend.kvstore.errors import LibraryError


@pytest.fixture
def index(tmp_path):
    opened = VectorIndex(tmp_path / "chroma", "default")
    yield opened
    opened.close()


def unit(count, seed=0):
    """A node with one vector, so many times."""
    return list(rows_of(count, seed)[:, None, :])


def rows_of(count, seed=0):
    rows = np.random.default_rng(seed).normal(size=(count, 16)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_nearest_by_cosine(index):
    rows = rows_of(50)
    index.upsert([f"n{i}" for i in range(50)], unit(50))
    question = rows_of(1, seed=1)[0]
    expected = np.argsort(-(rows @ question))[:5]
    hits = index.query(question, 5)
    assert [hit.node_id for hit in hits] == [f"n{i}" for i in expected]
    assert [hit.score for hit in hits] == pytest.approx((rows @ question)[expected], abs=1e-3)


def test_similarity_of_a_node_is_that_of_its_nearest_window(index):
    rows, question = rows_of(40), rows_of(1, seed=1)[0]
    near = question + 0.01 * rows[:30]
    many = near / np.linalg.norm(near, axis=1, keepdims=True)
    groups = {"many": many, "few": rows[30:32], "one": rows[32:33]}
    index.upsert(list(groups), list(groups.values()))
    best = sorted(((float((g @ question).max()), name) for name, g in groups.items()), reverse=True)
    hits = index.query(question, 3)
    assert [hit.node_id for hit in hits] == [name for _, name in best], "one node's windows crowd nobody out"
    assert [hit.score for hit in hits] == pytest.approx([score for score, _ in best], abs=1e-3)
    index.delete(["many"])
    assert index.count() == 2 and index.node_ids() == {"few", "one"}


def test_repeated_passage_does_not_hide_others(index):
    """HNSW does not get out of a cluster of equal vectors."""
    crowd, alone = rows_of(3), rows_of(20, seed=1)
    for number, row in enumerate(alone):
        index.upsert([f"alone-{number}", f"{number}"], [row[None], np.repeat(crowd, 20, axis=0)])
    found = [index.query(row, 1)[0].node_id for row in alone]
    assert found == [f"alone-{number}" for number in range(20)]


def test_repeated_boilerplate_does_not_hide_passages(index):
    """Three windows of 13 that all files share: every tenth passage was found by no question."""
    crowd, own = rows_of(3), rows_of(4000, seed=1).reshape(400, 10, 16)
    index.upsert([f"n{n}" for n in range(400)], [np.concatenate([rows, crowd]) for rows in own])
    found = [index.query(rows[0], 1)[0].node_id for rows in own]
    lost = [n for n, node in enumerate(found) if node != f"n{n}"]
    assert len(lost) <= 2, lost  # HNSW is never quite exact


def test_windows_that_come_later_are_found(index):
    """Writing a sketch's first window again broke paths in the graph, one time in nine."""
    rows = np.random.default_rng(0)
    common, other = (rows.normal(size=64) for _ in range(2))

    def near(row, count):
        moved = row + 0.4 * np.eye(64)[rows.choice(64, count, replace=False)] * np.linalg.norm(row)
        return (moved / np.linalg.norm(moved, axis=1, keepdims=True)).astype(np.float32)

    missed = 0
    for turn in range(30):
        firsts, rests = near(common, 19), near(other, 19)
        names = [f"{turn}-{number}" for number in range(19)]
        index.upsert(names, [firsts[:1], firsts[1:2], firsts[2:3], *np.stack([firsts, rests], 1)[3:]])
        for number in range(3):
            index.upsert(names[number : number + 1], [np.stack([firsts[number], rests[number]])])
        missed += sum(index.query(row, 1)[0].node_id != name for name, row in zip(names, rests, strict=True))
        index.rebuild(())
    assert missed == 0


def test_upsert_replaces_and_delete_forgives(index, tmp_path):
    index.upsert(["a", "b"], unit(2))
    index.upsert(["a"], unit(1, seed=5))
    assert index.count() == 2
    with closing(VectorIndex(tmp_path / "chroma", "x")) as other:
        other.upsert(["c"], unit(1))
        index.delete(["a", "c", "never there"])
        index.delete([])
        assert index.node_ids() == {"b"} and other.node_ids() == {"c"}, "collections are separate"


def test_wrong_size_is_a_named_error(index):
    index.upsert(["a"], unit(1))
    with pytest.raises(LibraryError, match="store repair"):
        index.query(np.ones(3, dtype=np.float32), 1)


@pytest.mark.parametrize("damage", [None, b"rubbish" * 1000])
def test_rebuild(index, tmp_path, damage):
    index.upsert(["old"], unit(1))
    if damage:
        index.close()
        (tmp_path / "chroma" / "chroma.sqlite3").write_bytes(damage)
    assert index.rebuild([(["a", "b"], unit(2)), (["c"], unit(1))]) == 3
    assert index.node_ids() == {"a", "b", "c"}


@pytest.mark.parametrize("metadata", [None, {"source": "elsewhere"}], ids=["none", "others"])
def test_vectors_of_another_layout_are_named_and_mended(index, metadata):
    """`store check` said "'NoneType' object is not subscriptable", and a question said "'node'"."""
    index.upsert(["a"], unit(1))
    index._collection().upsert(ids=["x"], embeddings=rows_of(1), metadatas=metadata and [metadata])
    for use in (index.node_ids, lambda: index.query(rows_of(1)[0], 2)):
        with pytest.raises(LibraryError, match=r"without the id of a passage.*store repair") as error:
            use()
        assert str(index.folder) in str(error.value)
    index.rebuild([(["a"], unit(1))])
    assert index.node_ids() == {"a"} and len(index.query(rows_of(1)[0], 2)) == 1


def test_an_index_of_another_distance_is_named_and_mended(index):
    """It was searched as it was, and gave wrong scores."""
    client = index._connect()
    other = client.create_collection("someone-elses")
    client.create_collection(index.name)  # Chroma's own default: squared L2
    with pytest.raises(LibraryError, match=r"by l2.*ragblend store repair"):
        index.query(rows_of(1)[0], 1)
    index.rebuild([(["a"], unit(1))])
    assert index.query(rows_of(1)[0], 1)[0].score == pytest.approx(1)
    assert other.count() == 0, "what others keep in the same folder stays"


def test_two_threads_may_be_the_first_to_open_it(tmp_path):
    """Chroma returns a system that is still starting: a question during the first ingest failed."""
    for round_number in range(3):
        folder = tmp_path / f"chroma{round_number}"
        indexes = [VectorIndex(folder, name) for name in ("one", "two", "three", "four")]
        at_once(*(partial(index.upsert, ["n"], [np.ones((1, 3), dtype=np.float32)]) for index in indexes))
        for index in indexes:
            index.close()


@pytest.mark.parametrize("left", [5, 0], ids=["some stay", "none stays"])
@pytest.mark.parametrize("count", [60, 1300], ids=["all in the log", "in the graph too"])
def test_deleted_vectors_are_erased(index, tmp_path, count, left):
    """Chroma kept vectors and ids in its log, its graph, free pages and unreferenced folders."""
    other = VectorIndex(tmp_path / "chroma", "other")
    other.upsert(["kept"], unit(1, seed=9))
    names, rows, written = _fill(index, count)
    bare = count - left
    assert _found_in(index.folder, names[:1], written[:1]) >= {"id", "vector"}, (
        "the search sees what is there"
    )
    index.delete(names[:bare])
    index.erase()
    assert _found_in(index.folder, names[:bare], written[:bare]) == set()
    assert index.node_ids() == set(names[bare:]) and other.node_ids() == {"kept"}
    index.close()
    index.upsert(names[:1], list(rows[:1, None, :]))
    assert index.query(rows[0], 1)[0].node_id == names[0] and index.count() == left + 1
    other.close()


def test_rebuild_erases_old_bytes(index):
    names, rows, written = _fill(index, 1300)
    index.rebuild([(names[1200:], list(rows[1200:, None, :]))])
    assert _found_in(index.folder, names[:1200], written[:1200]) == set() and index.count() == 100


def _fill(index, count):
    """The names and vectors of so many nodes, and the vectors as they are written."""
    names, rows = [f"node-{i:04}-{i * 7919:08x}" for i in range(count)], rows_of(count)
    index.upsert(names, list(rows[:, None, :]))
    stored = [separate_vectors(*node) for node in zip(names, rows[:, None, :], strict=True)]
    return names, rows, np.concatenate(stored)


def _found_in(folder, names, rows):
    """What of these stands in the files: 'id', 'vector' (a run of four of its numbers, to one in 10,000)."""
    found = set()
    wanted = {tuple(np.round(row[:4], 4)) for row in rows}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if any(name.encode() in content for name in names):
            found.add("id" if path.name == "chroma.sqlite3" else f"id in {path.name}")
        for offset in range(4):
            with np.errstate(all="ignore"):
                numbers = np.frombuffer(content[offset:], "<f4", (len(content) - offset) // 4).round(4)
            starts = np.flatnonzero(np.isin(numbers, [row[0] for row in wanted]))
            if wanted & {tuple(numbers[at : at + 4]) for at in starts}:
                found.add("vector")
    return found


def test_the_room_in_a_graphs_file_is_blanked(tmp_path):
    """Chroma writes a new graph with room for a hundred vectors, and does not clear that memory."""
    rows = rows_of(3)
    with closing(VectorIndex(tmp_path / "chroma", "notes")) as index:
        index.upsert(["one", "two", "three"], list(rows[:, None, :]))
        index.delete(["one"])
        index.erase()
        (vectors,) = index.folder.rglob("data_level0.bin")
        _, _, _, count, nbytes = HEADER.unpack_from(vectors.with_name("header.bin").read_bytes())
        filled = vectors.read_bytes()[: count * nbytes]
        vectors.write_bytes((filled + b"CANARY" * 3000)[: vectors.stat().st_size])
        index.delete(["three"])
        index.erase()
        assert b"CANARY" not in vectors.read_bytes() and vectors.read_bytes().strip(b"\0")
        assert [hit.node_id for hit in index.query(rows[1], 3)] == ["two"]
    with closing(VectorIndex(tmp_path / "chroma", "notes")) as index:
        assert [hit.node_id for hit in index.query(rows[1], 3)] == ["two"]
