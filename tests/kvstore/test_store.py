"""KVStore: what put promises, who is evicted, what check sees, what gc and delete leave (nothing)."""

import errno
import gc
import os
import stat
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from doubles import raising
from waiting import SOON_S, started

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreError, StoreFormatError, StoreFullError, StoreLockedError
from ragblend.kvstore.index import Index
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.store import KVStore


def modes_below(folder):
    found = {folder: stat.S_IMODE(folder.stat().st_mode)}
    for path in folder.rglob("*"):
        found[path] = stat.S_IMODE(path.lstat().st_mode)
    return found


def holds(folder, needle):
    return [path for path in folder.rglob("*") if path.is_file() and needle in path.read_bytes()]


def test_the_store_works_without_posix_file_hints(open_store, sample, same, monkeypatch):
    """As macOS, where a put once ended in an AttributeError."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(os, "posix_fadvise")
    store, (key, chunk) = open_store(), sample(1)
    store.put(key, chunk)
    store.read_ahead(key)
    with store.open_chunk(key, chunk.token_ids) as reader:
        reader.drop_page_cache()
    assert same(store.get(key, chunk.token_ids), chunk)


# --- budget


@pytest.fixture
def at_once(monkeypatch):
    """How many values a put evicts beside those that it must; fewer than in use."""
    monkeypatch.setattr("ragblend.kvstore.store.EXTRA_EVICTIONS", 8)
    return 8


def test_a_put_evicts_what_it_needs_and_few_values_more(open_store, sample, at_once):
    """After the budget was lowered, one put evicted 10,000 values, which took 17 s."""
    samples = [sample(seed) for seed in range(4 * at_once)]
    size = Blob.of(*samples[0]).nbytes
    store = open_store()
    for each in samples[:-4]:
        store.put(*each)
    entries = store.stats().entries
    store.budget_bytes = 3 * size
    store.put(*samples[-4])
    assert store.stats().evictions == at_once + 1
    assert store.stats().entries == entries - at_once
    store.put(*samples[-4])  # replaces itself
    assert store.stats().entries == entries - 2 * at_once
    large = sample(999, tokens=5 * at_once)
    store.put(*samples[-3])
    assert store.stats().entries == entries - 3 * at_once
    for each in samples[-2:]:
        store.put(*each)
    assert store.stats().bytes == store.budget_bytes
    assert all(store.contains(key) for key, _ in samples[-3:])
    store.budget_bytes = Blob.of(*large).nbytes
    store.put(*large)
    assert store.stats().entries == 1
    assert store.check() == []


def test_gc_evicts_down_to_a_lowered_budget(open_store, sample, at_once):
    store = open_store()
    samples = sample.put_many(store, 2 * at_once + 9)
    size = store.stats().bytes // len(samples)
    store.budget_bytes = 5 * size
    report = store.gc()
    assert (report.files, report.bytes) == (len(samples) - 5, (len(samples) - 5) * size)
    assert [store.contains(key) for key, _ in samples] == [False] * (len(samples) - 5) + [True] * 5
    assert (store.stats().evictions, store.check()) == (len(samples) - 5, [])


def test_a_value_larger_than_the_budget_is_refused_and_changes_nothing(open_store, sample, root):
    small, large = sample(1), sample(2, 50)
    store = open_store(budget_bytes=Blob.of(*small).nbytes)
    store.put(*small)
    before = sorted(root.rglob("*"))
    with pytest.raises(StoreFullError, match=r"(?s)budget.*Raise it") as caught:
        store.put(*large)
    assert str(root) in str(caught.value)
    assert sorted(root.rglob("*")) == before
    assert store.contains(small[0])
    assert store.stats().evictions == 0


def test_a_hit_writes_nothing(store, sample, root, monkeypatch):
    key, chunk = sample.put(store, 1)
    store.get(key, chunk.token_ids)
    paths = [path for path in root.rglob("*") if not path.name.endswith("-shm")]
    for path in paths:
        os.utime(path, (1, 1))
    never = raising(AssertionError("a hit must not write"))
    for name in ("fsync", "fdatasync", "write", "rename", "replace"):
        monkeypatch.setattr(os, name, never)
    for _ in range(20):
        assert store.get(key, chunk.token_ids)
    assert {path.stat().st_mtime for path in paths} == {1}


# --- secrecy


def test_all_files_are_private_whatever_the_umask(root, sample):
    before = os.umask(0)
    try:
        store = KVStore.open(root, 1 << 30)
        key, chunk = sample.put(store, 1)
        store.get(key, chunk.token_ids)
        (root / "values" / key.digest[:2]).iterdir()
        modes = modes_below(root.parent)
        store.close()
    finally:
        os.umask(before)
    files = "index cache.db cache.db-wal cache.db-shm values quarantine write.lock FORMAT"
    assert set(files.split()) <= {path.name for path in modes}
    wrong = {p: oct(m) for p, m in modes.items() if m != (0o700 if p.is_dir() else 0o600) and p.exists()}
    assert wrong == {}


def test_open_makes_an_existing_store_private(open_store, sample, root):
    open_store().close()
    for path in (root, root / "index/cache.db", root / "values"):
        path.chmod(0o777)
    open_store()
    assert all(mode & 0o077 == 0 for mode in modes_below(root).values())


def test_deleted_values_leave_no_bytes_on_disk(store, sample, root, value_path):
    """Neither the KV, nor the token ids, nor the key: in no file, the quarantine and SQLite's log included."""
    key, chunk = sample(1, 40)
    store.put(*sample(2))
    store.put(key, chunk)
    twin = value_path(key)
    (root / "quarantine" / twin.name.replace(".kv", "x.kv")).write_bytes(twin.read_bytes())
    twin.with_name(f"{key.digest}-{'0' * 16}.tmp").write_bytes(twin.read_bytes()[:300])
    payload = chunk.keys[1].contiguous().view(torch.uint8).numpy().tobytes()[:64]
    tokens = torch.tensor(chunk.token_ids, dtype=torch.int32).numpy().tobytes()[:32]
    needles = [payload, tokens, key.digest.encode(), bytes.fromhex(key.digest)]
    assert all(holds(root, needle) for needle in needles)
    size = twin.stat().st_size
    assert store.delete([key]) == 2 * size + 300
    assert [path for needle in needles for path in holds(root, needle)] == []
    assert not any(key.digest in path.name for path in root.rglob("*"))
    assert store.get(key, chunk.token_ids) is None
    assert store.delete([key]) == 0
    assert store.check() == []


