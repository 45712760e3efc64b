"""Several processes and threads on one store, some of them killed: no acknowledged value is lost, none is wrong."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreLockedError
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.store import KVStore

UNLIMITED = 1 << 30


class Worker:
    """Children of one process that has imported torch already."""

    def __init__(self):
        command = [sys.executable, str(Path(__file__).with_name("crash_worker.py"))]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def line(self):
        line = self.process.stdout.readline()
        assert line, "the worker died"
        return line.split()

    def close(self):
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def worker():
    worker = Worker()
    yield worker
    worker.close()


def crash(worker, root, seed, step=0, after_acks=None, delay_s=0.0):
    """One putting child's life; the numbers it acknowledged, and whether it was killed."""
    worker.start("put", root, UNLIMITED, seed, step)
    _, pid = worker.line()
    acknowledged, killed = set(), True
    if after_acks == 0:
        kill_later(int(pid), delay_s)
    while (words := worker.line()) != ["dead"]:
        killed = words != ["done"]
        if words[0] == "ack":
            acknowledged.add(int(words[1]))
            if len(acknowledged) == after_acks:
                kill_later(int(pid), delay_s)
    return acknowledged, killed


def kill_later(pid, delay_s):
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):  # it may have come to its end
        os.kill(pid, signal.SIGKILL)


def verify(root, acknowledged, sample, same):
    """What was acknowledged is there and equal; nothing is wrong, damaged or left over."""
    with KVStore.open(root, UNLIMITED) as store:
        assert store.check() == []
        assert store.stats().quarantined == 0
        for number in range(16):
            key, chunk = sample(number, 30)
            found = store.get(key, chunk.token_ids)
            assert found is None or same(found, chunk)
            assert found is not None or number not in acknowledged
        assert not list(root.rglob("*.tmp"))


def test_killed_at_every_step_of_a_put(root, worker, sample, same):
    """Before and after every change that the first two puts make to the disk."""
    acknowledged, killed = set(), 0
    for step in range(1, 37):
        more, died = crash(worker, root, seed=step, step=step)
        acknowledged |= more
        killed += died
        verify(root, acknowledged, sample, same)
    assert killed == 36
    assert len(acknowledged) > 5


def test_killed_at_any_moment(root, worker, sample, same):
    seeded, acknowledged = random.Random(17), set()
    for round_ in range(24):
        more, _ = crash(worker, root, round_, 0, seeded.randrange(4), seeded.uniform(0, 0.01))
        acknowledged |= more
        if round_ % 6 == 5:
            verify(root, acknowledged, sample, same)
    assert len(acknowledged) > 5


def test_one_writer_and_one_reader(root, open_store, sample, worker, tmp_path):
    """The writer replaces, evicts and deletes under the reader; the reader sees right values or misses."""
    samples = [sample(seed, 20) for seed in range(8)]
    store = open_store(budget_bytes=5 * Blob.of(*samples[0]).nbytes)
    worker.start("read", root, tmp_path / "stop")
    assert worker.line() == ["open"]
    seeded, deadline = random.Random(2), time.monotonic() + 0.8
    while time.monotonic() < deadline:
        store.put(*seeded.choice(samples))
        if seeded.random() < 0.2:
            store.delete(seeded.choice(samples)[0])
    (tmp_path / "stop").touch()
    hits, wrong, quarantined = map(int, worker.line())
    assert worker.line() == ["dead"]
    assert hits > 5
    assert (wrong, quarantined) == (0, 0)
    assert store.check() == []


def test_threads_share_one_store(open_store, sample, same):
    samples = [sample(seed, 10) for seed in range(12)]
    store = open_store(budget_bytes=6 * Blob.of(*samples[0]).nbytes)

    def work(seed):
        seeded, wrong = random.Random(seed), 0
        for _ in range(25):
            key, chunk = seeded.choice(samples)
            if seeded.random() < 0.4:
                store.put(key, chunk)
            elif seeded.random() < 0.1:
                store.delete(key)
            else:
                found = store.get(key, chunk.token_ids)
                wrong += found is not None and not same(found, chunk)
        return wrong

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4))) == 0
    stats = store.stats()
    assert stats.hits > 0
    assert stats.quarantined == 0
    assert stats.bytes <= stats.budget_bytes
    assert store.check() == []


def test_two_writing_processes_take_turns(root, open_store, sample, worker):
    store = open_store()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(crash, worker, root, 0)
        while not other.done():
            store.put(*sample(20, 5))
            store.put(*sample(0, 30))
    assert other.result() == (set(range(12)), False)
    assert store.check() == []
    assert store.stats().entries == 13


def test_a_held_lock_is_waited_for_and_then_named(root, open_store, sample, monkeypatch):
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


def test_the_lock_is_one_threads_at_a_time_and_can_be_taken_again_inside(tmp_path):
    lock, order = WriterLock(tmp_path / "lock", 5), []

    def second():
        with lock.hold():
            order.append("second")

    with lock.hold(), lock.hold():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.05)
        order.append("first")
    thread.join(5)
    lock.close()
    assert order == ["first", "second"]
