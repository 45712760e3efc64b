"""The ledger, the disk's order of eviction: it must be what a plain dictionary says, whoever opens the store."""

import random
import sqlite3
import time
from contextlib import closing, suppress

import pytest

from ragblend.kvstore import layout
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.policy import HALF_LIFE_USES, POLICIES, Entry, clock_after, computed, ranked, used
from ragblend.kvstore.sqlite import connect
from ragblend.kvstore.store import KVStore
from ragblend.kvstore.uses import Change, Counters, Counts, Ledger

pytestmark = pytest.mark.usefixtures("quick_disk")  # nothing here is about power cuts


@pytest.fixture
def samples(sample):
    return [sample(seed, tokens=3 + seed % 7) for seed in range(40)]


def cost(cached_tokens, new_tokens):
    return 1.0 / new_tokens


class Memory:
    """The same retrievals and puts over dictionaries, sorted anew for every victim."""

    def __init__(self, name, budget_bytes):
        self.policy, self.budget_bytes = POLICIES[name], budget_bytes
        self.half_life = HALF_LIFE_USES if self.policy.fades else None
        self.here, self.gone, self.stored = {}, {}, set()
        self.uses = self.clock = 0.0

    def get(self, digest):
        self.uses += 1.0
        if digest in self.here:
            entry = used(self.here[digest], self.uses, self.half_life)
            self.here[digest] = ranked(entry, self.policy, self.clock)
        elif self.policy.fades:
            self.gone[digest] = used(self.gone.get(digest, Entry(digest, 0)), self.uses, self.half_life)

    def put(self, digest, nbytes, value_cost):
        self.stored.add(digest)
        before = self.here.get(digest) or self.gone.pop(digest, Entry(digest, 0))
        entry = computed(before._replace(nbytes=nbytes), value_cost)
        if not entry.frequency:
            self.uses += 1.0
            entry = entry._replace(used_at=self.uses, frequency=1.0)
        self.here[digest] = ranked(entry, self.policy, self.clock)
        victims = []
        while sum(each.nbytes for each in self.here.values()) > self.budget_bytes:
            others = [each for each in self.here.values() if each.digest != digest]
            victims.append(min(others, key=lambda each: (each.priority, each.used_at)))
            del self.here[victims[-1].digest]
        self.clock = clock_after(self.clock, victims)
        if self.policy.fades:
            self.gone |= {each.digest: each for each in victims}

    def delete(self, digest):
        self.here.pop(digest, None)
        self.gone.pop(digest, None)
        self.stored.discard(digest)

    def reopened(self):
        """Retrievals of what was never stored are one process's."""
        self.gone = {digest: entry for digest, entry in self.gone.items() if digest in self.stored}


def digests(store):
    return {key.digest for key in store.keys()}  # noqa: SIM118


@pytest.mark.parametrize("name", POLICIES)
def test_the_disk_evicts_what_the_dictionaries_would(root, samples, name):
    """Retrievals, puts, deletes and reopenings at random; after each put the same values are there."""
    seeded, budget = random.Random(name), sum(Blob.of(*each).nbytes for each in samples[:14])
    memory, store, evicted = Memory(name, budget), KVStore.open(root, budget, policy=name, cost=cost), 0
    for _ in range(700):
        key, chunk = samples[min(int(seeded.paretovariate(0.6)) - 1, len(samples) - 1)]
        action = seeded.random()
        if action < 0.03:
            memory.delete(key.digest)
            store.delete([key])
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
                assert digests(store) == set(memory.here)
    assert evicted + store.stats().evictions > 50
    store.close()


def test_processes_share_one_order(root, sample, uses):
    """What others used counts as much as what one used oneself; two stores stand for two processes."""
    one, size = [sample(seed) for seed in range(8)], Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as first, KVStore.open(root, 3 * size) as second:
        for each in one[:3]:
            first.put(*each)
        for _ in range(4):
            assert second.get(one[0][0], one[0][1].token_ids)
            assert first.get(one[1][0], one[1][1].token_ids)
        before = uses("SELECT uses FROM Ranking")
        first.write_uses(at_least=3)
        assert uses("SELECT uses FROM Ranking") == before  # too few
        first.write_uses(at_least=1)
        assert uses("SELECT uses FROM Ranking") != before
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
    with KVStore.open(root, 2 * size, policy="gdsf") as store:
        for _ in range(3):
            store.get(lately[0], lately[1].token_ids)
        store.put(*often)
        assert digests(store) == {lately[0].digest, often[0].digest}


