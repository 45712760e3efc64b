"""Damaged, swapped and planted things: a counted miss, never a wrong KV, never code run, never a bare exception."""

import errno
import os
import pickle
import socket
import sqlite3
from dataclasses import replace

import pytest

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import CorruptBlobError, StoreError, UsageError
from ragblend.kvstore.index import FOREIGN, FileNames, Index
from ragblend.kvstore.memory import MemoryTier, whole
from ragblend.kvstore.store import KVStore


class Canary:
    """Unpickling this makes a folder: the proof that foreign bytes were run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant(root, **columns):
    """A row that this store did not write."""
    sql = sqlite3.connect(root / "cache.db", isolation_level=None)
    names = ", ".join(columns)
    marks = ", ".join("?" for _ in columns)
    sql.execute(f"INSERT OR REPLACE INTO Cache ({names}) VALUES ({marks})", tuple(columns.values()))
    sql.close()


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "a planted pickle was run"


def test_the_canary_sings(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("planted_while_open", [True, False])
def test_a_planted_pickle_is_quarantined_and_never_run(
    open_store, sample, same, root, canary, planted_while_open
):
    key, chunk = sample(1)
    evil = pickle.dumps(Canary(canary))
    store = open_store()
    if not planted_while_open:
        store.close()
    plant(root, key=key.digest, raw=1, mode=4, size=0, value=evil)
    if not planted_while_open:
        store = open_store()
    assert store.get(key, chunk.token_ids) is None
    assert store.open_chunk(key, chunk.token_ids) is None
    stats = store.stats()
    assert (stats.quarantined, stats.misses, stats.entries) == (1, 2, 0)
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)


def test_a_pickled_key_and_a_pickled_file_are_not_run_either(store, sample, root, canary, value_path, rows):
    evil = pickle.dumps(Canary(canary))
    key, chunk = sample(1)
    store.put(key, chunk)
    path = value_path(key)
    path.write_bytes(evil)
    rows("UPDATE Cache SET mode = 4, size = ?", len(evil))
    plant(root, key=evil, raw=0, mode=4, size=0, value=evil)
    assert list(store.keys()) == [key]
    assert {problem.kind for problem in store.check()} == {"foreign-row", "orphan-file"}
    assert store.get(key, chunk.token_ids) is None
    assert (root / "quarantine" / path.name).read_bytes() == evil
    assert len(store.repair()) == 1
    assert store.check() == []


def test_the_disk_refuses_whatever_is_not_ours(root, canary):
    """What diskcache would unpickle, or write as a pickle."""
    root.mkdir(parents=True)
    disk, evil = FileNames(str(root)), pickle.dumps(Canary(canary))
    for mode in (0, 1, 3, 4, None):
        with pytest.raises(CorruptBlobError):
            disk.fetch(mode, None, evil, False)
    assert disk.get(evil, 0) == disk.get(evil, 1) == disk.get("k", 1) == FOREIGN
    for call in (lambda: disk.put(1), lambda: disk.put(b"k"), lambda: disk.store(b"v", False, key="k")):
        with pytest.raises(UsageError):
            call()


def test_a_row_may_not_point_out_of_the_store(open_store, sample, tmp_path, root):
    """diskcache opens and unlinks whatever its filename column says."""
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    key, chunk = sample(1)
    store = open_store()
    names = ["../../thesis.txt", str(thesis), f"values/{key.digest[:2]}/../../../../thesis.txt"]
    for name in names:
        plant(root, key=key.digest, raw=1, mode=2, size=4, filename=name)
        assert store.get(key, chunk.token_ids) is None
        plant(root, key=key.digest, raw=1, mode=2, size=4, filename=name)
        store.put(key, chunk)
        plant(root, key=key.digest, raw=1, mode=2, size=4, filename=name)
        store.delete([key])
        plant(root, key=key.digest, raw=1, mode=2, size=4, filename=name)
        store.repair()
        store.gc(keep=[])
        assert thesis.read_text() == "mine"


def test_a_link_in_a_values_place_is_not_followed(store, sample, value_path, tmp_path):
    key, chunk = sample(1)
    store.put(key, chunk)
    path = value_path(key)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined == 1


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as bound:  # a name of 108 characters at most
        here = os.open(path.parent, os.O_DIRECTORY)
        bound.bind(f"/proc/self/fd/{here}/s")
        os.close(here)
    (path.parent / "s").rename(path)


IN_ITS_PLACE = {
    "fifo": os.mkfifo,
    "folder": lambda path: (path / "sub").mkdir(parents=True),
    "socket": make_socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_what_is_no_file_in_a_values_place_is_damage(open_store, sample, same, value_path, kind):
    """A FIFO waited for somebody to write into it, for ever; a folder could not be cleared away."""
    store, (key, chunk) = open_store(), sample(1)
    for look in (
        lambda: store.get(key, chunk.token_ids),
        lambda: store.will_need(key),
        lambda: store.promote(key, chunk.token_ids),
        store.check,
        store.repair,
        lambda: open_store().check(),
    ):
        store.put(key, chunk)
        path = value_path(key)
        path.unlink()
        IN_ITS_PLACE[kind](path)
        look()
        assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined >= 3
    store.gc()
    assert store.check() == [] and not list((store.root / "quarantine").iterdir())
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_linked_quarantine_loses_nobodys_files(open_store, sample, root, tmp_path, value_path, when):
    elsewhere = tmp_path / "photographs"
    elsewhere.mkdir(mode=0o755)
    key, chunk = sample(1)
    theirs = [elsewhere / f"{number}.jpg" for number in range(9)] + [elsewhere / f"{key.digest}-0.kv"]
    for path in theirs:
        path.write_text("mine")
    store = open_store()
    store.put(key, chunk)
    if when == "before it is opened":
        store.close()
    (root / "quarantine").rmdir()
    (root / "quarantine").symlink_to(elsewhere)
    if when == "before it is opened":
        store = open_store()
    value_path(key).write_bytes(b"damaged")
    assert store.get(key, chunk.token_ids) is None
    store.delete([key])
    store.gc()
    assert sorted(elsewhere.iterdir()) == sorted(theirs)
    assert elsewhere.stat().st_mode & 0o777 == 0o755
    assert not (root / "quarantine").is_symlink()


OTHERS = {
    "layers": {"layers": 2},
    "heads": {"kv_heads": 1},
    "key size": {"key_size": 8},
    "value size": {"value_size": 4},
    "dtype": {"dtype": "float16"},
    "start": {},
}


@pytest.mark.parametrize("other", OTHERS)
def test_kv_of_another_geometry_or_start_is_damage(open_store, root, sample, same, other):
    """All its checksums are right: they are of what was written."""
    key, chunk = sample(1)
    if other == "start":
        wrong = replace(chunk, start=chunk.start + 3)
    else:
        _, made = sample(1, geometry=replace(chunk.geometry, **OTHERS[other]))
        wrong = replace(made, token_ids=chunk.token_ids)
    memory = MemoryTier("memory", 1 << 20)
    with KVStore.open(root, 1 << 20, [memory]) as store:
        looks = (store.open_chunk, store.promote)
        for count, look in enumerate(looks, 1):
            store.put(key, wrong)
            assert look(key, chunk.token_ids, chunk.geometry, chunk.start) is None
            assert store.stats().quarantined == count
            assert not store.contains(key) and not memory.keys()
        store.put(key, chunk)
        with store.open_chunk(key, chunk.token_ids, chunk.geometry, chunk.start) as reader:
            assert same(whole(reader), chunk)


def test_a_row_may_not_take_another_keys_file_along(store, sample, same, root, value_path):
    good, bad = sample(1), sample(2)
    store.put(*good)
    name = os.path.relpath(value_path(good[0]), root)
    plant(root, key=bad[0].digest, raw=1, mode=2, size=9, filename=name)
    assert store.get(bad[0], bad[1].token_ids) is None
    assert same(store.get(good[0], good[1].token_ids), good[1])


def test_too_many_open_files_are_a_miss_but_not_the_values_fault(store, sample, same, monkeypatch):
    key, chunk = sample(1)
    store.put(key, chunk)

    def refused(*args, **more):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined == 0
    assert same(store.get(key, chunk.token_ids), chunk)


def test_the_quarantine_keeps_only_the_newest_few(store, sample, root, value_path):
    key, chunk = sample(1)
    for _ in range(9):
        store.put(key, chunk)
        os.truncate(value_path(key), 10)
        assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined == 9
    assert len(list((root / "quarantine").iterdir())) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"not a database" * 1000),
        lambda path: os.truncate(path, 5000),
        lambda path: os.truncate(path, 100),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + bytes(8192)),
        lambda path: run_sql(path, "INSERT INTO Settings VALUES ('sqlite_x; DROP TABLE Cache', 1)"),
        lambda path: run_sql(path, "ALTER TABLE Cache RENAME COLUMN size TO sizes"),
        lambda path: run_sql(path, "DROP TABLE Cache"),
        lambda path: run_sql(path, "CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END"),
    ],
)
def test_a_ruined_index_is_made_anew_and_the_values_come_back(open_store, sample, same, root, damage, caplog):
    samples = [sample(seed) for seed in range(3)]
    store = open_store()
    for each in samples:
        store.put(*each)
    store.close()
    damage(root / "cache.db")
    store = open_store()
    assert "made anew" in caplog.text
    assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in samples)
    assert store.check() == []
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def run_sql(path, statement):
    sql = sqlite3.connect(path, isolation_level=None)
    sql.execute("PRAGMA writable_schema = ON")
    sql.execute(statement)
    sql.close()


def test_values_that_are_damaged_are_not_adopted(open_store, sample, root, value_path):
    good, cut = sample(1), sample(2)
    store = open_store()
    store.put(*good)
    store.put(*cut)
    store.close()
    os.truncate(value_path(cut[0]), 50)
    (root / "cache.db").write_bytes(b"ruin")
    store = open_store()
    assert list(store.keys()) == [good[0]]
    assert store.check() == []


def test_opening_sweeps_what_a_killed_put_left_and_rows_that_cannot_be(open_store, sample, root, value_path):
    samples = [sample(seed) for seed in range(3)]
    store = open_store()
    for each in samples:
        store.put(*each)
    store.close()
    path = value_path(samples[0][0])
    path.with_suffix(".tmp").write_bytes(b"half")
    path.with_name(f"{samples[0][0].digest}-{'a' * 16}.kv").write_bytes(path.read_bytes())
    os.truncate(value_path(samples[1][0]), 70)
    value_path(samples[2][0]).unlink()
    store = open_store()
    assert store.stats().quarantined == 2
    assert list(store.keys()) == [samples[0][0]]
    assert store.check() == []
    assert len(list(root.glob("values/*/*"))) == 1


def test_a_value_that_the_ledger_takes_for_another_size_is_kept_and_counted(open_store, sample, same, uses):
    """A process was killed when the index had a new value of the key, and the ledger did not."""
    key, chunk = sample(1)
    store = open_store()
    store.put(key, chunk)
    store.close()
    uses("UPDATE Uses SET bytes = bytes - 100 WHERE digest = ?", key.digest)
    store = open_store()
    assert store.stats().quarantined == 0
    assert same(store.get(key, chunk.token_ids), chunk)
    assert uses("SELECT bytes FROM Uses") == [(Blob.of(key, chunk).nbytes,)]
    assert store.stats().bytes == Blob.of(key, chunk).nbytes


def test_an_index_with_a_row_that_is_not_text_is_made_anew(open_store, sample, same, root, rows):
    key, chunk = sample(1)
    store = open_store()
    store.put(key, chunk)
    rows("UPDATE Cache SET filename = CAST(x'FF766160' AS TEXT)")
    assert [problem.kind for problem in store.check()] == ["foreign-row", "orphan-file"]
    store.close()
    store = open_store()
    assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined == 1
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)
    assert store.check() == []


def test_an_absurd_size_in_a_row_does_not_empty_the_store(open_store, sample, rows):
    """One flipped bit in `size` must not make every value look like too much."""
    samples = [sample(seed) for seed in range(3)]
    store = open_store(1 << 20)
    for each in samples:
        store.put(*each)
    rows("UPDATE Cache SET size = size + (1 << 40) WHERE key = ?", samples[0][0].digest)
    store.close()
    size = Blob.of(*samples[0]).nbytes
    store = open_store(3 * size)
    for each in samples:
        store.put(*each)
    assert store.stats().entries == 3
    assert store.stats().evictions == 0
    store.put(*sample(3))
    assert (store.stats().entries, store.stats().bytes) == (3, 3 * size)


def test_an_index_that_cannot_be_read_through_is_closed(root, monkeypatch):
    closed = []

    def unreadable(self):
        raise StoreError("the disk is busy")

    KVStore.open(root, 1 << 20).close()
    monkeypatch.setattr(Index, "digests", unreadable)
    monkeypatch.setattr(Index, "close", lambda self: closed.append(self))
    with pytest.raises(StoreError, match="busy"):
        KVStore.open(root, 1 << 20)
    assert len(closed) == 1
