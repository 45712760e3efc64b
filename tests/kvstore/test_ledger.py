"""The ledger, the disk's order of eviction: it must be what a plain dictionary says, whoever opens the store."""

import random

import pytest

from ragblend.kvstore import ledger
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.counters import Counts
from ragblend.kvstore.policy import EVICTION_POLICIES, Entry, clock_after, computed, ranked, used
from ragblend.kvstore.store import KVStore

pytestmark = pytest.mark.usefixtures("quick_disk")  # nothing here is about power cuts


@pytest.fixture
def samples(sample):
    return [sample(seed, tokens=3 + seed % 7) for seed in range(40)]


def cost(cached_tokens, new_tokens):
    return 1.0 / new_tokens


class Memory:
    """The same retrievals and puts over dictionaries, sorted anew for every victim."""

    def __init__(self, name, budget_bytes):
        self.policy, self.budget_bytes = EVICTION_POLICIES[name], budget_bytes
        self.half_life = self.policy.half_life
        self.here, self.gone, self.stored = {}, {}, set()
        self.uses = self.clock = 0.0

    def get(self, digest):
        self.uses += 1.0
        if digest in self.here:
            entry = used(self.here[digest], self.uses, self.half_life)
            self.here[digest] = ranked(entry, self.policy, self.clock)
        elif self.policy.decays:
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
        if self.policy.decays:
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


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_eviction_equals_a_model_in_memory(root, samples, name):
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


@pytest.fixture
def every_save(monkeypatch):
    """The ledger is saved at every change, and not first after some."""
    monkeypatch.setattr(ledger, "SAVED_EVERY", 1)


def test_processes_share_one_eviction_order(root, sample, every_save):
    """What others used counts as much as what one used oneself; two stores stand for two processes."""
    one, size = [sample(seed) for seed in range(8)], Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 3 * size) as first, KVStore.open(root, 3 * size) as second:
        for each in one[:3]:
            first.put(*each)
        for _ in range(4):
            assert second.get(one[0][0], one[0][1].token_ids)
            assert first.get(one[1][0], one[1][1].token_ids)
        first.save_ledger()
        second.put(*one[3])  # evicts 2, which nobody used
        first.put(*one[4])  # and now 3
        assert digests(first) == digests(second) == {one[number][0].digest for number in (0, 1, 4)}
        assert first.stats().evictions == second.stats().evictions == 1


def test_counts_of_several_processes_add_up(root, sample):
    """Both save at their end; each had opened the store before the other saved."""
    samples = [sample(seed) for seed in range(3)]
    with KVStore.open(root, 1 << 20) as store:
        store.put(*samples[0])
        store.put(*samples[2])
    first, second = KVStore.open(root, 1 << 20), KVStore.open(root, 1 << 20)
    for store, times in ((first, 2), (second, 3)):
        for _ in range(times):
            store.get(samples[0][0], samples[0][1].token_ids)
    first.put(*samples[1])
    second.delete([samples[2][0]])
    first.close()
    second.close()
    with KVStore.open(root, 1 << 20) as store:
        assert round(store.request_count(samples[0][0])) == 1 + 2 + 3
        assert digests(store) == {samples[0][0].digest, samples[1][0].digest}
        assert round(store.request_count(samples[1][0])) == 1 and store.request_count(samples[2][0]) == 0
        assert store.totals_by_tier() == {"disk": Counts(hits=5)}


def test_uses_by_another_process_survive_local_changes_of_the_value(root, sample, value_path, every_save):
    """A count that another process saved is not overwritten by what this one did to the value meanwhile."""
    size, samples = Blob.of(*sample(0)).nbytes, [sample(seed) for seed in range(3)]
    (put_again, chunk), (damaged, other), (evicted, third) = samples
    with KVStore.open(root, 9 * size) as store:
        for each in samples:
            store.put(*each)
    with KVStore.open(root, 9 * size) as mine, pytest.MonkeyPatch.context() as unsaved:
        unsaved.setattr(ledger, "SAVED_EVERY", 10**6)
        mine.put(put_again, chunk)
        value_path(damaged).write_bytes(b"damaged")
        assert mine.get(damaged, other.token_ids) is None
        unsaved.undo()
        with KVStore.open(root, 9 * size) as theirs:
            theirs.put(damaged, other)
            for _ in range(20):
                for key, each in ((put_again, chunk), (damaged, other), (evicted, third)):
                    theirs.get(key, each.token_ids)
    with KVStore.open(root, 9 * size) as store:
        assert all(store.request_count(key) > 15 for key, _ in samples)