def test_several_values_are_deleted_in_one_transaction(store, sample, root, monkeypatch):
    """A document has hundreds of passages, and what a change costs is its locks, logs and folders."""
    samples, changes = [sample(seed) for seed in range(4)], []
    for each in samples:
        store.put(*each)
    changing = Index.changing
    monkeypatch.setattr(Index, "changing", lambda index: (changes.append(0), changing(index))[1])
    sizes = store.sizes()
    gone = [key for key, _ in samples[:3]]
    assert store.delete([*gone, gone[0], sample(9)[0]]) == sum(sizes[key] for key in gone)
    assert len(changes) == 1 and list(store.keys()) == [samples[3][0]]
    assert [path for key in gone for path in holds(root, key.digest.encode())] == []
    assert store.check() == []


def test_a_file_that_cannot_be_deleted_is_an_error(store, sample, root, monkeypatch):
    key, _ = sample.put(store, 1)

    def refused(path, **more):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(StoreError, match=r"could not be removed.*Read-only"):
        store.delete([key])


# --- looking after


def test_check_names_every_kind_of_problem(store, sample, root, value_path, rows):
    keys = {}
    kinds = ["missing-file", "bad-length", "bad-header", "bad-layer", "wrong-key", "open-to-others"]
    for seed, kind in enumerate(kinds):
        key, _ = sample.put(store, seed, 4 + seed)
        keys[kind] = (key, value_path(key))
    other = sample(50, 8)
    store.put(*other)
    assert store.check() == []

    def damage(kind, position):
        data = bytearray(keys[kind][1].read_bytes())
        data[position] ^= 0x10
        keys[kind][1].write_bytes(data)

    keys["missing-file"][1].unlink()
    keys["bad-length"][1].write_bytes(keys["bad-length"][1].read_bytes()[:-1])
    damage("bad-header", 80)
    damage("bad-layer", -1)
    keys["wrong-key"][1].write_bytes(value_path(other[0]).read_bytes())
    keys["open-to-others"][1].chmod(0o640)
    orphan = keys["bad-layer"][1].with_name(f"{keys['bad-layer'][0].digest}-{'a' * 16}.kv")
    orphan.write_bytes(b"orphan")
    orphan.chmod(0o600)
    temporary = orphan.with_suffix(".tmp")
    temporary.write_bytes(b"tmp")
    temporary.chmod(0o600)
    (root / "values" / "notes.txt").touch(0o600)
    found = {(problem.kind, problem.key.digest if problem.key else None) for problem in store.check()}
    expected = {(kind, key.digest) for kind, (key, _) in keys.items()}
    expected |= {
        ("orphan-file", keys["bad-layer"][0].digest),
        ("temporary-file", keys["bad-layer"][0].digest),
    }
    assert found == expected | {("foreign-file", None)}
    assert all(problem.message and problem.path for problem in store.check())


def test_repair_removes_damage_and_keeps_sound_values(store, sample, same, root, value_path):
    good, cut = sample.put_many(store, 1, 3)
    data = bytearray(value_path(cut[0]).read_bytes())
    data[-1] ^= 1
    value_path(cut[0]).write_bytes(data)
    value_path(good[0]).with_name(f"{good[0].digest}-{'a' * 16}.kv").touch(0o600)
    assert sorted(problem.kind for problem in store.repair()) == ["bad-layer", "orphan-file"]
    assert store.check() == []
    assert same(store.get(good[0], good[1].token_ids), good[1])
    assert not store.contains(cut[0])
    store.put(*cut)
    assert same(store.get(cut[0], cut[1].token_ids), cut[1])


