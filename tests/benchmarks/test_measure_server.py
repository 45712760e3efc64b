"""The server's figures: AUC of two kinds of times, and growth between two parts of a run."""

import pytest

from benchmarks.measure_server import auc, change


def test_auc_of_overlapping_and_separate_times():
    assert auc([5, 6, 7], [1, 2, 3]) == 1
    assert auc([1, 2, 3], [5, 6, 7]) == 0
    assert auc([1, 3, 5, 7], [1, 3, 5, 7]) == pytest.approx(0.5)


def test_growth_is_measured_without_the_beginning():
    rows = [{"at": at, "files": 1 if at < 20 else 100 if at < 60 else 150} for at in range(101)]
    assert change(rows, "files") == {"early": 100, "late": 150, "change": "+50.0%"}
