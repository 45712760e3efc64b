"""What the fault suite found, one small test each."""

import sqlite3
from pathlib import Path

import pytest
from fault_values import put, version_read

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


def test_a_schema_that_is_not_text_is_a_damaged_index(three):
    """SQLite quotes the damaged name in its message; decoding that raised UnicodeDecodeError out of open()."""
    path = three / "cache.db"
    damaged = path.read_bytes().replace(b"ON Cache(key, raw)", b"ON Cache(k\xd4y, raw)")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with KVStore.open(three, BUDGET) as store:
        assert store.stats().quarantined == 1
        assert [version_read(store, number, {0}) for number in range(3)] == [0, 0, 0]


def test_an_index_that_cannot_be_opened_is_a_named_error(three, monkeypatch):
    """sqlite3.connect stood outside the try: a full disk gave sqlite3.OperationalError."""

    def refuse(*arguments, **named):
        raise sqlite3.OperationalError("unable to open database file")

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", refuse)
        with pytest.raises(StoreError, match=r"cache\.db"):
            KVStore.open(three, BUDGET)


@pytest.mark.parametrize("entered", [0, 1])
def test_an_adoption_that_was_killed_begins_again(three, monkeypatch, entered):
    """Killed after the new index was made and before all values were in it: the next open swept them away."""
    (three / "cache.db").write_bytes(b"ruin" * 2000)
    taken = 0

    def killed(*arguments):
        nonlocal taken
        taken += 1
        if taken > entered:
            raise KeyboardInterrupt
        return True

    with monkeypatch.context() as patch:
        patch.setattr("ragblend.kvstore.upkeep._is_sound", killed)
        with pytest.raises(KeyboardInterrupt):
            KVStore.open(three, BUDGET)
    with KVStore.open(three, BUDGET) as store:
        assert [version_read(store, number, {0}) for number in range(3)] == [0, 0, 0]


def test_a_store_that_another_process_begins_meanwhile_is_a_store(root, monkeypatch):
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
