"""Comparisons with other programs: medians of their answers, and which one failed."""

import json
import stat

import psutil
import pytest
import torch
from waiting import until

from benchmarks import measure_peers as peers

MACHINE = {"cpu": "a processor"}
PROGRAM = """#!/bin/sh
echo $$ >process
echo ready
read number
echo "[\\"$OMP_WAIT_POLICY\\"]"
read number
"""


def answer(ttft_ms, last_ms, peak=1_000_000):
    return {"ttft_ms": ttft_ms, "last_ms": last_ms, "peak": peak, "disk": 2_000_000, "ingest_tokens": 10}


def test_the_table_has_medians_of_measured_programs(tmp_path):
    asked = {"vllm": [answer(100, 1090), answer(200, 2180), answer(300, 1290, 9_000_000)], "transformers": []}
    (row,) = peers.report(asked, MACHINE, tmp_path)
    assert row["case"] == "vllm" and row["answers"] == 3
    assert (row["ttft_ms"], row["last_ms"]) == (200, 1290)
    assert row["tokens_per_s"] == pytest.approx(100), "of the pairs' median, not of the medians'"
    assert (row["peak_mb"], row["disk_mb"]) == (9, 2), "a peak is the highest"
    assert json.loads((tmp_path / "peers.json").read_text())["rows"] == [row]
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_programs_have_their_own_threads_are_stopped_while_idle_and_named_when_they_fail(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.chdir(tmp_path)
    with peers.start_program("vllm", str(program), tmp_path / "plan.json") as ask:
        process = psutil.Process(int((tmp_path / "process").read_text()))
        assert ask(1) == [""], "not as this package has its own threads wait"
        until(lambda: process.status() == psutil.STATUS_STOPPED)
        with pytest.raises(SystemExit, match=r"vllm ended; see .*vllm\.log"):
            ask(2)
    assert not process.is_running()


def test_other_models_and_thread_counts_have_other_folders(tmp_path, monkeypatch):
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    first = peers.folder_of(str(model), peers.PYTHONS, tmp_path)
    assert peers.folder_of(str(model), peers.PYTHONS, tmp_path) == first
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    other = peers.folder_of(str(model), peers.PYTHONS, tmp_path)
    model.write_bytes(b"GGUF, another")
    assert len({first, other, peers.folder_of(str(model), peers.PYTHONS, tmp_path)}) == 3
