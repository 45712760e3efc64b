"""Several processes and threads on one store, some of them killed: no acknowledged value is lost, none is wrong."""

import os
import threading
import time

import pytest
from waiting import SOON_S

from ragblend.kvstore.errors import StoreLockedError
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.store import KVStore


def test_a_held_lock_is_reported_after_the_timeout(root, open_store, sample, monkeypatch):
    monkeypatch.setattr("ragblend.kvstore.upkeep.TIMEOUT_S", 0.1)
    store = open_store()
    other = WriterLock(root / "write.lock", 1)  # another descriptor stands for another process
    with other.hold():
        assert store.contains(sample(1)[0]) is False  # readers do not wait
        with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on"):
            store.put(*sample(1))
        with pytest.raises(StoreLockedError):
            KVStore.open(root, 1)
    other.close()
    store.put(*sample(1))


def test_the_lock_is_exclusive_and_reentrant(tmp_path):
    lock, order = WriterLock(tmp_path / "lock", 5), []

    def second():
        with lock.hold():
            order.append("second")

    with lock.hold(), lock.hold():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join(SOON_S)
    lock.close()
    assert order == ["first", "second"]
