"""The knowledge tree in the store: who stands behind whom, what is evicted, and what goes with what is deleted."""

import random
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from ragblend.kvstore.blob import Blob, open_verified
from ragblend.kvstore.codec import CODECS
from ragblend.kvstore.errors import StoreFullError
from ragblend.kvstore.fingerprint import node_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import read_whole
from ragblend.kvstore.store import KVStore
from ragblend.kvstore.tree import Node, match

pytestmark = pytest.mark.usefixtures("quick_disk")  # nothing here is about power cuts


@pytest.fixture
def path(sample):
    """path(1, 2, 3): those samples as nodes, each behind the one before; the first is a chunk encoded alone."""

    def made(*seeds):
        nodes, parent, start = [], None, 2
        for seed in seeds:
            key, chunk = sample(seed)
            if parent is not None:
                key = node_key(parent, "", chunk.token_ids)
                chunk = replace(chunk, parent=parent, start=start)
            nodes.append((key, chunk))
            parent, start = key, start + len(chunk.token_ids)
        return nodes

    return made


def places(nodes):
    return [Node(key, chunk.token_ids, chunk.start, chunk.parent) for key, chunk in nodes]


def held(store, nodes):
    """How many nodes of the path are found, with the very bits that were put."""
    sources = match(store.open_chunk, places(nodes), nodes[0][1].geometry)
    for source in sources:
        source.close()
    return len(sources)


def parents(root):
    """Every stored value's parent, as its file says."""
    found = {}
    for file in root.glob("values/*/*.kv"):
        key = ChunkKey(file.name.partition("-")[0])
        with open_verified(file, key, None, lambda what: None) as reader:
            found[key] = reader.header.parent
    return found


def put_all(store, nodes):
    return [store.put(*node) for node in nodes]


def file_of(root, key):
    return next(root.glob(f"values/*/{key.digest}-*"))


def test_the_stored_beginning_of_a_path_is_found(store, path, same):
    nodes = path(1, 2, 3)
    assert held(store, nodes) == 0
    assert put_all(store, nodes[:2]) == [True, True]
    assert held(store, nodes) == 2
    assert store.put(*nodes[2])
    assert held(store, nodes) == 3
    assert held(store, path(1, 3, 2)) == 1
    with store.open_chunk(nodes[2][0], nodes[2][1].token_ids, parent=nodes[1][0]) as reader:
        assert (reader.start, reader.header.parent) == (nodes[2][1].start, nodes[1][0])


def test_a_match_counts_one_request_per_node(store, path):
    nodes = path(1, 2, 3)
    for times in (1, 2):
        held(store, nodes)
        assert [round(store.request_count(key), 2) for key, _ in nodes] == [times] * 3


def test_a_node_is_stored_only_after_a_stored_parent(store, path):
    nodes = path(1, 2, 3)
    assert not store.put(*nodes[1])
    assert store.put(*nodes[0])
    assert not store.put(*nodes[2])
    assert store.stats().entries == 1
    assert store.check() == []


def test_keys_differ_by_parent_and_salt():
    one, other = ChunkKey("1" * 64), ChunkKey("2" * 64)
    keys = {node_key(parent, salt, (1, 2)) for parent in (one, other) for salt in ("", "ada", "bob")}
    assert len(keys) == 6


def finite(chunk):
    """What a codec can round; random bits are no numbers it takes."""
    kv = [[torch.nan_to_num(t, 0, 0, 0).clamp(-9, 9) for t in each] for each in (chunk.keys, chunk.values)]
    return replace(chunk, keys=kv[0], values=kv[1])


def test_nodes_are_stored_raw_whatever_the_codec(store, path, same):
    nodes = path(1, 2)
    store.put(*nodes[0])
    store.put(nodes[1][0], finite(nodes[1][1]), codec=CODECS["int8"])
    with store.open_chunk(nodes[1][0], nodes[1][1].token_ids, parent=nodes[0][0]) as reader:
        assert reader.codec.name == "raw"
        assert same(read_whole(reader), finite(nodes[1][1]))


