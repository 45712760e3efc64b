"""Regression tests: each names a bug that the fault suite found."""

import contextlib
import errno
import os
import sqlite3
from pathlib import Path

import pytest
from doubles import raising
from fault_values import VALUE_BYTES, key_of, put, version_read

from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.store import KVStore

BUDGET = 1 << 20


@pytest.fixture
def three(root):
    """A closed store of three values."""
    with KVStore.open(root, BUDGET) as store:
        for number in range(3):
            put(store, number)
    return root


def served(store, *numbers):
    """Every value is there, bit for bit."""
    return all(version_read(store, number, {0}) == 0 for number in numbers or range(3))


def test_a_schema_with_invalid_text_is_a_damaged_index(three):
    """SQLite quotes the damaged name in its message; decoding that raised UnicodeDecodeError out of open()."""
    path = three / "index/cache.db"
    damaged = path.read_bytes().replace(b"ON Cache(key, raw)", b"ON Cache(k\xd4y, raw)")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with KVStore.open(three, BUDGET) as store:
        assert store.stats().quarantined == 1 and served(store)


def test_an_index_that_cannot_be_opened_is_a_named_error(three, monkeypatch):
    """sqlite3.connect stood outside the try: a full disk gave sqlite3.OperationalError."""
    error = sqlite3.OperationalError("unable to open database file")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", raising(error))
        with pytest.raises(StoreError, match=r"cache\.db"):
            KVStore.open(three, BUDGET)


def test_a_store_created_concurrently_is_opened(root, monkeypatch):
    """FORMAT was not there yet, the rest was by the time the folder was listed: StoreFormatError at first open."""
    real, begun = Path.iterdir, []

    def iterdir(path):
        if path == root and not begun:
            begun.append(True)
            KVStore.open(root, BUDGET).close()
        return real(path)

    root.mkdir(0o700, parents=True)
    monkeypatch.setattr(Path, "iterdir", iterdir)
    KVStore.open(root, BUDGET).close()
    assert begun


def test_a_failing_fsync_is_a_named_error(root, monkeypatch):
    """delete() and gc() let the OSError of the folder's fsync out."""
    with KVStore.open(root, BUDGET) as store:
        put(store, 1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", raising(OSError(errno.EIO, "Input/output error")))
            for change in (lambda: store.delete([key_of(1)]), lambda: store.gc([])):
                with pytest.raises(StoreError, match="Input/output error"):
                    change()
        store.delete([key_of(1)])
        assert store.check() == []


def test_killed_puts_do_not_exceed_the_budget(root, monkeypatch):
    """Each put that was killed between storing and evicting left one value more, for the next to add to."""
    budget, held = 3 * VALUE_BYTES, []
    monkeypatch.setattr("ragblend.kvstore.ledger.Ledger.victims", raising(KeyboardInterrupt()))
    for number in range(6):
        with KVStore.open(root, budget) as store, contextlib.suppress(KeyboardInterrupt):
            put(store, number)
        held.append(sum(path.stat().st_size for path in (root / "values").glob("*/*")))
    assert max(held) <= budget + VALUE_BYTES


def test_a_store_that_was_moved_while_open(root, tmp_path):
    """A put went to the old place with its row in the new one; each read took a row out of the moved index."""
    with KVStore.open(root, BUDGET) as store:
        put(store, 1)
        root.rename(tmp_path / "moved")
        with pytest.raises(StoreError, match="was moved or removed"):
            put(store, 2)
        assert version_read(store, 1, {None}) is None
        assert store.stats().quarantined == 0
        assert not root.exists()
    with KVStore.open(tmp_path / "moved", BUDGET) as store:
        assert version_read(store, 1, {0}) == 0


def test_a_damaged_index_that_another_process_set_aside(three):
    """Its former user went on writing to it, and swept the files that only the new index knew; later it could change
    nothing until it was restarted.
    """
    with KVStore.open(three, BUDGET) as first:
        data = (three / "index/cache.db").read_bytes()
        (three / "index/cache.db").write_bytes(data.replace(b"CREATE TABLE Cache", b"CREATE TABLE Cachf"))
        with KVStore.open(three, BUDGET) as second:
            assert second.stats().quarantined == 1
            put(second, 7)
            assert first.gc().files == 0
            put(first, 8)
            first.delete([key_of(2)])
            assert served(first, 0, 1, 7, 8) and served(second, 0, 1, 7, 8) and first.check() == []


def test_a_value_that_cannot_be_opened_now_is_not_deleted(three, monkeypatch):
    """While values are entered into a new index, too many open files made them leftovers, which are removed."""
    (three / "index/cache.db").write_bytes(b"ruin" * 2000)
    real = os.open

    def refuse(path, *more):
        if str(path).endswith(".kv"):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(StoreError, match="Too many open files"):
            KVStore.open(three, BUDGET)
    with KVStore.open(three, BUDGET) as store:
        assert served(store)


def test_one_disk_error_while_rebuilding_the_index_loses_no_value(three, monkeypatch):
    """The value whose header could not be read was not entered, and what is not entered was swept away."""
    (three / "index/cache.db").write_bytes(b"ruin" * 2000)
    real, failures = os.preadv, iter([True])

    def preadv(descriptor, *arguments):
        if "/values/" in os.readlink(f"/proc/self/fd/{descriptor}") and next(failures, False):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        store = KVStore.open(three, BUDGET)
    assert next(failures, None) is None
    with store:
        assert served(store)


def test_a_disk_error_while_closing_the_lock_is_a_named_error(three, monkeypatch):
    """Closing the lock's file failed too, while the first failure was on its way out: a bare OSError."""

    def refuse(*arguments):
        failing.append(True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    failing, closed, real, read_bytes, sound = [], [], os.close, Path.read_bytes, iter([True])

    def close(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        real(descriptor)
        if failing and name.endswith(".lock"):
            closed.append(descriptor)
            refuse()

    with monkeypatch.context() as patch:  # the first look at FORMAT comes before there is a lock
        patch.setattr(Path, "read_bytes", lambda path: read_bytes(path) if next(sound, False) else refuse())
        patch.setattr("ragblend.kvstore.lock.os.close", close)
        with pytest.raises(StoreError, match="failed"):
            KVStore.open(three, BUDGET)
    assert closed