def test_a_store_ranked_by_a_policy_that_is_no_more_is_ranked_anew(root, sample, uses):
    """Its priorities were on another scale: what had a high one would have stayed for ever."""
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as store:
        for seed in range(3):
            store.put(*sample(seed))
        for _ in range(5):
            store.get(sample(0)[0], sample(0)[1].token_ids)
    uses("UPDATE Ranking SET policy = 'fading', clock = 1e6")
    uses("UPDATE Uses SET priority = 1e9 WHERE priority = (SELECT MIN(priority) FROM Uses)")
    with KVStore.open(root, 3 * size) as store:
        store.put(*sample(3))
        store.put(*sample(4))
        assert store.policy == "pgdsf"
        assert digests(store) == {sample(seed)[0].digest for seed in (0, 3, 4)}


@pytest.mark.parametrize("how", ["delete", "gc", "elsewhere"])
def test_of_a_deleted_value_not_even_its_count_stays(root, sample, how, uses, held_anywhere):
    """Also of one that was evicted before, and that another process has used meanwhile."""
    gone, other, size = sample(0), sample(1), Blob.of(*sample(0)).nbytes
    store = KVStore.open(root, size)
    store.put(*gone)
    assert store.get(gone[0], gone[1].token_ids)
    store.put(*other)
    assert not store.contains(gone[0])
    uses("PRAGMA wal_checkpoint(TRUNCATE)")
    assert held_anywhere(gone[0].digest)  # its count goes on
    assert store.get(gone[0], gone[1].token_ids) is None  # waits to be written
    if how == "delete":
        store.delete([gone[0]])
    elif how == "gc":
        store.gc(keep=[other[0]])
    else:
        with KVStore.open(root, size) as process:
            process.delete([gone[0]])
    store.put(*other)
    store.close()
    assert not held_anywhere(gone[0].digest)


@pytest.mark.parametrize(
    "damage",
    [
        "PRAGMA ignore_check_constraints = ON; UPDATE Uses SET priority = 'x'",
        "PRAGMA ignore_check_constraints = ON; UPDATE Uses SET used_at = -5, frequency = 'much', cost = x'00'",
        "PRAGMA ignore_check_constraints = ON; UPDATE Ranking SET policy = 'none', uses = 'many'",
        "PRAGMA ignore_check_constraints = ON; UPDATE Totals SET hits = 'some'",
        "UPDATE Uses SET digest = digest || 'x'",
        "UPDATE Uses SET bytes = 7",
        "DELETE FROM Uses",
        "DELETE FROM Ranking",
        "DROP TABLE Uses",
        None,  # no database any more
    ],
)
def test_a_damaged_ledger_costs_no_value(root, sample, same, damage):
    """The budget is kept, and the newest value is there."""
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 4 * size) as store:
        for seed in range(4):
            store.put(*sample(seed))
    if damage is None:
        (root / "ledger.db").write_bytes(b"ruin" * 3000)
    else:
        with closing(sqlite3.connect(root / "ledger.db", isolation_level=None)) as sql:
            sql.executescript(damage)
    with KVStore.open(root, 4 * size) as store:
        assert store.stats().entries == 4
        for seed in range(12):
            key, chunk = sample(seed)
            store.put(key, chunk)
            assert same(store.get(key, chunk.token_ids), chunk)
            assert store.stats().bytes <= 4 * size
        assert store.check() == [] and set(store.totals_by_tier()) == {"disk"}


@pytest.mark.parametrize("damage", ["DELETE FROM Uses", "UPDATE Uses SET digest = digest || 'x'"])
def test_values_that_the_ledger_has_lost_while_open_are_evicted_all_the_same(root, sample, uses, damage):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as store:
        for seed in range(3):
            store.put(*sample(seed))
        uses(damage)
        for seed in (3, 4):
            store.put(*sample(seed))
        assert (store.stats().entries, store.stats().bytes) == (3, 3 * size)
        assert store.contains(sample(4)[0]) and store.check() == []