def test_rounded_kv_is_not_an_exact_beginning(store, path):
    (key, chunk), node = path(1, 2)
    store.put(key, finite(chunk), CODECS["int8"])
    store.put(*node)
    assert held(store, path(1, 2)) == 0


# --- what claims to be exact


def rewritten(file, change):
    """Change a value file's header, and make its checksum right again."""
    raw = bytearray(file.read_bytes())
    (header_nbytes,) = struct.unpack_from("<I", raw, 12)
    change(raw, header_nbytes)
    struct.pack_into("<I", raw, header_nbytes - 4, zlib.crc32(bytes(raw[: header_nbytes - 4])))
    file.write_bytes(raw)


def test_another_parent_in_the_file_is_refused(store, path, root):
    """The checksum is right for whatever was written."""
    nodes = path(1, 2)
    put_all(store, nodes)

    def turn(raw, header_nbytes):
        at = raw.find(bytes.fromhex(nodes[0][0].digest), 0, header_nbytes)
        raw[at] ^= 1

    rewritten(file_of(root, nodes[1][0]), turn)
    assert held(store, nodes) == 1
    assert store.stats().quarantined == 1


def test_nodes_and_lone_chunks_are_not_interchangeable(store, path, sample):
    """Fused KV, say, that somebody put under a node's key; and a node's under a chunk's."""
    nodes = path(1, 2)
    store.put(*nodes[0])
    store.put(nodes[1][0], replace(nodes[1][1], parent=None))
    assert held(store, nodes) == 1
    key, chunk = sample(7)
    store.put(key, replace(chunk, parent=nodes[0][0]))
    assert store.open_chunk(key, chunk.token_ids) is None
    assert store.stats().quarantined == 2


# --- eviction


def test_one_large_value_may_evict_whole_paths(open_store, path, sample):
    nodes, large = path(1, 2, 3, 4, 5), sample(99, tokens=40)
    store = open_store(budget_bytes=max(Blob.of(*large).nbytes, sum(Blob.of(*n).nbytes for n in nodes)))
    put_all(store, nodes)
    store.put(*large)
    assert store.stats().bytes <= store.budget_bytes
    assert store.contains(large[0])


def test_a_path_that_fills_the_store_cannot_grow(open_store, path, root):
    nodes = path(1, 2, 3, 4)
    store = open_store(budget_bytes=sum(Blob.of(*node).nbytes for node in nodes[:3]))
    put_all(store, nodes[:3])
    before = sorted(root.rglob("*.kv"))
    with pytest.raises(StoreFullError, match="Raise it"):
        store.put(*nodes[3])
    assert sorted(root.rglob("*.kv")) == before
    assert held(store, nodes) == 3


@pytest.mark.parametrize(("policy", "values"), [("lru", 3), ("pgdsf", 5), ("lru", 8)])
def test_parents_of_stored_nodes_are_always_stored(root, path, policy, values):
    """After every step each node's parent is stored and the budget is kept."""
    seeded, evicted = random.Random(f"{policy} {values}"), 0
    budget = values * max(Blob.of(*node).nbytes for seed in range(4) for node in path(0, seed))
    store = KVStore.open(root, budget, policy=policy)
    for _ in range(150):
        nodes = path(*seeded.choices(range(4), weights=[4, 2, 1, 1], k=seeded.randint(1, 4)))
        action = seeded.choices(["ask", "delete", "reopen", "gc"], weights=[20, 2, 1, 1])[0]
        if action == "reopen":
            evicted += store.stats().evictions
            store.close()
            store = KVStore.open(root, budget, policy=policy)
        elif action == "gc":
            store.gc()
        elif action == "delete":
            store.delete([nodes[-1][0]])
            assert not store.contains(nodes[-1][0])
        else:
            for node in nodes[held(store, nodes) :]:
                with suppress(StoreFullError):
                    store.put(*node)
        found = parents(root)
        assert all(parent is None or parent in found for parent in found.values())
        assert store.stats().bytes <= budget
    assert store.check() == []
    assert evicted + store.stats().evictions > 20
    store.close()


