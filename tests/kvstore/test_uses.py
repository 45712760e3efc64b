"""The disk's order of eviction: kept in rows, it must be what ranking.py keeps in memory, whoever opens the store."""

import os
import random
import sqlite3
import time
from contextlib import suppress

import pytest

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.policy import HALF_LIFE_USES, POLICIES, Entry
from ragblend.kvstore.ranking import History, Ranking
from ragblend.kvstore.stats import Counts
from ragblend.kvstore.store import KVStore
from ragblend.kvstore.use_rows import _IN_ORDER
from ragblend.kvstore.uses import Uses


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch):
    """No fsync: nothing here is about power cuts."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def samples(sample):
    return [sample(seed, tokens=3 + seed % 7) for seed in range(40)]


def cost(cached_tokens, new_tokens):
    return 1.0 / new_tokens


class Memory:
    """What ranking.py says, for the same retrievals and puts."""

    def __init__(self, name, budget_bytes):
        self.history, self.ranking = History(POLICIES[name]), Ranking(POLICIES[name])
        self.budget_bytes, self.stored = budget_bytes, set()

    def get(self, digest):
        entry = self.history.used(digest)
        if digest in self.ranking:
            self.ranking.rank(entry)

    def put(self, digest, nbytes, value_cost):
        self.stored.add(digest)
        self.ranking.rank(self.history.computed(digest, nbytes, 0, value_cost))
        for victim in self.ranking.take(self.ranking.nbytes - self.budget_bytes, {digest}):
            self.history.gone(victim.digest)

    def delete(self, digest):
        self.ranking.drop(digest)
        self.history.forget(digest)
        self.stored.discard(digest)

    def reopened(self):
        """Retrievals of what was never stored are one process's."""
        for entry, here in list(self.history.entries()):
            if not here and entry.digest not in self.stored:
                self.history.forget(entry.digest)


def digests(store):
    return {key.digest for key in store.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", POLICIES)
def test_the_disk_evicts_what_ranking_would_have(root, samples, name):
    """Retrievals, puts, deletes and reopenings at random; after each put the same values are there."""
    seeded, budget = random.Random(name), sum(Blob.of(*each).nbytes for each in samples[:14])
    memory, store, evicted = Memory(name, budget), KVStore.open(root, budget, policy=name, cost=cost), 0
    for _ in range(700):
        key, chunk = samples[min(int(seeded.paretovariate(0.6)) - 1, len(samples) - 1)]
        action = seeded.random()
        if action < 0.03:
            memory.delete(key.digest)
            store.delete(key)
        elif action < 0.06:
            evicted += store.stats().evictions
            store.close()
            store = KVStore.open(root, budget, policy=name, cost=cost)
            memory.reopened()
        else:
            memory.get(key.digest)
            if store.get(key, chunk.token_ids) is None or action > 0.9:
                memory.put(key.digest, Blob.of(key, chunk).nbytes, cost(0, len(chunk.token_ids)))
                store.put(key, chunk)
                assert digests(store) == set(memory.ranking._entries)
    assert evicted + store.stats().evictions > 50
    store.close()


def test_processes_share_one_order(root, sample):
    """What others used counts as much as what one used oneself; two stores stand for two processes."""
    one, size = [sample(seed) for seed in range(8)], Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as first, KVStore.open(root, 3 * size) as second:
        for each in one[:3]:
            first.put(*each)
        for _ in range(4):
            assert second.get(one[0][0], one[0][1].token_ids)
            assert first.get(one[1][0], one[1][1].token_ids)
        first.write_uses(at_least=3)
        assert first._uses.waiting == 1  # too few
        first.write_uses(at_least=1)
        assert first._uses.waiting == 0
        second.put(*one[3])  # evicts 2, which nobody used
        first.put(*one[4])  # and now 3
        assert digests(first) == digests(second) == {one[number][0].digest for number in (0, 1, 4)}
        assert first.stats().evictions == second.stats().evictions == 1


def test_the_policy_is_that_of_whoever_opened_the_store_last(root, sample):
    """Two processes of two policies must not rank in turns, each by his own."""
    often, lately, new, size = sample(0), sample(1), sample(2), Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 2 * size, policy="pgdsf") as first:
        first.put(*often)
        for _ in range(5):
            first.get(often[0], often[1].token_ids)
        first.put(*lately)
        with KVStore.open(root, 2 * size, policy="lru"):
            first.put(*new)
        assert digests(first) == {lately[0].digest, new[0].digest}
    with KVStore.open(root, 2 * size, policy="lfu") as store:
        for _ in range(3):
            store.get(lately[0], lately[1].token_ids)
        store.put(*often)
        assert digests(store) == {lately[0].digest, often[0].digest}