@pytest.mark.parametrize(
    "damage", ["UPDATE Settings SET value = 1 WHERE key IN ('size', 'count')", "DROP TABLE Settings"]
)
def test_damaged_totals_of_the_index_are_counted_anew(root, sample, rows, damage):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 2 * size) as store:
        for seed in range(2):
            store.put(*sample(seed))
    rows(damage)
    with KVStore.open(root, 2 * size) as store:
        assert (store.stats().entries, store.stats().bytes) == (2, 2 * size)
        store.put(*sample(2))
        assert (store.stats().entries, store.stats().bytes) == (2, 2 * size)


@pytest.mark.parametrize("change", ["size * 40", "1"])
@pytest.mark.parametrize("how", ["delete", "replace", "evict"])
def test_the_size_in_a_damaged_row_does_not_move_the_budget(root, sample, rows, change, how):
    """diskcache takes from its sum what stands in the row, and was off until the next open."""
    (key, _), size = sample(0), Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as store:
        for seed in range(3):
            store.put(*sample(seed))
        before = rows("SELECT value FROM Settings WHERE key = 'size'")[0][0]
        rows(f"UPDATE Cache SET size = {change} WHERE key = ?", key.digest)
        rows("UPDATE Settings SET value = ? WHERE key = 'size'", before)  # a flipped bit runs no trigger
        if how == "delete":
            store.delete([key])
        store.put(*sample(0 if how == "replace" else 3))
        assert (store.stats().entries, store.stats().bytes) == (3, 3 * size)
        store.put(*sample(4))
        assert (store.stats().entries, store.stats().bytes) == (3, 3 * size)


def test_a_store_without_a_ledger_is_ranked_as_its_values_came(root, sample):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 9 * size) as store:
        for seed in (2, 0, 1):
            store.put(*sample(seed))
    for path in root.glob("ledger.db*"):
        path.unlink()
    with KVStore.open(root, 3 * size) as store:
        store.put(*sample(3))
        assert digests(store) == {sample(seed)[0].digest for seed in (0, 1, 3)}


KILLED_IN = "layout.remove_index", "layout.prepare", "upkeep.Index", "upkeep._is_sound", "upkeep.sweep"


@pytest.mark.parametrize("killed_in", [None, *KILLED_IN, "uses.Ledger.settle"])
def test_an_index_that_is_not_ours_is_made_anew_from_the_values(
    root, sample, same, caplog, monkeypatch, killed_in
):
    """Killed at any step, the next open goes on."""
    samples = [sample(seed) for seed in range(3)]
    with KVStore.open(root, 1 << 20) as store:
        for each in samples:
            store.put(*each)
    with closing(sqlite3.connect(root / "cache.db")) as sql:
        sql.execute("CREATE TABLE Other (id INTEGER PRIMARY KEY)")
    for path in root.glob("ledger.db*"):
        path.unlink()
    with monkeypatch.context() as patch:
        if killed_in is not None:
            prepare = layout.prepare
            calls = iter([None] if killed_in == "layout.prepare" else [])  # the second is of the new index

            def killed(*args):
                if next(calls, True):
                    raise KeyboardInterrupt
                prepare(*args)

            patch.setattr(f"ragblend.kvstore.{killed_in}", killed)
            with pytest.raises(KeyboardInterrupt):
                KVStore.open(root, 1 << 20)
    with KVStore.open(root, 1 << 20) as store:
        assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in samples)
        assert store.check() == []
    assert "made anew" in caplog.text


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
    """The plan of the query: an index in the right order; no sorting."""
    with closing(connect(store.root / "ledger.db")) as sql:
        asked = []
        change = Change(sql, POLICIES["pgdsf"], {})
        sql.set_trace_callback(asked.append)
        list(change.in_order(""))
        sql.set_trace_callback(None)
        plan = [row[3] for row in sql.execute(f"EXPLAIN QUERY PLAN {asked[-1]}")]
    first, *others = [step for step in plan if "SUBQUERY" not in step]
    assert "UsesInOrder" in first, plan
    assert all(step.startswith("SEARCH") for step in others), plan


@pytest.fixture
def ledger(root):
    root.mkdir(parents=True)
    with Ledger(root / "ledger.db", POLICIES["pgdsf"], {"disk": Counters()}, remembered=3) as ledger:
        yield ledger


