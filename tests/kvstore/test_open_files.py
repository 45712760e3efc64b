"""Where an open file can be neither deleted nor replaced, as on Windows: both happen once its readers are done."""

import os

import pytest
from windows.hidden.open_files import refusing

from ragblend.kvstore import system
from ragblend.kvstore.errors import CorruptBlobError
from ragblend.kvstore.files import replace_durably
from ragblend.kvstore.memory import read_whole


@pytest.fixture(autouse=True)
def refused(monkeypatch):
    for name in ("unlink", "rename"):
        monkeypatch.setattr(os, name, refusing(getattr(os, name), system.SHARING_VIOLATION))
    monkeypatch.setattr(os, "replace", refusing(os.replace, system.ACCESS_DENIED))


def test_a_deleted_value_goes_with_its_last_reader(store, sample, same, held_anywhere):
    key, chunk = sample.put(store, 1)
    with store.open_chunk(key, chunk.token_ids) as second:
        with store.open_chunk(key, chunk.token_ids) as first:
            assert store.delete([key]) > 0
            assert not store.contains(key) and store.get(key, chunk.token_ids) is None
            assert same(read_whole(first), chunk)
        assert [path.suffix for path in held_anywhere(key.digest)] == [".kv"], "the second still reads it"
        assert same(read_whole(second), chunk)
    assert held_anywhere(key.digest) == [] and store.check() == []


def test_what_another_process_reads_is_deleted_at_the_next_opening(
    open_store, sample, value_path, held_anywhere
):
    """Its readers are not known here. Opening failed on a leftover that was open, or had the deleted value again."""
    key, chunk = sample(3)
    store = open_store()
    store.put(key, chunk)
    with value_path(key).open("rb"):
        store.delete([key])
        assert list(open_store().keys()) == []
        assert [path.suffix for path in held_anywhere(key.digest)] == [".kv"]
    open_store()
    assert held_anywhere(key.digest) == []


def test_an_evicted_value_goes_with_its_reader(open_store, sample, value_path):
    (key, chunk), (other, another) = sample(4), sample(5)
    store = open_store(budget_bytes=800)
    store.put(key, chunk)
    path = value_path(key)
    with store.open_chunk(key, chunk.token_ids):
        store.put(other, another)
        assert not store.contains(key) and path.exists()
    assert not path.exists() and store.contains(other)


def test_a_damaged_value_goes_with_its_reader(store, sample, value_path):
    key, chunk = sample.put(store, 6)
    path = value_path(key)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with store.open_chunk(key, chunk.token_ids) as reader, pytest.raises(CorruptBlobError):
        read_whole(reader)
    assert not path.exists() and not store.contains(key)


def test_replacing_waits_until_nobody_reads(tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text("old")
    reader = path.open()
    monkeypatch.setattr(system.time, "sleep", lambda _: reader.close())
    replace_durably(path, "new")
    assert reader.closed and path.read_text() == "new"


def test_replacing_what_stays_open_fails_and_changes_nothing(tmp_path, monkeypatch):
    path = tmp_path / "settings.toml"
    path.write_text("old")
    monkeypatch.setattr(system, "REPLACE_TIMEOUT_S", 0.0)
    with path.open(), pytest.raises(PermissionError):
        replace_durably(path, "new")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("settings.toml", "old")]
