"""OpenMP's threads spin only where there are idle cores, and the user's environment is kept."""

import os
import sys
from unittest.mock import Mock

import pytest

from ragblend.engine.openmp import SPIN_COUNT, set_thread_spinning

NAMES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
CORES = len(os.sched_getaffinity(0))
IDLE, ONE_BUSY = "0.10 0.10 0.10 1/200 42", "0.10 0.10 0.10 2/200 42"


@pytest.mark.parametrize(
    ("load", "given", "policy", "spins"),
    [
        pytest.param(IDLE, {}, "PASSIVE", SPIN_COUNT, id="idle"),
        pytest.param(ONE_BUSY, {}, "PASSIVE", None, id="a core is busy"),
        pytest.param(
            ONE_BUSY, {"OMP_NUM_THREADS": str(CORES - 1)}, "PASSIVE", SPIN_COUNT, id="fewer threads",
            marks=pytest.mark.skipif(CORES < 2, reason="one core"),
        ),
        pytest.param(IDLE, {"OMP_NUM_THREADS": "1,1"}, "PASSIVE", None, id="thread counts by level"),
        pytest.param("no numbers", {}, "PASSIVE", None, id="no numbers"),
        pytest.param("", {}, "PASSIVE", None, id="empty"),
        pytest.param(None, {}, "PASSIVE", None, id="unknown"),
        pytest.param(IDLE, {"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE", None, id="the user's"),
    ],
)  # fmt: skip
def test_threads_spin_if_there_are_idle_cores(tmp_path, monkeypatch, load, given, policy, spins):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    for name, value in {"OMP_NUM_THREADS": str(CORES), **given}.items():
        monkeypatch.setenv(name, value)
    if load is not None:
        (tmp_path / "loadavg").write_text(load)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    set_thread_spinning(tmp_path / "loadavg")
    assert [os.environ.get(name) for name in NAMES] == [policy, spins]


def test_a_moment_of_other_work_does_not_stop_threads_from_spinning(monkeypatch):
    """A shell that started the rest of a pipe was counted, and answers took three times as long."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", str(CORES))
    load = Mock(read_text=Mock(side_effect=[ONE_BUSY, IDLE]))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    set_thread_spinning(load)
    assert os.environ.get("GOMP_SPINCOUNT") == SPIN_COUNT
