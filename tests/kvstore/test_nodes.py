"""NodeIndex: token ids by node id, the keys that become free, and nothing left of what was deleted."""

import random

import pytest

from ragblend.kvstore.errors import StoreError, UsageError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.nodes import NodeIndex, Scope


def key(number):
    return ChunkKey(f"{number:064x}")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "nodes.sqlite"


@pytest.fixture
def nodes(path):
    with NodeIndex.open(path) as index:
        yield index


SCOPE = Scope("papers", "aa" * 32)
SCOPES = [SCOPE, Scope("papers", "bb" * 32), Scope("notes", "aa" * 32)]
# The second is of a file's name that is not UTF-8: it once could not be entered.
IDS = ["a", "caf\udce9.txt#1", "café.txt#1"]


class Model:
    """The same calls over dictionaries. outbox, shared: key -> the number under which it was added last."""

    def __init__(self):
        self.visible, self.hidden = {}, {}  # (scope, node id) -> (token ids, keys)
        self.outbox, self.shared, self.number = {}, {}, 0
        self.changed = {scope: set() for scope in SCOPES}

    def release(self, outbox, keys):
        for each in keys:
            self.number += 1
            outbox[each] = self.number

    def put(self, scope, node_id, token_ids, own_key):
        before, keys = self.visible.get((scope, node_id), (None, set()))
        if before != token_ids:
            self.release(self.outbox, keys)
            keys = set()
            self.changed[scope].add(node_id)
        self.visible[scope, node_id] = token_ids, keys | ({own_key} if own_key else set())

    def claim(self, scope, node_id, token_ids, own_key):
        known, keys = self.visible.get((scope, node_id), (None, set()))
        if known == token_ids:
            keys.add(own_key)
        return known == token_ids

    def delete(self, collection, node_ids):
        for nodes in (self.visible, self.hidden):
            for scope, node_id in list(nodes):
                if scope.collection == collection and node_id in node_ids:
                    self.release(self.outbox, nodes.pop((scope, node_id))[1])
                    self.changed[scope].discard(node_id)

    def hide(self, collection, node_id, hidden, shared):
        found, old, new = set(), *((self.visible, self.hidden)[:: 1 if hidden else -1])
        for scope in (each for each in SCOPES if each.collection == collection):
            if (scope, node_id) in old:
                new[scope, node_id] = old.pop((scope, node_id))
                found |= new[scope, node_id][1]
            if hidden:
                self.changed[scope].discard(node_id)
            elif (scope, node_id) in self.visible:  # told again, whether or not it was hidden
                self.changed[scope].add(node_id)
        self.release(self.shared, found if shared else ())
        return found

    def deleted(self, begun, also_shared):
        for each, number in begun.items():
            if self.outbox.get(each) == number:
                del self.outbox[each]
        self.release(self.shared, begun if also_shared else ())

    def keys(self, *nodes):
        return {own_key for each in nodes for _, keys in each.values() for own_key in keys}

    def outboxes(self):
        """The keys that are to be deleted here, and those that are in the shared store."""
        here = self.outbox.keys() - self.keys(self.visible, self.hidden)
        return here, self.shared.keys() - self.keys(self.visible)


@pytest.mark.parametrize("seed", range(3))
def test_the_index_equals_a_model_in_memory(path, quick_disk, seed):
    """Nodes enter, change, hide and go at random, between deletions of their KV; nothing is lost with the process."""
    chance, model, nodes = random.Random(seed), Model(), NodeIndex.open(path)
    seen, begun = dict.fromkeys(SCOPES), None
    for _ in range(300):
        scope, node_id, own_key = chance.choice(SCOPES), chance.choice(IDS), key(chance.randrange(5))
        token_ids = chance.choice([(), (1, 2, 2**31), (3,)])
        action = chance.choice(
            ["put", "put", "claim", "delete", "delete_collection", "hide", "unhide", "begin", "end", "reopen"]
        )
        if action == "put" and (scope, node_id) not in model.hidden:
            own_key = chance.choice([own_key, None])
            nodes.put_many(scope, [(node_id, token_ids, own_key)])
            model.put(scope, node_id, token_ids, own_key)
        elif action == "claim":
            given = scope, node_id, token_ids, own_key
            assert nodes.claim(*given) == model.claim(*given)
        elif action == "delete":
            nodes.delete(scope.collection, [node_id, "absent"])
            model.delete(scope.collection, [node_id])
        elif action == "delete_collection" and chance.random() < 0.2:
            nodes.delete_collection(scope.collection)
            model.delete(scope.collection, IDS)
        elif action in ("hide", "unhide"):
            given = action == "hide", action == "hide" and chance.random() < 0.5
            found = nodes.set_hidden(scope.collection, [node_id, "absent"], *given)
            assert found == model.hide(scope.collection, node_id, *given)
        elif (
            action == "begin"
        ):  # who deletes KV looks, deletes, and says so; meanwhile the same may come again
            begun = nodes.outbox(at_most=2), {each: model.outbox[each] for each in nodes.outbox(at_most=2)}
        elif action == "end" and begun is not None:
            also_shared = chance.random() < 0.5
            nodes.remove_from_outbox(begun[0], also_shared)
            model.deleted(begun[1], also_shared)
            begun = None
        elif action == "reopen":
            nodes.close()
            nodes = NodeIndex.open(path)
        assert (nodes.outbox().keys(), nodes.outbox(shared=True).keys()) == model.outboxes()
        assert nodes.keys() == model.keys(model.visible, model.hidden)
        for each in SCOPES:
            known = {name: nodes.get(each, name) for name in nodes.node_ids(each)}
            assert known == {name: ids for (where, name), (ids, _) in model.visible.items() if where == each}
        owns = model.visible.get((scope, node_id), ((), ()))[1]
        assert nodes.has(scope, node_id, own_key or key(9)) == (own_key in owns)
        if chance.random() < 0.3:
            first, (seen[scope], entered) = seen[scope], nodes.changed_since(scope, seen[scope])
            assert set(entered) == (set(nodes.node_ids(scope)) if first is None else model.changed[scope])
            model.changed[scope].clear()
    nodes.close()


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
    nodes.remove_from_outbox(nodes.outbox())
    assert holding() == []
    assert nodes.get(SCOPE, "kept") == (1, 2)


def test_a_closed_index_or_a_folder_in_its_place_is_a_store_error(path):
    nodes = NodeIndex.open(path)
    nodes.close()
    with pytest.raises(StoreError):
        nodes.get(SCOPE, "a")
    with pytest.raises(StoreError):
        NodeIndex.open(path.parent)


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
