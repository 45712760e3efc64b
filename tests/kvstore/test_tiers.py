"""Every tier alone keeps the same promises; and together they are one store, whose fast tiers hold what was used."""

import random
import threading
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from ragblend.kvstore import memory
from ragblend.kvstore.chunks import ChunkKV
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import value_files
from ragblend.kvstore.memory import HeldChunk, MemoryTier, held_nbytes, read_whole
from ragblend.kvstore.policy import EVICTION_POLICIES
from ragblend.kvstore.store import KVStore

GENEROUS = 1 << 30


@pytest.fixture(params=["disk", "memory", "memory-lru"])
def open_tier(request, root) -> Callable[[int], KVStore | MemoryTier]:
    """Opens a tier of that many bytes."""
    opened = []

    def open_(budget_bytes: int = GENEROUS) -> KVStore | MemoryTier:
        if request.param == "disk":
            opened.append(KVStore.open(root, budget_bytes))
            return opened[-1]
        policy = EVICTION_POLICIES["lru" if request.param.endswith("lru") else "pgdsf"]
        return MemoryTier("memory", budget_bytes, policy=policy)

    yield open_
    for store in opened:
        store.close()


def put(tier: KVStore | MemoryTier, key: ChunkKey, chunk: ChunkKV) -> bool | None:
    return tier.put(key, chunk) if isinstance(tier, KVStore) else tier.admit(key, HeldChunk.of(chunk))


def get(tier: KVStore | MemoryTier, key: ChunkKey, token_ids: tuple[int, ...]) -> ChunkKV | None:
    reader = tier.open_chunk(key, token_ids)
    with reader or nullcontext():
        return reader and read_whole(reader)


def test_a_tier_equals_a_dictionary(open_tier, sample, same):
    """Puts and deletions at random; neither what was put nor what was got is the stored value itself."""
    tier, held, chance = open_tier(), {}, random.Random(1)
    for _ in range(80):
        seed = chance.randrange(4)
        (key, chunk), (_, as_given) = (sample(seed, tokens=3 + seed) for _ in range(2))
        if chance.random() < 0.4:
            put(tier, key, chunk)
            chunk.keys[0].view(torch.uint8).fill_(0)
            held[key] = as_given
        elif chance.random() < 0.4:
            before, was_held = tier.stats().bytes, held.pop(key, None) is not None
            freed = tier.delete([key])
            assert (freed > 0) == was_held and tier.stats().bytes == before - freed
        found = get(tier, key, chunk.token_ids)
        assert same(found, as_given) if key in held else found is None
        if found is not None:
            found.values[1].view(torch.uint8).fill_(0)
        assert set(tier.keys()) == held.keys()


def test_pinned_memory_counts_as_its_allocator_rounds_it(sample):
    """It rounds every piece up to a power of two, and gives nothing back to the system."""
    key, chunk = sample(1, tokens=5)
    exact = held_nbytes(HeldChunk.of(chunk))
    taken = next(1 << bits for bits in range(40) if 1 << bits >= exact)
    assert taken > exact
    tier = MemoryTier("memory", taken, pinned=True)
    assert tier.admit(key, HeldChunk.of(chunk)) and tier.stats().bytes == taken
    assert not MemoryTier("memory", taken - 1, pinned=True).admit(key, HeldChunk.of(chunk))


def test_memory_that_cannot_be_page_locked_is_ordinary_memory(sample, same, caplog, monkeypatch):
    """As without a card; with one, a limit of locked memory may refuse it."""

    def refusing(*shape, pin_memory=False, **more):
        if pin_memory:
            raise RuntimeError("no more locked memory")
        return empty(*shape, **more)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", refusing)
    memory._warn_once.cache_clear()
    (key, chunk), tier = sample(1), MemoryTier("memory", GENEROUS, pinned=True)
    for _ in range(2):
        assert tier.admit(key, HeldChunk.of(chunk)) and same(get(tier, key, chunk.token_ids), chunk)
    assert caplog.text.count("page-locked") == 1


def test_other_token_ids_under_a_key_are_a_miss(open_tier, sample):
    tier = open_tier()
    key, chunk = sample(1)
    put(tier, key, chunk)
    assert get(tier, key, (*chunk.token_ids[:-1], chunk.token_ids[-1] + 1)) is None


def test_readers_fill_slices_of_larger_tensors(open_tier, sample, same):
    tier = open_tier()
    key, chunk = sample(2, tokens=5)
    put(tier, key, chunk)
    g = chunk.geometry
    with tier.open_chunk(key, chunk.token_ids) as reader:
        assert (reader.token_ids, reader.start, reader.geometry) == (chunk.token_ids, chunk.start, g)
        layers = []
        for layer in range(g.layers):
            keys = torch.zeros(g.kv_heads, 9, g.key_size, dtype=g.torch_dtype)
            values = torch.zeros(g.kv_heads, 9, g.value_size, dtype=g.torch_dtype)
            reader.read_layer(layer, keys[:, 2:7], values[:, 2:7])
            assert not keys[:, :2].any() and not keys[:, 7:].any()
            layers.append((keys[:, 2:7].contiguous(), values[:, 2:7].contiguous()))
    keys, values = zip(*layers, strict=True)
    assert same(ChunkKV(chunk.token_ids, chunk.start, g, keys, values), chunk)


def test_the_budget_holds_and_the_newest_value_stays(open_tier, sample, same):
    tier = open_tier()
    put(tier, *sample(0))
    one = tier.stats().bytes
    tier.delete([sample(0)[0]])
    tier.budget_bytes = 3 * one
    for seed in range(10):
        put(tier, *sample(seed))
        stats = tier.stats()
        assert stats.bytes <= tier.budget_bytes and stats.entries == min(seed + 1, 3)
        key, chunk = sample(seed)
        assert same(get(tier, key, chunk.token_ids), chunk)
    assert tier.stats().evictions == 7


