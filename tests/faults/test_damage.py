"""A damaged index, library, and swapped files: counted misses, or the right value; never a wrong one."""

import random
import shutil
from collections import Counter

import pytest
from fault_library import make_library, verdict_on
from fault_values import demand, flip, key_of, put, version_read

from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.store import KVStore

BUDGET = 1 << 30
pytestmark = [pytest.mark.timeout(1800), pytest.mark.usefixtures("quick_disk")]


def path_of(root, number):
    digest = key_of(number).digest
    (path,) = (root / "values" / digest[:2]).glob(f"{digest}-*.kv")
    return path


class Snapshot:
    """A store of some values as it lies on the disk, index and log, to be damaged again and again."""

    NUMBERS = range(4)

    def __init__(self, folder):
        self.kept, self.root = folder / "kept", folder / "kv"
        with KVStore.open(folder / "made", BUDGET) as store:
            for number in self.NUMBERS:
                put(store, number)
            store.delete([key_of(9)])  # empties the log
            for number in self.NUMBERS[2:]:
                put(store, number, 1)
            shutil.copytree(
                folder / "made", self.kept
            )  # while it is open: the last puts are in the log alone
        self.permitted = {number: {None, int(number >= 2)} for number in self.NUMBERS}

    def restore(self):
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self.kept, self.root)

    def live(self, damage):
        """Damage it, read, write and look after it; how many values were still served."""
        self.restore()
        damage(self.root)
        try:
            store = KVStore.open(self.root, BUDGET)
        except StoreError:
            return 0
        with store:
            return self._use(store)

    def _use(self, store):
        served = [version_read(store, number, self.permitted[number]) for number in self.NUMBERS]
        stats = store.stats()
        demand(stats.misses == served.count(None), "misses that are not counted:", stats, served)
        for number in self.NUMBERS:
            put(store, number, 2)
            version_read(store, number, {2})
        store.repair()
        problems = store.check()
        demand(problems == [], "check() after repair:", problems)
        return len(served) - served.count(None)


@pytest.mark.parametrize("name", ["index/cache.db", "index/cache.db-wal"])
def test_flipped_bits_of_the_index(tmp_path, count, name):
    """At worst the index is rebuilt from the values, or the ledger begins again."""
    snapshot, seeded = Snapshot(tmp_path), random.Random(name)
    size, flips = (snapshot.kept / name).stat().st_size, count(1500, 25)

    def damage(root):
        flip(root / name, seeded.randrange(size), seeded.randrange(8))

    served = sum(snapshot.live(damage) for _ in range(flips))
    print(name, served, "of", 4 * flips)
    assert served > 2 * flips


def test_flipped_bits_under_an_open_store(tmp_path, count):
    """The index is damaged while it is in use: misses and named errors at most, and reopening heals it."""
    snapshot, seeded = Snapshot(tmp_path), random.Random(5)
    for _ in range(count(300, 20)):
        snapshot.restore()
        with KVStore.open(snapshot.root, BUDGET) as store:
            name = seeded.choice(["index/cache.db", "index/cache.db-wal"])
            size = (snapshot.root / name).stat().st_size
            if size:
                flip(snapshot.root / name, seeded.randrange(size), seeded.randrange(8))
            for number in snapshot.NUMBERS:
                version_read(store, number, snapshot.permitted[number])
            for number in snapshot.NUMBERS:
                try:
                    put(store, number, 2)
                except StoreError:
                    continue
        with KVStore.open(snapshot.root, BUDGET) as store:
            for number in snapshot.NUMBERS:
                version_read(store, number, snapshot.permitted[number] | {2})
            store.repair()
            assert store.check() == []


def swap(a, b):
    third = a.with_name("third")
    a.rename(third)
    b.rename(a)
    third.rename(b)


def contents_swapped(a, b):
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)


def moved(a, b):
    a.rename(b.with_name(a.name))


SWAPS = [
    swap,
    contents_swapped,
    moved,
    lambda a, b: shutil.copyfile(a, b),
    lambda a, b: a.replace(b),
    lambda a, b: a.rename(a.with_name("f" * 64 + "-" + "0" * 16 + ".kv")),
    lambda a, b: a.rename(a.with_suffix(".tmp")),
    lambda a, b: a.rename(a.with_name(a.name.replace("-", "-0", 1)[:-4] + ".kv")),
    lambda a, b: a.unlink() or a.hardlink_to(b),
    lambda a, b: a.unlink() or a.symlink_to(b),
    lambda a, b: a.unlink() or a.mkdir(),
]


def remove_foreign(root, store):
    for problem in store.check():
        path = root / problem.path
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@pytest.mark.parametrize("reopened", [False, True])
def test_swapped_and_renamed_values(root, count, reopened):
    seeded, numbers, lost = random.Random(reopened), range(6), 0
    store = KVStore.open(root, BUDGET)
    for round_ in range(count(250, 22)):
        for number in numbers:
            put(store, number, round_)
        first, second = seeded.sample(numbers, 2)
        paths = path_of(root, first), path_of(root, second)
        if reopened:
            store.close()
        SWAPS[round_ % len(SWAPS)](*paths)
        if reopened:
            store = KVStore.open(root, BUDGET)
        before = store.stats().misses
        for number in numbers:
            permitted = {round_, None} if number in (first, second) else {round_}
            lost += version_read(store, number, permitted) is None
        demand(store.stats().misses - before <= 2, store.stats())
        store.repair()
        kinds = {problem.kind for problem in store.check()}
        demand(kinds <= {"foreign-file"}, "after repair:", kinds)
        remove_foreign(root, store)
    store.close()
    assert lost >= count(250, 22)


def test_of_a_damaged_library_what_is_readable_is_kept_and_the_rest_is_named(tmp_path, count):
    sound = tmp_path / "library.sqlite"
    truth = make_library(sound)
    assert len(truth) == 72
    verdicts = Counter(
        verdict_on(sound, tmp_path / "spoilt.sqlite", truth, seed) for seed in range(count(400, 25))
    )
    print(dict(verdicts))
    assert set(verdicts) <= {"harmless", "rescued", "refused"}
    assert verdicts["rescued"] > verdicts.total() / 2
