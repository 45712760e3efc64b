"""The server's figures: growth between two parts of a run."""

from benchmarks.measure_server import change


def test_growth_is_measured_without_the_beginning():
    rows = [{"at": at, "files": 1 if at < 20 else 100 if at < 60 else 150} for at in range(101)]
    assert change(rows, "files") == {"early": 100, "late": 150, "change": "+50.0%"}