# --- deletion, and what is left of a path


def test_deleting_a_node_deletes_its_descendants(store, path, held_anywhere):
    """KV behind a passage has attended to it. Nothing of either may stay: no file, no row, no count."""
    nodes, other = path(1, 2, 3), path(4, 2)
    put_all(store, nodes)
    put_all(store, other)
    held(store, nodes)
    store.save_ledger()
    freed = store.delete([nodes[1][0]])
    assert freed == sum(Blob.of(*node).nbytes for node in nodes[1:])
    assert (held(store, nodes[:1]), held(store, other)) == (1, 2)
    for key, _ in nodes[1:]:
        assert not held_anywhere(key.digest)
    assert store.check() == []


def test_counts_of_an_evicted_node_are_deleted_with_its_passage(open_store, path, sample, held_anywhere):
    nodes = path(1, 2)
    store = open_store(budget_bytes=2 * Blob.of(*nodes[1]).nbytes)
    put_all(store, nodes)
    store.put(*sample(9))
    assert not store.contains(nodes[1][0])
    store.delete([nodes[0][0]])
    store.close()
    assert not held_anywhere(nodes[1][0].digest)


@pytest.mark.parametrize("looked_after", ["open", "gc"])
def test_nodes_without_a_parent_are_swept(open_store, path, root, looked_after):
    nodes = path(1, 2, 3)
    store = open_store()
    put_all(store, nodes)
    file_of(root, nodes[0][0]).write_bytes(b"damaged")
    assert store.get(nodes[0][0], nodes[0][1].token_ids) is None
    assert held(store, nodes) == 0
    if looked_after == "open":
        store.close()
        store = open_store()
    else:
        store.gc()
    assert store.stats().entries == 0
    assert not list(root.glob("values/*/*.kv"))


def test_children_are_usable_again_when_their_parent_is_stored_again(store, path, root):
    """They stand behind these very tokens: whoever computes them again gets the same."""
    nodes = path(1, 2, 3)
    put_all(store, nodes)
    file_of(root, nodes[1][0]).unlink()
    assert held(store, nodes) == 1
    assert store.put(*nodes[1])
    assert held(store, nodes) == 3


def test_the_tree_survives_a_lost_ledger(open_store, path, sample, rows):
    nodes = path(1, 2, 3)
    store = open_store()
    put_all(store, nodes)
    store.close()
    rows("DELETE FROM Cache WHERE key LIKE 'ledger%'")
    store = open_store(budget_bytes=4 * Blob.of(*nodes[1]).nbytes)
    for seed in range(20, 24):
        store.put(*sample(seed))
        found = [store.contains(key) for key, _ in nodes]
        assert all(before or not after for before, after in pairwise(found))
    store.close()
    store = open_store()
    put_all(store, nodes)
    rows("UPDATE Cache SET value = x'00' WHERE key = 'ledger'")  # under an open store
    store.delete([nodes[0][0]])
    assert not any(store.contains(key) for key, _ in nodes)


def test_a_node_is_stored_while_a_lowered_budget_is_exceeded(open_store, path, sample, monkeypatch):
    """Each put evicts some values; where that was not enough, every node was refused and the evictions undone."""
    monkeypatch.setattr("ragblend.kvstore.store.EXTRA_EVICTIONS", 4)
    nodes, store = path(1, 2), open_store()
    for seed in range(20, 40):
        store.put(*sample(seed))
    store.put(*nodes[0])
    store.budget_bytes = 3 * Blob.of(*nodes[1]).nbytes
    assert store.put(*nodes[1])
    assert store.stats().entries < 20
