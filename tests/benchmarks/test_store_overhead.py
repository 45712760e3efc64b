"""What bookkeeping costs: on a store of few chunks, made of rows, every lookup hits, every admission evicts."""

import json

from typer.testing import CliRunner

from benchmarks.store import app


def test_it_measures_hits_and_evictions(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.store_overhead.tempfile.tempdir", str(tmp_path))
    done = CliRunner().invoke(app, ["--overhead", "100", "--json"])
    assert done.exit_code == 0, done.stderr
    row = json.loads(done.stdout)
    row = row.get("rows", row)
    assert (row["chunks"], row["entries"]) == (100, 100)
    assert row["evicted"] == 6 * row["requests"]
    assert list(tmp_path.iterdir()) == []
