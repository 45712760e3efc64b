"""What is told of other programs: medians of their answers, and which one ended."""

import json
import stat

import pytest

from benchmarks import peers

MACHINE = {"cpu": "a processor"}


def answer(ttft_ms, last_ms, peak=1_000_000):
    return {"ttft_ms": ttft_ms, "last_ms": last_ms, "peak": peak, "disk": 2_000_000, "ingest_tokens": 10}


def test_the_table_holds_medians_of_those_that_were_asked(tmp_path):
    asked = {"vllm": [answer(100, 1090), answer(200, 2180), answer(300, 1290, 9_000_000)], "transformers": []}
    (row,) = peers.report(asked, MACHINE, tmp_path)
    assert row["case"] == "vllm" and row["answers"] == 3
    assert (row["ttft_ms"], row["last_ms"]) == (200, 1290)
    assert row["tokens_per_s"] == pytest.approx(100), "of the pairs' median, not of the medians'"
    assert (row["peak_mb"], row["disk_mb"]) == (9, 2), "a peak is the highest"
    assert json.loads((tmp_path / "peers.json").read_text())["rows"] == [row]
    assert (tmp_path / "peers.png").stat().st_size > 1000


def test_a_program_is_asked_line_by_line_and_named_where_it_ended(tmp_path):
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\necho ready\nread number\necho '{json.dumps(answer(1, 2))}'\nread number\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with peers.started("vllm", str(program), tmp_path / "plan.json") as ask:
        assert ask(1) == answer(1, 2)
        with pytest.raises(SystemExit, match=r"vllm ended: .*vllm\.log says why"):
            ask(2)
