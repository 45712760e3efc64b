"""`ragblend store stats`: each tier, in all processes and in this one; and that the settings reach the store."""

import json
from shutil import disk_usage

import pytest
from typer.testing import CliRunner

from ragblend.app.cli.main import app
from ragblend.app.library.maintenance import store_stats
from ragblend.app.workspace import Workspace
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.remote import Wanted
from ragblend.kvstore.store import KVStore

TINY = Geometry(layers=1, kv_heads=1, key_size=2, value_size=2, dtype="float32")
COUNTS = {"hits": 0, "misses": 0, "evictions": 0, "quarantined": 0}


@pytest.fixture
def chunk():
    import torch

    return ChunkKV((1, 2, 3), 0, TINY, [torch.zeros(1, 3, 2)], [torch.zeros(1, 3, 2)])


def use(root, chunk, budget_bytes=1 << 20, **more):
    """One process that stores a value, reads it from the disk, then from memory, and evicts nothing."""
    key = ChunkKey("ab" * 32)
    with KVStore.open(root, budget_bytes, [MemoryTier("memory", 1 << 20)], **more) as store:
        store.get(key, chunk.token_ids)
        store.put(key, chunk)
        store.get(key, chunk.token_ids)
        store.promote(key, chunk.token_ids)
        store.get(key, chunk.token_ids)
        store.get(key, chunk.token_ids)
        return store_stats(store)


def test_each_tier_counts_its_own_over_all_processes(tmp_path, chunk):
    first = use(tmp_path / "kv", chunk, policy="lru")
    assert (first["policy"], first["entries"], first["tiers"]["memory"]["bytes"]) == ("lru", 1, 48)
    once = {"memory": COUNTS | {"hits": 2, "misses": 1}, "disk": COUNTS | {"hits": 1, "misses": 1}}
    assert {name: tier["this_process"] for name, tier in first["tiers"].items()} == once
    second = use(tmp_path / "kv", chunk)  # what it asks first the other has stored: it climbs, or is read
    assert second["policy"] == "lru"
    now = {name: tier["this_process"] for name, tier in second["tiers"].items()}
    assert now == {"memory": COUNTS | {"hits": 2, "misses": 2}, "disk": COUNTS | {"hits": 2}}
    for name, tier in second["tiers"].items():
        both = {each: now[name][each] + once[name][each] for each in COUNTS}
        assert {each: tier[each] for each in COUNTS} == both


def test_store_stats_reports_the_settings(tmp_path, chunk, monkeypatch):
    monkeypatch.setenv("RAGBLEND_STORE_POLICY", "gdsf")
    monkeypatch.setenv("RAGBLEND_STORE_BUDGET_BYTES", "5000")
    use(tmp_path / "kv", chunk)
    runner = CliRunner()
    done = runner.invoke(app, ["store", "stats", "--json", "--home", str(tmp_path)])
    said = json.loads(done.stdout)
    assert (said["policy"], said["budget_bytes"], said["entries"]) == ("gdsf", 5000, 1)
    assert said["tiers"]["memory"] == COUNTS | {"hits": 2, "misses": 1, "this_process": COUNTS}
    assert said["tiers"]["disk"]["hits"] == 1 and said["tiers"]["disk"]["bytes"] == said["bytes"]
    text = runner.invoke(app, ["store", "stats", "--home", str(tmp_path)]).stdout
    assert "evicts by gdsf" in text and "memory: 2 hits, 1 misses" in text


def test_a_disk_without_a_budget_gets_a_share_of_what_is_free(tmp_path):
    with Workspace.open(tmp_path) as workspace:
        free = disk_usage(tmp_path).free
        assert free // 8 < workspace.store.budget_bytes < free // 2


def test_stats_include_the_shared_store(tmp_path, chunk, redis_server, monkeypatch):
    redis, key = redis_server(), ChunkKey("ab" * 32)
    url = f"{redis.url()}?timeout_s=60"
    with KVStore.open(tmp_path / "other", 1 << 20, remote=url) as other:
        other.put(key, chunk)
    with KVStore.open(tmp_path / "kv", 1 << 20, remote=url) as store:
        assert store.remote.fetch(Wanted(key, chunk.token_ids, TINY, 0)) is not None
        here = store_stats(store)
    assert here["remote"]["read_bytes"] == chunk.nbytes and here["remote"]["state"] == "available"
    assert here["tiers"]["remote"]["this_process"] == COUNTS | {"hits": 1}
    monkeypatch.setenv("RAGBLEND_REMOTE", url)
    runner = CliRunner()
    said = json.loads(runner.invoke(app, ["store", "stats", "--json", "--home", str(tmp_path)]).stdout)
    assert said["tiers"]["remote"] == COUNTS | {"hits": 1, "this_process": COUNTS}
    assert said["remote"]["state"] == "available" and said["remote"]["where"] == redis.url()
    redis.end()
    text = runner.invoke(app, ["store", "stats", "--home", str(tmp_path)]).stdout
    assert "ConnectionError" in text and "1 errors" in text
