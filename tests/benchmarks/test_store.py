"""The bookkeeping benchmark on a small store: every lookup hits, and every admission evicts."""

import json

from benchmarks import store


def test_it_measures_hits_and_evictions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(store.tempfile, "tempdir", str(tmp_path))
    store.main(100)
    row = json.loads(capsys.readouterr().out)
    assert (row["chunks"], row["entries"]) == (100, 100)
    assert row["evicted"] == 6 * row["requests"]
    assert list(tmp_path.iterdir()) == []