def test_a_save_does_not_restore_digests_that_another_process_deleted(root, sample, held_anywhere):
    """A put and an eviction that were not saved brought the deleted digest back into the saved ledger."""
    size, gone = Blob.of(*sample(0)).nbytes, sample(0)
    with KVStore.open(root, size) as mine:
        mine.put(*gone)
        mine.put(*sample(1))
        with KVStore.open(root, size) as theirs:
            theirs.delete([gone[0]])
    assert not held_anywhere(gone[0].digest)


def test_the_policy_of_the_last_open_applies_to_all_processes(root, sample, every_save):
    """Two processes of two policies must not rank in turns, each by his own."""
    often, lately, new, size = sample(0), sample(1), sample(2), Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 2 * size, policy="pgdsf") as first:
        first.put(*often)
        for _ in range(5):
            first.get(often[0], often[1].token_ids)
        first.put(*lately)
        with KVStore.open(root, 2 * size, policy="lru"):
            pass
        first.get(lately[0], lately[1].token_ids)
        first.save_ledger()
        first.put(*new)
        assert first.policy == "lru" and digests(first) == {lately[0].digest, new[0].digest}
    with KVStore.open(root, 2 * size, policy="gdsf") as store:
        for _ in range(3):
            store.get(lately[0], lately[1].token_ids)
        store.put(*often)
        assert digests(store) == {lately[0].digest, often[0].digest}


@pytest.mark.parametrize("how", ["delete", "gc", "elsewhere"])
def test_deleting_a_value_deletes_its_counts(root, sample, how, held_anywhere, every_save):
    """Also of one that was evicted before, and that another process has used meanwhile."""
    gone, other, size = sample(0), sample(1), Blob.of(*sample(0)).nbytes
    store = KVStore.open(root, size)
    store.put(*gone)
    assert store.get(gone[0], gone[1].token_ids)
    store.put(*other)
    assert not store.contains(gone[0])
    assert held_anywhere(gone[0].digest)  # its count goes on
    assert store.get(gone[0], gone[1].token_ids) is None  # waits to be saved
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


LEDGERS = {
    "gone": None,
    "empty": b"",
    "no JSON": b"ruin" * 3000,
    "another field": b'{"serial": 1, "colour": 2, "totals": {}}\n',
    "half a row": b'{"serial": 1, "policy": "pgdsf", "uses": 1.0, "clock": 0.0, "totals": {}}\nhalf',
}


@pytest.mark.parametrize("damage", LEDGERS)
@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_damaged_ledger_loses_only_the_eviction_order(root, sample, same, rows, damage, when):
    """The budget is kept, and the newest value is there."""
    size = Blob.of(*sample(0)).nbytes
    store = KVStore.open(root, 4 * size)
    for seed in range(4):
        store.put(*sample(seed))
    if when == "before it is opened":
        store.close()
    if damage == "gone":
        rows("DELETE FROM Cache WHERE key LIKE 'ledger%'")
    else:
        rows("UPDATE Cache SET value = ? WHERE key = 'ledger'", LEDGERS[damage])
    if when == "before it is opened":
        store = KVStore.open(root, 4 * size)
    assert store.stats().entries == 4
    for seed in range(12):
        key, chunk = sample.put(store, seed)
        assert same(store.get(key, chunk.token_ids), chunk)
        assert store.stats().bytes <= 4 * size
    store.close()
    with KVStore.open(root, 4 * size) as store:
        assert store.check() == [] and set(store.totals_by_tier()) == {"disk"}