def test_an_unknown_policy_touches_nothing(root):
    with pytest.raises(UsageError, match="'lrv' is unknown"):
        KVStore.open(root, 1, policy="lrv")
    assert not root.exists()


def held_anywhere(root, digest):
    needles = digest.encode(), bytes.fromhex(digest)
    return [p for p in root.rglob("*") if p.is_file() and any(needle in p.read_bytes() for needle in needles)]


@pytest.mark.parametrize("how", ["delete", "gc", "elsewhere"])
def test_of_a_deleted_value_not_even_its_count_stays(root, sample, how):
    """Also of one that was evicted before, and that another process has used meanwhile."""
    gone, other, size = sample(0), sample(1), Blob.of(*sample(0)).nbytes
    store = KVStore.open(root, size)
    store.put(*gone)
    assert store.get(gone[0], gone[1].token_ids)
    store.put(*other)
    assert not store.contains(gone[0])
    store._index.truncate_log()
    assert held_anywhere(root, gone[0].digest)  # its count goes on
    assert store.get(gone[0], gone[1].token_ids) is None  # waits to be written
    if how == "delete":
        store.delete(gone[0])
    elif how == "gc":
        store.gc(keep=[other[0]])
    else:
        with KVStore.open(root, size) as process:
            process.delete(gone[0])
    store.put(*other)
    store.close()
    assert not held_anywhere(root, gone[0].digest)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE Uses SET priority = 'x'",
        "UPDATE Uses SET priority = 9e99",
        "UPDATE Uses SET used_at = -5, frequency = 'much', cost = x'00'",
        "UPDATE Uses SET frequency = 1e300, computations = -4",
        "UPDATE Uses SET cache_row = cache_row + 100",
        "DELETE FROM Uses",
        "DELETE FROM Ranking",
        "UPDATE Ranking SET policy = 'none', uses = 'many', clock = 1e300",
        "UPDATE Totals SET hits = 'some'",
        "UPDATE Settings SET value = 1 WHERE key IN ('size', 'count')",
    ],
)
@pytest.mark.parametrize("reopened", [False, True])
def test_damaged_rows_are_survived(root, sample, same, damage, reopened):
    """Values stay, the budget is kept, the newest is there, and what is wrong is mended at the next open."""
    size = Blob.of(*sample(0)).nbytes
    store = KVStore.open(root, 4 * size)
    for seed in range(4):
        store.put(*sample(seed))
    if reopened:
        store.close()
    sql = sqlite3.connect(root / "cache.db", isolation_level=None)
    sql.execute(damage)
    sql.close()
    if reopened:
        store = KVStore.open(root, 4 * size)
        assert store.stats().entries == 4
    for seed in range(12):
        key, chunk = sample(seed)
        store.put(key, chunk)
        assert same(store.get(key, chunk.token_ids), chunk)
        assert reopened is False or store.stats().bytes <= 4 * size
    store.close()
    with KVStore.open(root, 4 * size) as store:
        store.put(*sample(20))
        assert store.stats().bytes == 4 * size and store.check() == []
        assert set(store.totals_by_tier()) == {"disk"}


