"""A full or broken disk: a named error, no temporary file, and everything else as it was."""

import errno
import itertools
import os
import sqlite3
from functools import partial

import pytest
from doubles import raising

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreError, StoreFullError, StoreLockedError
from ragblend.kvstore.store import KVStore


def os_fails(name, at, code):
    """breaks(patch): os's function of that name fails at its `at`-th call, and from then on."""

    def breaks(patch):
        real, calls = getattr(os, name), itertools.count(1)

        def call(*args, **more):
            if next(calls) >= at:
                raise OSError(code, os.strerror(code))
            return real(*args, **more)

        patch.setattr(os, name, call)

    return breaks


def sqlite_error(code):
    error = sqlite3.OperationalError("disk trouble")
    error.sqlite_errorcode = code
    return error


def index_fails(step, code):
    return lambda patch: patch.setattr(f"ragblend.kvstore.index.Index.{step}", raising(sqlite_error(code)))


class FailingCommit(sqlite3.Connection):
    """A connection with no room for a commit; SQLite itself rolls back then."""

    fails = False

    def execute(self, statement, *args):
        if statement == "COMMIT" and FailingCommit.fails:
            super().execute("ROLLBACK")
            raise sqlite_error(sqlite3.SQLITE_FULL)
        return super().execute(statement, *args)


def commit_fails(patch):
    patch.setattr(FailingCommit, "fails", True)


FULL_CALLS = [("posix_fallocate", 1), ("write", 1), ("fsync", 2), ("replace", 1)]
BROKEN_CALLS = [("write", 4), ("fsync", 1), ("open", 1)]
SQLITE = {
    sqlite3.SQLITE_FULL: StoreFullError,
    sqlite3.SQLITE_IOERR: StoreError,
    sqlite3.SQLITE_BUSY: StoreLockedError,
}
NO_ROOM, BROKEN = errno.ENOSPC, errno.EIO
FAULTS = [
    *((os_fails(*call, NO_ROOM), StoreFullError, os.strerror(NO_ROOM)) for call in FULL_CALLS),
    *((os_fails(*call, BROKEN), StoreFullError, os.strerror(BROKEN)) for call in BROKEN_CALLS),
    *((index_fails("set", code), error, r"cache\.db") for code, error in SQLITE.items()),
    *((index_fails("delete", code), error, r"cache\.db") for code, error in SQLITE.items()),
    (commit_fails, StoreFullError, "disk is full"),
]


@pytest.mark.parametrize(("breaks", "error", "said"), FAULTS)
def test_a_failed_put_changes_nothing(root, sample, same, monkeypatch, breaks, error, said):
    """Neither the budget, nor the order of eviction; and the next put works."""
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", partial(connect, factory=FailingCommit))
    with KVStore.open(root, 2 * Blob.of(*sample(0)).nbytes, policy="lru") as store:  # a third would evict
        old, (key, chunk), later = sample.put_many(store, 2), sample(5), sample(6)
        (root / "values" / key.digest[:2]).mkdir(0o700, exist_ok=True)
        before = sorted(path for path in root.rglob("*") if path.is_file())
        with pytest.MonkeyPatch.context() as patch:
            breaks(patch)
            with pytest.raises(error, match=said) as caught:
                store.put(key, chunk)
        if error is StoreFullError:
            assert str(root) in str(caught.value)
            assert "Free some" in str(caught.value) or "check it" in str(caught.value)
        assert sorted(path for path in root.rglob("*") if path.is_file()) == before
        assert [*store.keys()] == [each for each, _ in old] and store.stats().evictions == 0
        assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in old)
        assert store.check() == []
        for evictions, (new, kept) in enumerate((((key, chunk), old[1]), (later, (key, chunk))), 1):
            store.put(*new)
            assert {*store.keys()} == {new[0], kept[0]} and store.stats().evictions == evictions
        assert same(store.get(later[0], later[1].token_ids), later[1])
        assert store.stats().bytes == store.budget_bytes and store.check() == []


def test_a_file_system_without_preallocation_works(store, sample, same, monkeypatch):
    os_fails("posix_fallocate", 1, errno.EOPNOTSUPP)(monkeypatch)
    key, chunk = sample.put(store, 1)
    assert same(store.get(key, chunk.token_ids), chunk)


def test_a_store_on_a_full_disk_can_be_read(open_store, sample, same, monkeypatch):
    """Opening the index wrote to it, so a question failed whose passages were all stored."""
    key, chunk = sample(1)
    with open_store() as store:
        store.put(key, chunk)
    monkeypatch.setattr("ragblend.kvstore.index.Cache", raising(sqlite_error(sqlite3.SQLITE_FULL)))
    with open_store() as store:
        assert same(store.get(key, chunk.token_ids), chunk)
        with pytest.raises(StoreFullError):
            store.put(*sample(2))
        assert same(store.get(key, chunk.token_ids), chunk)


def test_values_can_be_deleted_on_a_full_disk(store, sample, monkeypatch):
    store.put(*sample(1))
    os_fails("pwrite", 1, NO_ROOM)(monkeypatch)
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
    monkeypatch.setattr("ragblend.kvstore.upkeep.LOCK_TIMEOUT_S", 0.05)
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
