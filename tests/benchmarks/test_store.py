"""The bookkeeping benchmark on a small store: every lookup hits, and every admission evicts."""

from benchmarks import store


def test_it_measures_hits_and_evictions(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "REQUESTS", 20)
    store.make_large_home(tmp_path, 100)
    row = store.measure(tmp_path, 100)
    assert (row["chunks"], row["entries"], row["evicted"]) == (100, 100, 6 * 20)
