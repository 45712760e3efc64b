"""OpenMP's threads spin only where there are idle cores, and the user's environment is kept."""

import os

import pytest

from ragblend.app.openmp import SPINS, set_thread_spinning

NAMES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"


@pytest.fixture
def cores(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    count = len(os.sched_getaffinity(0))
    monkeypatch.setenv("OMP_NUM_THREADS", str(count))
    return count


@pytest.mark.parametrize(
    ("load", "spins"),
    [("0.10 0.10 0.10 1/200 42", SPINS), ("0.10 0.10 0.10 2/200 42", None), ("no numbers", None), ("", None)],
)
def test_threads_spin_on_idle_cores(tmp_path, cores, load, spins):
    (tmp_path / "loadavg").write_text(load)
    set_thread_spinning(tmp_path / "loadavg")
    assert [os.environ.get(name) for name in NAMES] == ["PASSIVE", spins]


def test_threads_spin_if_a_core_is_idle(tmp_path, cores, monkeypatch):
    if cores < 2:
        pytest.skip("one core")
    monkeypatch.setenv("OMP_NUM_THREADS", str(cores - 1))
    (tmp_path / "loadavg").write_text("0.10 0.10 0.10 2/200 42")
    set_thread_spinning(tmp_path / "loadavg")
    assert os.environ["GOMP_SPINCOUNT"] == SPINS


@pytest.mark.parametrize("load", ["", "0 0 0 1/2 3"])
def test_users_environment_is_kept(tmp_path, cores, monkeypatch, load):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    (tmp_path / "loadavg").write_text(load)
    set_thread_spinning(tmp_path / "loadavg")
    assert [os.environ.get(name) for name in NAMES] == ["ACTIVE", None]


def test_threads_sleep_if_the_load_is_unknown(tmp_path, cores):
    set_thread_spinning(tmp_path / "none")
    assert [os.environ.get(name) for name in NAMES] == ["PASSIVE", None]


def test_thread_counts_by_level_are_accepted(tmp_path, cores, monkeypatch):
    """OpenMP takes a list, one for each level of nesting; a command must begin all the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1,1")
    (tmp_path / "loadavg").write_text("0.10 0.10 0.10 1/200 42")
    set_thread_spinning(tmp_path / "loadavg")
    assert [os.environ.get(name) for name in NAMES] == ["PASSIVE", None]
