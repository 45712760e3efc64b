"""What the benchmarks share: work in turns, AUC of two kinds of values."""

import pytest

from benchmarks.common import auc, run_alternately


def test_ways_alternate_and_rounds_that_warm_up_do_not_count():
    done: list[str] = []
    ways = {name: lambda name=name: done.append(name) or len(done) for name in "ab"}
    assert run_alternately(ways, rounds=2, warm=1) == {"a": [3, 5], "b": [4, 6]}
    assert done == list("ababab")


def test_auc_of_overlapping_and_separate_times():
    assert auc([5, 6, 7], [1, 2, 3]) == 1
    assert auc([1, 2, 3], [5, 6, 7]) == 0
    assert auc([1, 3, 5, 7], [1, 3, 5, 7]) == pytest.approx(0.5)
