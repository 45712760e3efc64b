"""A full or broken disk: a named error, no temporary file, and everything else as it was."""

import errno
import os
import sqlite3

import pytest
from doubles import raising

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreError, StoreFullError, StoreLockedError
from ragblend.kvstore.store import KVStore

FULL, BROKEN = errno.ENOSPC, errno.EIO
FAULTS = [
    ("posix_fallocate", 1, FULL), ("write", 1, FULL), ("write", 4, BROKEN), ("fsync", 1, BROKEN), ("fsync", 2, FULL),
    ("replace", 1, FULL), ("open", 1, BROKEN),
]  # fmt: skip


def failing(real, at, code):
    """`real`, until its `at`-th call; that one and all later ones raise."""
    calls = 0

    def call(*args, **more):
        nonlocal calls
        calls += 1
        if calls >= at:
            raise OSError(code, os.strerror(code))
        return real(*args, **more)

    return call


@pytest.mark.parametrize(("name", "at", "code"), FAULTS)
def test_a_failed_put_changes_nothing(open_store, sample, same, root, name, at, code):
    old = [sample(seed) for seed in range(2)]
    store = open_store(budget_bytes=2 * Blob.of(*old[0]).nbytes)  # a third would evict
    for each in old:
        store.put(*each)
    key, chunk = sample(5)
    (root / "values" / key.digest[:2]).mkdir(0o700, exist_ok=True)
    before = sorted(path for path in root.rglob("*") if path.is_file())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), at, code))
        with pytest.raises(StoreFullError, match=os.strerror(code)) as caught:
            store.put(key, chunk)
    assert str(root / "values") in str(caught.value)
    assert "Free some disk space" in str(caught.value) or "check it" in str(caught.value)
    assert sorted(path for path in root.rglob("*") if path.is_file()) == before
    assert [store.contains(each[0]) for each in (*old, (key,))] == [True, True, False]
    assert store.stats().evictions == 0
    assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in old)
    assert store.check() == []
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)
    assert store.stats().evictions == 1


def test_a_file_system_without_preallocation_works(store, sample, same, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(os.posix_fallocate, 1, errno.EOPNOTSUPP))
    key, chunk = sample.put(store, 1)
    assert same(store.get(key, chunk.token_ids), chunk)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (sqlite3.SQLITE_FULL, StoreFullError),
        (sqlite3.SQLITE_IOERR, StoreError),
        (sqlite3.SQLITE_BUSY, StoreLockedError),
    ],
)
@pytest.mark.parametrize("step", ["index.Index.set", "index.Index.delete"])
def test_a_value_whose_row_cannot_be_written_leaves_no_file(store, sample, same, root, code, kind, step):
    old, new, size = sample(1), sample(2), Blob.of(*sample(1)).nbytes
    store.put(*old)
    store.budget_bytes = size

    def broken(*args, **more):
        error = sqlite3.OperationalError("disk trouble")
        error.sqlite_errorcode = code
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"ragblend.kvstore.{step}", broken)
        with pytest.raises(kind, match=r"cache\.db"):
            store.put(*new)
    assert len(list(root.glob("values/*/*"))) == 1
    assert store.check() == []
    store.budget_bytes = 2 * size
    store.put(*new)
    assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in (old, new))


class FailingCommit(sqlite3.Connection):
    """A connection with no room for one commit to the file that `full` names; SQLite itself rolls back then."""

    full = ""

    def execute(self, statement, *args):
        if statement == "COMMIT" and self.path.endswith(FailingCommit.full or "/"):
            FailingCommit.full = ""
            super().execute("ROLLBACK")
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return super().execute(statement, *args)


def test_a_failed_commit_keeps_budget_and_eviction_order(sample, same, root, monkeypatch):
    real = sqlite3.connect

    def connect(path, *args, **more):
        sql = real(path, *args, factory=FailingCommit, **more)
        sql.path = str(path)
        return sql

    monkeypatch.setattr(sqlite3, "connect", connect)
    samples = [sample(seed) for seed in range(4)]
    store = KVStore.open(root, 2 * Blob.of(*samples[0]).nbytes, policy="lru")
    for each in samples[:2]:
        store.put(*each)
    FailingCommit.full = "cache.db"
    with pytest.raises(StoreFullError, match="disk is full"):
        store.put(*samples[2])
    assert not FailingCommit.full
    assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in samples[:2])
    assert len(list(root.glob("values/*/*.kv"))) == 2
    for number in (2, 3):
        store.put(*samples[number])
        assert {*store.keys()} == {samples[each][0] for each in (number - 1, number)}
    assert store.stats().bytes == store.budget_bytes and store.check() == []
    store.close()


def test_a_store_on_a_full_disk_can_be_read(open_store, sample, same, monkeypatch):
    """Opening the index wrote to it, so a question failed whose passages were all stored."""
    key, chunk = sample(1)
    with open_store() as store:
        store.put(key, chunk)

    def full(*args, **more):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr("ragblend.kvstore.index.Cache", full)
    with open_store() as store:
        assert same(store.get(key, chunk.token_ids), chunk)
        with pytest.raises(StoreFullError):
            store.put(*sample(2))
        assert same(store.get(key, chunk.token_ids), chunk)


def test_values_can_be_deleted_on_a_full_disk(store, sample, monkeypatch):
    store.put(*sample(1))
    monkeypatch.setattr(os, "pwrite", failing(os.pwrite, 1, errno.ENOSPC))
    assert store.delete([sample(1)[0]]) > 0


def test_an_interrupted_put_leaves_no_file(store, sample, root, monkeypatch):
    interrupted = raising(KeyboardInterrupt)
    with monkeypatch.context() as patch:
        patch.setattr("ragblend.kvstore.index.Index.set", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put(*sample(1))
    assert list(root.glob("values/*/*")) == []
    store.put(*sample(1))
    assert store.check() == []


def test_a_locked_index_is_reported(open_store, sample, root, monkeypatch):
    monkeypatch.setattr("ragblend.kvstore.upkeep.TIMEOUT_S", 0.05)
    store = open_store()
    other = sqlite3.connect(root / "index/cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        with pytest.raises(StoreLockedError, match=r"cache\.db"):
            store.put(*sample(1))
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert list(root.glob("values/*/*")) == []
    store.put(*sample(1))