def test_an_open_value_stays_whole_when_it_is_evicted(open_tier, sample):
    tier = open_tier()
    key, chunk = sample(7)
    put(tier, key, chunk)
    reader = tier.open_chunk(key, chunk.token_ids)
    tier.delete([key])
    g = chunk.geometry
    keys = torch.empty(g.kv_heads, 5, g.key_size, dtype=g.torch_dtype)
    values = torch.empty(g.kv_heads, 5, g.value_size, dtype=g.torch_dtype)
    reader.read_layer(1, keys, values)
    reader.close()
    assert torch.equal(keys.view(torch.uint8), chunk.keys[1].view(torch.uint8))


def test_threads_see_whole_values(open_tier, sample, same):
    tier = open_tier()
    chunks = [sample(seed) for seed in range(6)]
    put(tier, *chunks[0])
    tier.budget_bytes = 3 * tier.stats().bytes
    wrong, stop = [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            for key, chunk in chunks:
                found = get(tier, key, chunk.token_ids)
                if found is not None and not same(found, chunk):
                    wrong.append(key)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        key, chunk = chunks[turn % 6]
        put(tier, key, chunk)
        if turn % 7 == 0:
            tier.delete([key])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_value_larger_than_a_memory_tier_is_not_admitted(sample):
    tier = MemoryTier("memory", 1)
    assert not put(tier, *sample(1))
    assert tier.stats().entries == 0


def test_memory_keeps_values_that_are_used_often(sample):
    tier = MemoryTier("memory", 1 << 30)
    put(tier, *sample(0))
    tier.budget_bytes = 2 * tier.stats().bytes
    key, chunk = sample(0)
    for _ in range(5):
        assert get(tier, key, chunk.token_ids) is not None
    for seed in range(1, 6):
        put(tier, *sample(seed))
        assert tier.peek(key, chunk.token_ids), seed


# --- together


@pytest.fixture
def tiered(root):
    """A disk below two memories, of which the faster one is small."""
    tiers = [MemoryTier("device", 1 << 30), MemoryTier("memory", 1 << 30)]
    with KVStore.open(root, GENEROUS, tiers) as store:
        yield store


def value_files_of(root):
    found = [root / file.filename for file in value_files(root)]
    assert found
    return found


def tier_of(store, key, chunk):
    with store.open_chunk(key, chunk.token_ids) as reader:
        return reader.tier


def test_used_values_are_promoted_one_tier_at_a_time(tiered, sample, same):
    key, chunk = sample.put(tiered, 1)
    for expected in ("disk", "memory", "device", "device"):
        assert tier_of(tiered, key, chunk) == expected
        assert same(tiered.get(key, chunk.token_ids), chunk)
        tiered.promote(key, chunk.token_ids)
    assert [stats.entries for stats in tiered.stats_by_tier().values()] == [1, 1, 1]
    assert tiered.stats().hits == 8 and tiered.stats().misses == 0


def test_eviction_from_memory_leaves_the_disk_alone(tiered, sample, same, root):
    memory = tiered.tiers[1]
    for seed in range(3):
        key, chunk = sample.put(tiered, seed)
        files = {path: path.stat().st_mtime_ns for path in value_files_of(root)}
        memory.budget_bytes = chunk.nbytes
        tiered.promote(key, chunk.token_ids)
    assert (memory.stats().entries, memory.stats().evictions) == (1, 2)
    for seed in range(3):
        key, chunk = sample(seed)
        assert same(tiered.get(key, chunk.token_ids), chunk)
    assert {path: path.stat().st_mtime_ns for path in value_files_of(root)} == files


@pytest.mark.parametrize("how", ["delete", "gc", "elsewhere", "eviction"])
def test_values_deleted_on_the_disk_are_not_served_from_memory(tiered, sample, root, how):
    key, chunk = sample.put(tiered, 1)
    tiered.promote(key, chunk.token_ids)
    assert tier_of(tiered, key, chunk) == "memory"
    if how == "delete":
        tiered.delete([key])
    elif how == "gc":
        tiered.gc(keep=())
    elif how == "elsewhere":  # as another process would
        with KVStore.open(root, GENEROUS) as other:
            other.delete([key])
    else:
        tiered.budget_bytes = tiered.stats().bytes
        tiered.put(*sample(2))
    assert tiered.open_chunk(key, chunk.token_ids) is None
    if how != "elsewhere":  # it would take the place of what can be found
        assert tiered.tiers[1].stats().bytes == 0


def test_a_new_value_replaces_the_copy_in_memory(tiered, sample, same):
    key, chunk = sample(1)
    other = sample(2)[1]
    tiered.put(key, chunk)
    tiered.promote(key, chunk.token_ids)
    tiered.put(key, other)
    assert same(tiered.get(key, other.token_ids), other)
    assert tiered.get(key, chunk.token_ids) is None


def test_damaged_values_are_not_promoted(tiered, sample, value_path):
    key, chunk = sample.put(tiered, 1)
    path = value_path(key)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    tiered.promote(key, chunk.token_ids)
    assert tiered.tiers[1].stats().entries == 0 and tiered.stats().quarantined == 1
    assert (tiered.stats().hits, tiered.stats().misses) == (0, 0)  # nobody asked for it
    tiered.promote(key, chunk.token_ids)  # nothing there: no error


def test_memory_serves_values_whose_file_is_gone(tiered, sample, same, value_path):
    key, chunk = sample.put(tiered, 1)
    tiered.promote(key, chunk.token_ids)
    value_path(key).unlink()
    assert same(tiered.get(key, chunk.token_ids), chunk)