def test_a_store_without_uses_is_ranked_as_its_values_came(root, sample):
    """Made by a version that kept the order in access_time, or entered anew after its index was set aside."""
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 9 * size) as store:
        for seed in (2, 0, 1):
            store.put(*sample(seed))
        for table in ("Uses", "Gone", "Ranking", "Totals"):
            store._index._sql.execute(f"DROP TABLE {table}")
        store._flush = lambda: None
    with KVStore.open(root, 3 * size) as store:
        store.put(*sample(3))
        assert digests(store) == {sample(seed)[0].digest for seed in (0, 1, 3)}


def test_no_clock_is_asked(root, sample, monkeypatch):
    seeded, size = random.Random(1), Blob.of(*sample(0)).nbytes
    monkeypatch.setattr(time, "time", lambda: seeded.uniform(0, 4e9))
    with KVStore.open(root, 3 * size, policy="lru") as store:
        for seed in range(9):
            store.put(*sample(seed))
            assert digests(store) == {
                sample(number)[0].digest for number in range(max(0, seed - 2), seed + 1)
            }


def test_the_next_victim_is_found_without_sorting_or_reading_all(store):
    """The plan of the query: an index in the right order, a look-up for each row; no scan, no sorting."""
    plan = [row[3] for row in store._index._sql.execute(f"EXPLAIN QUERY PLAN {_IN_ORDER}", ("",))]
    assert len(plan) == 2, plan
    assert "UsesInOrder" in plan[0] and "SEARCH Cache USING INTEGER PRIMARY KEY" in plan[1], plan


def test_what_is_remembered_of_evicted_values_is_bounded(root, sample):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, size) as store:
        for seed in range(9):
            store.put(*sample(seed))
        with store._index.transaction() as sql:
            Uses(POLICIES["pgdsf"], remembered=3).settle(sql)
            kept = {digest for (digest,) in sql.execute("SELECT digest FROM Gone")}
    assert kept == {sample(seed)[0].digest for seed in (5, 6, 7)}


def test_uses_that_could_not_be_written_wait_on(root, sample):
    key, chunk = sample(0)
    with KVStore.open(root, 1 << 20) as store:
        store.put(key, chunk)
        store.get(key, chunk.token_ids)
        with suppress(ZeroDivisionError), store._recording() as sql:
            store._uses.flush(sql)
            raise ZeroDivisionError
        store.get(key, chunk.token_ids)
        store._flush()
        found = store._index._sql.execute("SELECT used_at, frequency FROM Uses").fetchone()
    fading = [2.0 ** (-before / HALF_LIFE_USES) for before in range(3)]
    assert found == (3.0, pytest.approx(sum(fading)))


def test_waiting_uses_are_bounded():
    uses = Uses(POLICIES["pgdsf"], remembered=3)
    for digest in "abcad":
        uses.used(digest)
    assert [entry.digest for entry in uses._waiting.values()] == ["c", "a", "d"]
    assert uses._waiting["a"] == Entry("a", 0, 4.0, frequency=pytest.approx(2.0, abs=0.01))


def test_a_store_with_an_index_of_before_keeps_what_it_counted(root, sample, caplog):
    """The order of what is gone was once an index, which every eviction had to write."""
    with KVStore.open(root, Blob.of(*sample(0)).nbytes) as store:
        store.put(*sample(0))
        store.put(*sample(1))
    with sqlite3.connect(root / "cache.db") as sql:
        sql.execute("CREATE INDEX GoneInOrder ON Gone (used_at)")
    sql.close()
    with KVStore.open(root, None) as store:
        assert store.totals_by_tier() == {"disk": Counts(evictions=1)}
        schema = {name for (name,) in store._index._sql.execute("SELECT name FROM sqlite_master")}
        assert "Gone" in schema and "GoneInOrder" not in schema
    assert not caplog.records