def test_without_a_ledger_values_are_ranked_in_insertion_order(root, sample, rows):
    size = Blob.of(*sample(0)).nbytes
    with KVStore.open(root, 9 * size) as store:
        for seed in (2, 0, 1):
            store.put(*sample(seed))
    rows("DELETE FROM Cache WHERE key LIKE 'ledger%'")
    with KVStore.open(root, 3 * size) as store:
        store.put(*sample(3))
        assert digests(store) == {sample(seed)[0].digest for seed in (0, 1, 3)}


def in_memory(max_remembered=3):
    return ledger.Ledger({}, EVICTION_POLICIES["pgdsf"], max_remembered=max_remembered)


def digest_of(number):
    return f"{number:064x}"


def test_finding_a_victim_takes_the_same_steps_for_any_number_of_values(monkeypatch):
    """As many steps for a thousand values as for ten."""
    steps = []
    for count in (10, 1000):
        uses = in_memory()
        for number in range(count):
            uses.add(digest_of(number), 1, 1.0)
        popped, pop = [], ledger.heapq.heappop
        monkeypatch.setattr(
            ledger.heapq, "heappop", lambda heap, popped=popped, pop=pop: popped.append(1) or pop(heap)
        )
        assert [entry.digest for entry in uses.victims(1, 9)] == [digest_of(0)]
        monkeypatch.undo()
        steps.append(len(popped))
    assert steps == [1, 1]


def test_memory_does_not_grow_with_the_number_of_uses():
    uses = in_memory()
    uses.add(digest_of(0), 1, 1.0)
    for _ in range(5000):
        uses.used(digest_of(0))
    assert len(uses._heap) < 200


def test_counts_of_evicted_values_are_bounded():
    uses = in_memory()
    for number in range(6):
        uses.add(digest_of(number), 1, 1.0)
    uses.evict(uses.victims(6, 9))
    uses.prepare_save(b"", dict)
    assert set(uses.unstored_request_counts()) == {digest_of(number) for number in (3, 4, 5)}


def test_requests_for_values_never_stored_are_bounded_and_not_saved():
    uses = in_memory()
    for number in (0, 1, 2, 0, 3):
        uses.used(digest_of(number))
    found = {digest_of(2): 1.0, digest_of(0): pytest.approx(2.0, abs=0.01), digest_of(3): 1.0}
    assert uses.unstored_request_counts() == found
    packed, mark_saved = uses.prepare_save(b"", dict)
    mark_saved()
    assert uses.unstored_request_counts() == found
    again = in_memory()
    again.load(packed, {})
    assert again.unstored_request_counts() == {}


def test_counts_that_could_not_be_saved_are_saved_later(root, sample, rows, every_save):
    key, chunk = sample(0)
    with KVStore.open(root, 1 << 20) as store:
        store.put(key, chunk)
        for change in ("INSERT", "UPDATE"):
            refusal = f"BEFORE {change} ON Cache WHEN NEW.key = 'ledger' BEGIN SELECT RAISE(ABORT, 'no'); END"
            rows(f"CREATE TRIGGER no_{change} {refusal}")
        store.get(key, chunk.token_ids)
        store.save_ledger()
        for change in ("INSERT", "UPDATE"):
            rows(f"DROP TRIGGER no_{change}")
        store.get(key, chunk.token_ids)
    with KVStore.open(root, 1 << 20) as store:
        assert store.totals_by_tier() == {"disk": Counts(hits=2)}
        assert round(store.request_count(key)) == 3


def test_totals_include_all_processes(root, sample):
    size, (key, chunk) = Blob.of(*sample(0)).nbytes, sample(0)
    for _ in range(3):
        with KVStore.open(root, size) as store:
            store.get(key, chunk.token_ids)
            store.put(key, chunk)
            store.get(key, chunk.token_ids)
            assert store.stats().hits in (1, 2)
    with KVStore.open(root, size) as store:
        assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=1)}
        with KVStore.open(root, size) as other:
            other.put(*sample(1))
            assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=1)}  # not saved yet
            assert other.totals_by_tier() == {"disk": Counts(hits=5, misses=1, evictions=1)}
        assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=1, evictions=1)}
        store.get(key, chunk.token_ids)
        assert store.totals_by_tier() == {"disk": Counts(hits=5, misses=2, evictions=1)}
