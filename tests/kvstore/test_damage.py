"""Damaged, swapped and planted things: a counted miss, never a wrong KV, never code run, never a bare exception."""

import errno
import os
import pickle
import socket
import sqlite3
from dataclasses import replace

import pytest
from doubles import raising

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import CorruptBlobError, StoreError, UsageError
from ragblend.kvstore.index import BytesOnly, Index
from ragblend.kvstore.layout import write_value
from ragblend.kvstore.memory import MemoryTier, read_whole
from ragblend.kvstore.store import KVStore


class Canary:
    """Unpickling this makes a folder: the proof that foreign bytes were run."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def plant(root, **columns):
    """A row that this store did not write."""
    sql = sqlite3.connect(root / "index/cache.db", isolation_level=None)
    names = ", ".join(columns)
    marks = ", ".join("?" for _ in columns)
    sql.execute(f"INSERT OR REPLACE INTO Cache ({names}) VALUES ({marks})", tuple(columns.values()))
    sql.close()


@pytest.fixture
def canary(tmp_path):
    path = tmp_path / "canary"
    yield path
    assert not path.exists(), "a planted pickle was run"


def test_the_canary_detects_unpickling(tmp_path):
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


FOREIGN = {
    "a pickle as a value": lambda digest, evil: {"key": digest, "raw": 1, "mode": 4, "size": 0, "value": evil},
    "a pickle as a key": lambda digest, evil: {"key": evil, "raw": 0, "mode": 4, "size": 0, "value": evil},
    "a file outside of the store": lambda digest, evil: {
        "key": digest, "raw": 1, "mode": 2, "size": 4, "filename": "../../../thesis.txt"
    },
    "a key that is no digest": lambda digest, evil: {"key": "k", "raw": 1, "mode": 1, "size": 9, "value": evil},
    "no text": lambda digest, evil: {"key": b"\xff", "raw": 1, "mode": 1, "size": 9, "value": evil},
}  # fmt: skip


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_foreign_rows_are_never_unpickled_or_followed_and_the_index_is_rebuilt(
    open_store, sample, same, root, canary, tmp_path, foreign, when
):
    """diskcache unpickles values and keys, and opens and unlinks whatever its filename column says."""
    thesis = tmp_path / "thesis.txt"
    thesis.write_text("mine")
    (key, chunk), good, evil = sample(1), sample(2), pickle.dumps(Canary(canary))
    store = open_store()
    store.put(*good)
    if when == "before it is opened":
        store.close()
    plant(root, **FOREIGN[foreign](key.digest, evil))
    if when == "before it is opened":
        store = open_store()
    else:
        assert "index" in {problem.kind for problem in store.check()}
    assert store.get(key, chunk.token_ids) is None
    assert store.open_chunk(key, chunk.token_ids) is None
    store.repair()
    assert store.check() == [] and list(store.keys()) == [good[0]]
    assert same(store.get(good[0], good[1].token_ids), good[1])
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)
    store.delete([key])
    store.gc(keep=[])
    assert thesis.read_text() == "mine"


def test_a_pickle_in_a_value_file_is_not_run(store, sample, root, canary, value_path):
    evil, (key, chunk) = pickle.dumps(Canary(canary)), sample(1)
    store.put(key, chunk)
    path = value_path(key)
    path.write_bytes(evil)
    assert {problem.kind for problem in store.check()} == {"bad-header"}
    assert store.get(key, chunk.token_ids) is None
    assert (root / "quarantine" / path.name).read_bytes() == evil
    assert store.repair() == [] and store.check() == []


def test_the_index_refuses_pickles_and_other_types(root, canary):
    """What diskcache would unpickle, or write as a pickle."""
    root.mkdir(parents=True)
    disk, evil = BytesOnly(str(root)), pickle.dumps(Canary(canary))
    for mode in (0, 2, 3, 4, None):
        with pytest.raises(CorruptBlobError):
            disk.fetch(mode, None, evil, False)
    for raw in (0, 1):
        with pytest.raises(CorruptBlobError):
            disk.get(evil, raw)
    for call in (lambda: disk.put(1), lambda: disk.put(b"k"), lambda: disk.store("v", False, key="k")):
        with pytest.raises(UsageError):
            call()


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
    "link to the value": lambda path: path.symlink_to(path.parents[4] / "elsewhere"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", IN_ITS_PLACE)
def test_anything_but_a_file_in_place_of_a_value_is_damage(
    open_store, sample, same, value_path, kind, tmp_path
):
    """A FIFO waited for somebody to write into it, for ever; a folder could not be cleared away."""
    store, (key, chunk) = open_store(), sample(1)
    for look in (
        lambda: store.get(key, chunk.token_ids),
        lambda: store.read_ahead(key),
        lambda: store.promote(key, chunk.token_ids),
        store.check,
        store.repair,
        lambda: open_store().check(),
    ):
        store.put(key, chunk)
        path = value_path(key)
        path.rename(tmp_path / "elsewhere")
        IN_ITS_PLACE[kind](path)
        look()
        assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined >= 3
    store.gc()
    assert store.check() == [] and not list((store.root / "quarantine").iterdir())
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)


@pytest.mark.parametrize("when", ["before it is opened", "while it is open"])
def test_a_linked_quarantine_does_not_delete_other_files(
    open_store, sample, root, tmp_path, value_path, when
):
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


def test_swapped_files_of_the_same_tokens_are_damage(store, sample, value_path):
    """Of two collections, say: only the key in the file tells them apart."""
    (key, chunk), (other, made) = sample.put(store, 1), sample(2)
    store.put(other, replace(made, token_ids=chunk.token_ids))
    paths = [value_path(key), value_path(other)]
    for path, content in zip(paths, [path.read_bytes() for path in reversed(paths)], strict=True):
        path.write_bytes(content)
    assert [store.get(each, chunk.token_ids) for each in (key, other)] == [None, None]
    assert store.stats().quarantined == 2


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
            assert same(read_whole(reader), chunk)


def test_too_many_open_files_are_a_miss_and_no_damage(store, sample, same, monkeypatch):
    key, chunk = sample.put(store, 1)
    refused = raising(OSError(errno.EMFILE, "Too many open files"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refused)
        assert store.get(key, chunk.token_ids) is None
    assert store.stats().quarantined == 0
    assert same(store.get(key, chunk.token_ids), chunk)


def test_the_quarantine_is_bounded(store, sample, root, value_path):
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
        lambda path: run_sql(path, "CREATE TABLE Other (id INTEGER PRIMARY KEY)"),
        lambda path: run_sql(path, "CREATE TRIGGER t AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END"),
    ],
)
def test_a_damaged_index_is_rebuilt_from_the_values(open_store, sample, same, root, damage, caplog):
    store = open_store()
    samples = sample.put_many(store, 3)
    store.close()
    damage(root / "index/cache.db")
    store = open_store()
    assert "is rebuilt" in caplog.text
    assert all(same(store.get(key, chunk.token_ids), chunk) for key, chunk in samples)
    assert store.check() == []
    for path in root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def run_sql(path, statement):
    sql = sqlite3.connect(path, isolation_level=None)
    sql.execute("PRAGMA writable_schema = ON")
    sql.execute(statement)
    sql.close()


def test_an_empty_index_that_others_have_open_is_filled(open_store, sample, same, value_path):
    """A process was killed before its first commit; the next one removed the index of the others."""
    (key, chunk), other = sample(1), sample(2)
    server = open_store()
    write_value(server.root, Blob.of(key, chunk))
    assert value_path(key).exists()
    assert same(open_store().get(key, chunk.token_ids), chunk)
    server.put(*other)
    assert same(server.get(key, chunk.token_ids), chunk) and server.delete([key]) > 0


def test_damaged_values_are_not_entered_into_a_rebuilt_index(open_store, sample, root, value_path):
    store = open_store()
    good, cut = sample.put_many(store, 1, 3)
    store.close()
    os.truncate(value_path(cut[0]), 50)
    (root / "index/cache.db").write_bytes(b"ruin")
    store = open_store()
    assert list(store.keys()) == [good[0]]
    assert store.check() == []


def test_open_removes_leftovers_of_killed_puts_and_rows_without_files(open_store, sample, root, value_path):
    store = open_store()
    samples = sample.put_many(store, 3)
    store.close()
    path = value_path(samples[0][0])
    path.with_suffix(".tmp").write_bytes(b"half")
    path.with_name(f"{samples[0][0].digest}-{'a' * 16}.kv").write_bytes(path.read_bytes())
    os.truncate(value_path(samples[1][0]), 70)
    value_path(samples[2][0]).unlink()
    store = open_store()
    assert store.stats().quarantined == 1
    assert list(store.keys()) == [samples[0][0], samples[1][0]]
    assert store.get(samples[1][0], samples[1][1].token_ids) is None  # a value is looked at when it is used
    assert store.check() == []
    assert len(list(root.glob("values/*/*"))) == 1


def test_an_index_is_closed_if_opening_fails(root, monkeypatch):
    closed = []

    def unreadable(self):
        raise StoreError("the disk is busy")

    KVStore.open(root, 1 << 20).close()
    monkeypatch.setattr(Index, "entries", unreadable)
    monkeypatch.setattr(Index, "close", lambda self: closed.append(self))
    with pytest.raises(StoreError, match="busy"):
        KVStore.open(root, 1 << 20)
    assert len(closed) == 1