def test_the_row_of_a_victim_that_would_expire_is_handed_on_whole(root, sample):
    key, chunk = sample(1)
    with KVStore.open(root, Blob.of(*sample(0)).nbytes) as store:
        store.put(*sample(0))
        store._index._sql.execute("UPDATE Cache SET expire_time = 1.0, tag = 'x'")
        store.put(key, chunk)
        fields = store._index._sql.execute("SELECT key, expire_time, tag FROM Cache").fetchall()
        assert fields == [(key.digest, None, None)]
        assert store.get(key, chunk.token_ids) is not None


def test_totals_are_those_of_all_processes(root, sample):
    size, (key, chunk) = Blob.of(*sample(0)).nbytes, sample(0)
    for _ in range(3):
        with KVStore.open(root, size) as store:
            store.get(key, chunk.token_ids)
            store.put(key, chunk)
            store.get(key, chunk.token_ids)
            assert store.stats().hits in (1, 2)
    with KVStore.open(root, size) as store, KVStore.open(root, size) as other:
        assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=1)}
        other.put(*sample(1))
        other.write_uses(at_least=0)
        assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=1, evictions=1)}
        store.get(key, chunk.token_ids)
        assert store.totals_by_tier()["disk"].misses == 2  # its own, not written yet
        assert other.totals_by_tier()["disk"].misses == 1


def test_a_put_that_evicts_takes_few_statements(root, sample):
    """Each is paid by every admission; an UPDATE of the victim's row took the place of an INSERT and two DELETEs."""
    size, statements = Blob.of(*sample(0)).nbytes, []
    with KVStore.open(root, 2 * size) as store:
        for seed in range(3):
            store.put(*sample(seed))
        store._index._sql.set_trace_callback(statements.append)
        store.put(*sample(3))
        store._index._sql.set_trace_callback(None)
        assert digests(store) == {sample(seed)[0].digest for seed in (2, 3)}
    own = [each.split()[0] for each in dict.fromkeys(statements)]  # a trigger's is told as its cause's again
    assert own == ["BEGIN", "SELECT", "SELECT", "UPDATE", "INSERT", "INSERT", "INSERT", "COMMIT"], statements


def test_a_row_that_was_handed_on_is_the_new_value_s(root, sample, same):
    """Of several victims the first gives its row; the others' go. The newest value is the last of the keys."""
    small, large = [sample(seed, tokens=4) for seed in range(4)], sample(9, tokens=60)
    size = Blob.of(*large).nbytes
    with KVStore.open(root, size + Blob.of(*small[0]).nbytes, policy="lru") as store:
        for each in small:
            store.put(*each)
        store.put(*large)
        assert list(store.keys()) == [small[3][0], large[0]]
        assert same(store.get(large[0], large[1].token_ids), large[1])
        assert all(store.get(key, chunk.token_ids) is None for key, chunk in small[:3])
        assert store.stats().evictions == 3 and store.check() == []
        rows = "SELECT (SELECT COUNT(*) FROM Cache), (SELECT COUNT(*) FROM Uses)"
        assert store._index._sql.execute(rows).fetchone() == (2, 2)


def test_uses_of_a_change_that_failed_are_not_taken_for_written(root, sample):
    """A later change that writes none of them was taken for the one that did, and they were lost."""
    key, chunk = sample(0)
    with KVStore.open(root, 1 << 20) as store:
        store.put(key, chunk)
        store.get(key, chunk.token_ids)
        with suppress(ZeroDivisionError), store._recording() as sql:
            store._uses.flush(sql)
            raise ZeroDivisionError
        store.delete(sample(1)[0])
        store._flush()
        found = store._index._sql.execute("SELECT frequency FROM Uses").fetchone()
    assert found == (pytest.approx(2.0, abs=0.01),)


def test_puts_write_their_counts_many_at_once(root, sample):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, size) as store, KVStore.open(root, size) as other:
        seen = []
        for seed in range(70):
            store.put(*sample(seed))
            seen.append(other.totals_by_tier()["disk"].evictions)
    assert set(seen) == {0, 64}