def test_what_is_remembered_of_evicted_values_is_bounded(ledger):
    with ledger.changing() as change:
        for digest in "abcdef":
            change.arrive(digest, 1, 1.0)
        change.evict(list(change.in_order("")))
    ledger.settle({}, lambda digest: None)
    assert set(ledger.asked()) == {"d", "e", "f"}


def test_waiting_uses_are_bounded(ledger):
    for digest in "abcad":
        ledger.used(digest)
    found = {"c": 1.0, "a": pytest.approx(2.0, abs=0.01), "d": 1.0}
    assert ledger.asked() == found
    with ledger.changing():
        pass
    assert ledger.asked() == found and ledger.waiting == 0  # of no value that was ever stored
    for digest in "xy":
        ledger.used(digest)
    with ledger.changing():
        pass
    assert set(ledger.asked()) == {"d", "x", "y"}


def test_uses_and_counts_that_could_not_be_written_wait_on(root, sample, uses):
    key, chunk = sample(0)
    with KVStore.open(root, 1 << 20) as store:
        store.put(key, chunk)
        store.get(key, chunk.token_ids)
        uses("CREATE TRIGGER no BEFORE INSERT ON Totals BEGIN SELECT RAISE(ABORT, 'no'); END")
        store.write_uses(at_least=0)  # what was counted is written last
        uses("DROP TRIGGER no")
        store.delete([sample(1)[0]])
        store.get(key, chunk.token_ids)
        store.write_uses(at_least=0)
        found = uses("SELECT used_at, frequency FROM Uses")[0]
        assert store.totals_by_tier() == {"disk": Counts(hits=2)}
    fading = [2.0 ** (-before / HALF_LIFE_USES) for before in range(3)]
    assert found == (3.0, pytest.approx(sum(fading)))


def test_a_row_that_would_expire_is_replaced_or_deleted(root, sample, rows):
    key, chunk = sample(1)
    with KVStore.open(root, 1 << 20) as store:
        for _ in range(2):
            store.put(key, chunk)
            rows("UPDATE Cache SET expire_time = 1.0, tag = 'x'")
            assert store.get(key, chunk.token_ids) is None
        store.delete([key])
        assert rows("SELECT * FROM Cache") == [] and store.check() == []


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


def test_puts_write_their_counts_many_at_once(root, sample):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, size) as store, KVStore.open(root, size) as other:
        seen = []
        for seed in range(70):
            store.put(*sample(seed))
            seen.append(other.totals_by_tier()["disk"].evictions)
    assert set(seen) == {0, 64}


def test_a_row_that_is_no_text_costs_the_order_alone(root, samples):
    """One flipped bit: the store could not be opened any more, and `repair` opens it, too."""
    with closing(KVStore.open(root, None)) as store:
        store.put(*samples[0])
    with closing(connect(root / layout.LEDGER_NAME)) as sql, sql:
        columns = len(sql.execute("SELECT * FROM Uses").description)
        rest = ", 1" * (columns - 2)
        sql.execute(f"INSERT INTO Uses VALUES (CAST(x'fffe61' AS TEXT), 0{rest})")
    for opened in (1, 2):
        with closing(KVStore.open(root, None)) as store:
            assert store.contains(samples[0][0]) and store.stats().entries == opened
            store.put(*samples[1])


def test_damage_in_the_ledger_costs_no_index(root, samples):
    """While it is open: the sound index was made anew from all files, and every later put failed."""
    with closing(KVStore.open(root, None)) as store:
        store.put(*samples[0])
        inode = (root / layout.INDEX_NAME).stat().st_ino
        with closing(connect(root / layout.LEDGER_NAME)) as sql, sql:
            rest = ", 0" * (len(sql.execute("SELECT * FROM Uses").description) - 2)
            sql.execute(f"INSERT INTO Uses VALUES (CAST(x'fffe61' AS TEXT), 1{rest})")
        store.budget_bytes = 1400  # the order is read
        for each in samples[1:4]:
            with suppress(StoreError):  # once: "it was damaged and is made anew"
                store.put(*each)
        store.budget_bytes = 1 << 30
        assert store.put(*samples[4]) and store.contains(samples[4][0])
        assert (root / layout.INDEX_NAME).stat().st_ino == inode
