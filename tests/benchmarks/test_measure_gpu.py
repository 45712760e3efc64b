"""`measure_gpu`: a run survives its parts' failures, and its tables come from its JSON."""

import json
from pathlib import Path

import pytest

from benchmarks import measure_gpu


def rows_until_failure(bench):
    yield {"line": "first"}
    raise OSError("no such disk")


@pytest.fixture
def bench():
    return measure_gpu.GpuBench(Path("model"), None, "tiny", "cpu", tokens=64, chunks=2, disk_mib=1)


def test_a_failed_part_keeps_its_rows_and_the_others_run(bench, monkeypatch, tmp_path):
    parts = {"disk": (rows_until_failure, 1), "machine": (lambda _: {"card": "none"}, 1)}
    monkeypatch.setattr(measure_gpu, "PARTS", parts)
    measure_gpu.measured(bench, list(parts), tmp_path / "gpu.json", 60)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["disk"] == [{"line": "first"}] and found["machine"] == {"card": "none"}
    assert list(found["failed"]) == ["disk"] and "no such disk" in found["failed"]["disk"]


def test_no_part_begins_after_the_limit(bench, monkeypatch):
    monkeypatch.setattr(measure_gpu, "PARTS", {"decode": (lambda _: pytest.fail("it began"), 1)})
    assert "time limit" in measure_gpu.measured(bench, ["decode"], None, -1.0)["failed"]["decode"]


def test_disk_reads_the_whole_file_in_each_way(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    rows = list(measure_gpu.disk(bench))
    assert {row["way"] for row in rows} == {"writing", "warm", "cold", "O_DIRECT"}
    assert all(row["gb_per_s"] > 0 for row in rows if "error" not in row)
    assert not list(tmp_path.iterdir())


def test_tables_show_times_speedups_and_launches():
    case = {"cache": "memory", "chunks": 8, "speedup": 2.0}
    found = {
        "machine": {"card": "a card", "torch": "2", "processor": "a processor"},
        "ttft": [
            case | {"method": "full", "ratio": None, "ttft_ms": 200.0},
            case | {"method": "probe-shift", "ratio": 0.15, "ttft_ms": 100.0},
        ],
        "profile": [
            {"method": "full", "ratio": None, "triton": True, "waits": 3}
            | {"launches": 1234, "kernels_ms": 1.0, "copies_ms": 2.0}
        ],
    }
    text = measure_gpu.tables(found)
    assert "| ms | pinned memory |" in text and "| full | 200 |" in text
    assert "| probe-shift 15% | 100 (2.0 times) |" in text and "| full | yes | 1,234 | 3 |" in text


def test_time_of_overlapping_spans_counts_once():
    assert measure_gpu.union_us([(0, 10), (5, 12), (20, 21)]) == 13