def test_repair_keeps_values_that_it_cannot_open_now(store, sample, monkeypatch):
    """Too many open files, say, or a file of another user's: it tells nothing of the value."""
    sample.put_many(store, 3)
    refused = raising(OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patched:
        patched.setattr("ragblend.kvstore.upkeep.open_verified", refused)
        assert {problem.kind for problem in store.repair()} == {"out-of-reach"}
    assert store.stats().entries == 3 and store.check() == []


def test_waiting_for_the_lock_of_a_closed_store_is_an_error(store):
    lock = store._lock
    store.close()
    with pytest.raises(StoreError, match="has been closed"), lock.hold():
        pass


def test_gc_removes_leftovers_and_values_not_to_keep(store, sample, root, value_path):
    samples = sample.put_many(store, 3)
    path = value_path(samples[0][0])
    (root / "quarantine" / "evidence").write_bytes(b"12345")
    path.with_suffix(".tmp").write_bytes(b"123")
    path.with_name(f"{samples[0][0].digest}-{'a' * 16}.kv").write_bytes(b"1")
    report = store.gc()
    assert (report.files, report.bytes) == (3, 9)
    assert store.stats().entries == 3
    size = path.stat().st_size
    report = store.gc(keep={samples[1][0]})
    assert (report.files, report.bytes) == (2, 2 * size)
    assert list(store.keys()) == [samples[1][0]]
    assert store.gc(keep=[]).files == 1
    assert store.check() == []
    assert store.gc() == replace(report, files=0, bytes=0)


def test_using_a_closed_store_is_an_error(store, sample):
    key, chunk = sample.put(store, 1)
    reader = store.open_chunk(key, chunk.token_ids)
    store.close()
    store.close()
    reader.close()
    for call in (
        lambda: store.put(key, chunk),
        lambda: store.get(key, chunk.token_ids),
        lambda: store.contains(key),
        store.stats,
        store.check,
        store.gc,
    ):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_ended_threads_keep_no_file_of_the_index_open(store, sample, root):
    """A server answers each request in a thread of its own, and sqlite3's cycles wait for the garbage collector."""
    key, _ = sample.put(store, 1)

    def opened():
        links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
        return sum(os.readlink(link).startswith(str(root)) for link in links if os.path.islink(link))

    gc.disable()
    try:
        counts = []
        for _ in range(8):
            thread = started(lambda: store.contains(key))
            thread.join()
            counts.append(opened())
    finally:
        gc.enable()
    assert counts[-1] <= counts[0]


# --- opening


@pytest.mark.parametrize("line", [b"ragblend kv 3\n", b"ragblend kv 0\n", b"", b"\xff\xfe"])
def test_another_format_is_refused_with_advice(open_store, root, sample, line):
    store = open_store()
    store.put(*sample(1))
    store.close()
    (root / "FORMAT").write_bytes(line)
    before = sorted(root.rglob("*"))
    with pytest.raises(StoreFormatError, match="store repair"):
        open_store()
    assert sorted(root.rglob("*")) == before


def test_a_folder_with_other_files_is_refused_and_unchanged(open_store, root):
    root.mkdir(parents=True)
    root.chmod(0o755)
    (root / "thesis.txt").write_text("mine")
    with pytest.raises(StoreFormatError, match=r"thesis\.txt"):
        open_store()
    assert [path.name for path in root.iterdir()] == ["thesis.txt"]
    assert stat.S_IMODE(root.stat().st_mode) == 0o755


def test_an_interrupted_first_open_can_be_repeated(open_store, root):
    root.mkdir(parents=True)
    (root / "write.lock").touch()
    (root / "FORMAT.tmp").write_bytes(b"rag")
    assert open_store().stats().entries == 0


def test_open_removes_nothing_if_the_index_cannot_be_read(open_store, sample, same, monkeypatch):
    """What the index did not tell was taken for what it does not name, and the value was swept away."""
    key, chunk = sample(1)
    with open_store() as store:
        store.put(key, chunk)
    with monkeypatch.context() as patch:
        patch.setattr(Index, "rows", Mock(side_effect=StoreError("disk I/O error")))
        with pytest.raises(StoreError, match="disk I/O error"):
            open_store()
    assert same(open_store().get(key, chunk.token_ids), chunk)


def test_a_file_in_place_of_the_folder_is_reported(open_store, root):
    root.parent.mkdir(parents=True)
    root.write_text("not a folder")
    with pytest.raises(StoreError, match="kv"):
        open_store()


# --- the lock


def test_a_held_lock_is_reported_after_the_timeout(root, open_store, sample, monkeypatch):
    monkeypatch.setattr("ragblend.kvstore.upkeep.LOCK_TIMEOUT_S", 0.1)
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
        thread = started(second)
        time.sleep(0.05)
        order.append("first")
    thread.join(SOON_S)
    lock.close()
    assert order == ["first", "second"]
