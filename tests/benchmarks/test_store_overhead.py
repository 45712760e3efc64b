"""What bookkeeping costs: on a store of few chunks, made of rows, every lookup hits, every admission evicts."""

import json
from contextlib import closing

from typer.testing import CliRunner

from benchmarks.store import app
from benchmarks.store_overhead import SCOPE, key_of, make_large_home, token_ids_of
from ragblend.kvstore.nodes import NodeIndex
from ragblend.kvstore.sqlite import connect
from ragblend.kvstore.store import KVStore


def test_the_store_that_is_made_is_one(tmp_path):
    make_large_home(tmp_path, 30, lambda done, of: None)
    with KVStore.open(tmp_path / "kv", 1 << 40) as store, NodeIndex.open(tmp_path / "nodes.sqlite") as nodes:
        assert (store.stats().entries, store.stats().quarantined) == (30, 0)
        assert len(nodes.node_ids(SCOPE)) == 30
        for number in (0, 29):
            with store.open_chunk(key_of(number), token_ids_of(number)) as reader:
                assert reader.token_ids == nodes.get(SCOPE, f"node-{number}")
    with closing(connect(tmp_path / "kv" / "ledger.db")) as sql:
        priorities = set(sql.execute("SELECT priority FROM Uses"))
    assert len(priorities) == 30  # there is an order to evict in


def test_it_measures_hits_and_evictions(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.store_overhead.tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["--overhead", "100", "--json"])
    assert done.exit_code == 0, done.stderr
    row = json.loads(done.stdout)
    row = row.get("rows", row)
    assert (row["chunks"], row["entries"]) == (100, 100)
    assert row["evicted"] == 6 * row["requests"]
    assert list(tmp_path.iterdir()) == []
