"""NodeIndex: token ids by node id, the keys that become free, and nothing left of what was deleted."""

import random

import pytest

from ragblend.kvstore.errors import StoreError, UsageError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import NodeIndex, Scope

SCOPE, OTHER = Scope("papers", "aa" * 32), Scope("papers", "bb" * 32)


def key(number):
    return ChunkKey(f"{number:064x}")


def emptied(nodes, at_most=-1, also_shared=False):
    """The keys in the outbox, once the store has deleted their KV."""
    found = nodes.outbox(at_most)
    nodes.deleted(found, also_shared)
    return list(found)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "nodes.sqlite"


@pytest.fixture
def nodes(path):
    with NodeIndex.open(path) as index:
        yield index


def test_token_ids_are_kept_per_collection_and_tokenizer(nodes, path):
    nodes.put_many(SCOPE, [("a", (1, 2, 2**31), key(1)), ("b", [], key(2))])
    nodes.put_many(OTHER, [("a", (9,), key(3))])
    assert nodes.get(SCOPE, "a") == (1, 2, 2**31)
    assert nodes.get(SCOPE, "b") == ()
    assert nodes.get(OTHER, "a") == (9,)
    assert nodes.get(Scope("notes", SCOPE.tokenizer), "a") is None
    assert nodes.get(SCOPE, "c") is None
    assert nodes.node_ids(SCOPE) == ["a", "b"]
    assert nodes.keys() == {key(1), key(2), key(3)}
    with NodeIndex.open(path) as again:
        assert again.get(SCOPE, "a") == (1, 2, 2**31)


def test_node_ids_need_not_be_utf_8(nodes, path):
    """From a file's name; it once could not be entered, and deleting it together with others deleted none."""
    odd, even = "caf\udce9.txt#1", "café.txt#1"
    nodes.put_many(SCOPE, [(odd, (1, 2), key(1)), (even, (3,), key(2))])
    assert nodes.get(SCOPE, odd) == (1, 2) and nodes.get(SCOPE, even) == (3,)
    assert set(nodes.node_ids(SCOPE)) == set(nodes.entered(SCOPE, None)[1]) == {odd, even}
    last, _ = nodes.entered(SCOPE, None)
    nodes.put_many(SCOPE, [(odd, (4,), key(3))])
    assert nodes.entered(SCOPE, last)[1] == [odd] and nodes.get(SCOPE, odd) == (4,)
    assert nodes.claim(SCOPE, odd, (4,), key(4)) and not nodes.claim(SCOPE, odd, (5,), key(4))
    assert nodes.has(SCOPE, odd, key(4)) and not nodes.has(SCOPE, odd, key(1))
    assert list(nodes.outbox()) == [key(1)]
    with NodeIndex.open(path) as again:
        assert again.get(SCOPE, odd) == (4,)
    nodes.delete("papers", [even, odd])
    assert nodes.keys() == set() and nodes.node_ids(SCOPE) == []


def test_entered_lists_nodes_added_since_a_number(nodes):
    nodes.put_many(SCOPE, [("a", (1,), None), ("b", (2,), None)])
    nodes.put_many(OTHER, [("a", (1,), None)])
    last, found = nodes.entered(SCOPE, None)
    assert sorted(found) == ["a", "b"] and nodes.entered(SCOPE, last) == (last, [])
    nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (3,), None), ("c", (4,), None), ("d", (4,), None)])
    nodes.delete("papers", ["d"])
    later, found = nodes.entered(SCOPE, last)
    assert sorted(found) == ["b", "c"]
    nodes.delete("papers", ["b", "c"])
    assert nodes.entered(SCOPE, later) == (later, [])
    nodes.put_many(SCOPE, [("c", (4,), None)])
    assert nodes.entered(SCOPE, later)[1] == ["c"]


def test_a_key_goes_to_the_outbox_when_its_last_node_is_deleted(nodes):
    nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (1,), key(1)), ("a", (1,), key(2))])
    nodes.put_many(OTHER, [("a", (1,), key(3))])
    nodes.delete("papers", ["a"])
    assert emptied(nodes) == [key(2), key(3)]  # of every tokenizer
    assert nodes.get(OTHER, "a") is None
    nodes.delete("notes", ["b"])
    assert list(nodes.outbox()) == []
    nodes.delete("papers", ["b", "absent"])
    assert list(nodes.outbox()) == [key(1)]
    assert nodes.keys() == set()


def test_a_hidden_node_is_as_if_deleted_but_its_kv_stays(nodes):
    nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (2,), key(2)), ("c", (2,), key(2))])
    nodes.put_many(OTHER, [("a", (1,), key(3))])
    last, _ = nodes.entered(SCOPE, None)
    assert nodes.set_hidden("papers", ["a", "b", "absent"], True, shared=True) == {key(1), key(2), key(3)}
    assert nodes.node_ids(SCOPE) == ["c"] and nodes.get(OTHER, "a") is None
    assert not nodes.claim(SCOPE, "a", (1,), key(4)) and not nodes.has(SCOPE, "a", key(1))
    assert nodes.outbox() == {} and nodes.keys() == {key(1), key(2), key(3)}
    assert set(nodes.outbox(shared=True)) == {key(1), key(3)}, "c has the other one"
    assert nodes.set_hidden("papers", ["a"], False) == {key(1), key(3)}
    assert nodes.get(SCOPE, "a") == (1,) and nodes.get(OTHER, "a") == (1,) and nodes.has(SCOPE, "a", key(1))
    assert nodes.entered(SCOPE, last)[1] == ["a"] and nodes.outbox(shared=True) == {}
    nodes.delete("papers", ["b"])
    assert nodes.outbox() == {} and nodes.set_hidden("papers", ["b"], False) == set()
    nodes.set_hidden("papers", ["a"], True)
    nodes.delete_collection("papers")
    assert set(nodes.outbox()) == {key(1), key(2), key(3)} and nodes.keys() == set()


def test_a_node_with_new_text_releases_its_old_keys(nodes):
    nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (2,), key(2))])
    nodes.put_many(SCOPE, [("a", (1,), key(3))])  # the same text for another model
    assert list(nodes.outbox()) == []
    nodes.put_many(SCOPE, [("a", (7,), key(4))])
    assert emptied(nodes) == [key(1), key(3)]
    nodes.put_many(SCOPE, [("a", (8,), key(4))])  # dropped and taken again: in use
    assert list(nodes.outbox()) == []
    assert nodes.get(SCOPE, "a") == (8,)


def test_put_many_is_all_or_nothing(nodes):
    with pytest.raises(UsageError):
        nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (-1,), key(2))])
    assert nodes.node_ids(SCOPE) == []
    nodes.put_many(SCOPE, [("a", (1,), key(1))])


def test_deleted_nodes_leave_no_bytes_on_disk(nodes, path):
    secret = tuple(range(40000, 40400))
    nodes.put_many(SCOPE, [("secret-node", secret, key(0xABCDEF)), ("kept", (1, 2), key(2))])
    nodes.put_many(SCOPE, [("secret-node", secret, key(0xABCDEE))])
    needles = [b"secret-node", b"".join(t.to_bytes(4, "little") for t in secret[:8]), b"abcdef"]

    def holding():
        return [file.name for file in path.parent.iterdir() for each in needles if each in file.read_bytes()]

    assert len(set(holding())) >= 1
    nodes.delete("papers", ["secret-node"])
    emptied(nodes)
    assert holding() == []
    assert nodes.get(SCOPE, "kept") == (1, 2)


def test_a_closed_index_or_a_folder_in_its_place_is_a_store_error(path):
    nodes = NodeIndex.open(path)
    nodes.close()
    with pytest.raises(StoreError):
        nodes.get(SCOPE, "a")
    with pytest.raises(StoreError):
        NodeIndex.open(path.parent)


def test_the_outbox_survives_a_kill(tmp_path):
    """A kill between the rows' removal and the KV's once left KV that nothing named any more."""
    path = tmp_path / "nodes.sqlite"
    with NodeIndex.open(path) as nodes:
        nodes.put_many(SCOPE, [("a", (1,), key(1)), ("b", (2,), key(2)), ("c", (3,), key(3))])
        nodes.delete("papers", ["a"])
        nodes.put_many(SCOPE, [("b", (7,), key(4))])
    with NodeIndex.open(path) as nodes:
        assert list(nodes.outbox()) == [key(1), key(2)]
        nodes.put_many(SCOPE, [("d", (1,), key(1))])  # the same text came back
        assert emptied(nodes) == [key(2)]
        assert nodes.outbox() == {}
        nodes.delete("papers", ["d"])
        assert list(nodes.outbox()) == [key(1)]


def test_a_key_released_again_meanwhile_stays_in_the_outbox(nodes):
    nodes.put_many(SCOPE, [("a", (1,), key(1))])
    nodes.delete("papers", ["a"])
    begun = nodes.outbox()
    nodes.put_many(SCOPE, [("a", (1,), key(1))])
    nodes.delete("papers", ["a"])
    nodes.deleted(begun)
    assert list(nodes.outbox()) == [key(1)]


def test_deletions_in_the_shared_store_have_their_own_outbox(nodes):
    nodes.put_many(SCOPE, [(str(number), (number,), key(number)) for number in range(1, 4)])
    nodes.delete("papers", ["1", "2", "3"])
    assert emptied(nodes, at_most=2, also_shared=True) == [key(1), key(2)]
    assert list(nodes.outbox()) == [key(3)]
    owed = nodes.outbox(shared=True)
    assert list(owed) == [key(1), key(2)]
    nodes.put_many(SCOPE, [("1", (1,), key(1))])  # while it is deleted there, say
    assert list(nodes.outbox(shared=True)) == [key(2)]
    nodes.delete("papers", ["1"])
    emptied(nodes, also_shared=True)
    nodes.deleted(owed)
    # The first anew: it may have been shared again.
    assert list(nodes.outbox(shared=True)) == [key(1), key(3)]


def test_erase_removes_copies_of_rows_that_sqlite_moved(nodes, path):
    """`secure_delete` overwrites a row where it stands, not where it once stood."""
    chance, copies = random.Random(4), 0
    for round_number in range(8):
        scope = Scope(f"letters {round_number}", "aa" * 32)
        names = [chance.randbytes(32).hex() for _ in range(30)]
        for name in names:
            nodes.put_many(scope, [(name, chance.choices(range(50_000), k=chance.randint(20, 120)), None)])
        for name in names[::2]:
            nodes.delete(scope.collection, [name])
        copies += sum(name.encode() in path.read_bytes() for name in names[::2])
        assert nodes.erase()
        assert not any(name.encode() in path.read_bytes() for name in names[::2])
        assert all(name.encode() in path.read_bytes() for name in names[1::2])
    assert copies, "none was left, so this shows nothing"
