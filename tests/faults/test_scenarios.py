"""Stores that are killed, cut off, raced and broken, in the laboratory; each scenario prints what it counted."""

import errno

import pytest
from fault_mutations import MUTATIONS
from fault_values import FULL, OracleError

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture
def run(lab, tmp_path):
    """run(scenario, **arguments): what it counted; OracleError where its oracle speaks."""

    def run(scenario, **arguments):
        totals = lab.run(scenario, 1700, folder=tmp_path / "folder", **arguments)
        print(scenario, arguments, totals)
        return totals

    return run


# --- killed and failing calls

WHAT = ["put", "replace", "delete", "gc", "open", "first open", "open a ruined index"]
# Reduced, every so manieth of the calls that change something is killed, or fails: opening makes hundreds of them.
STRIDES = {
    "put": (2, 5),
    "replace": (6, 11),
    "delete": (2, 7),
    "gc": (6, 11),
    "open": (16, 40),
    "first open": (32, 50),
    "open a ruined index": (32, 50),
}
ERRORS = [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.EIO, True), (errno.EIO, False)]
FAILURES = [
    (what, *error)
    for number, what in enumerate(WHAT)
    for other, error in enumerate(ERRORS)
    if FULL or (number + other) % 2 == 0  # reduced, each of an error and of lasting in turn
]


@pytest.fixture
def traced(lab, run):
    """Skips where no child can be traced."""
    reason = lab.run("fault_system_calls:unavailable", 280)
    if reason:
        pytest.skip(reason)
    return run


@pytest.mark.parametrize("what", WHAT)
def test_killed_at_every_system_call(traced, count, what):
    stride = count(1, STRIDES[what][0])
    totals = traced("fault_system_calls:kill_at_every_call", what=what, every=FULL, stride=stride)
    assert totals["killed"] > (0 if what == "open" else 2)  # a sound store is only read


@pytest.mark.parametrize(("what", "code", "lasting"), FAILURES)
def test_failed_at_every_system_call(traced, count, what, code, lasting):
    how = {"code": code, "lasting": lasting, "all_calls": FULL, "stride": count(1, STRIDES[what][1])}
    assert traced("fault_system_calls:fail_at_every_call", what=what, **how)["failed"] > 0


# --- power cuts, processes and threads


def test_what_was_acknowledged_survives_a_power_cut(run, count):
    """Every value in the index exists, because of the fsyncs."""
    steps = count(300, 16)
    totals = run("fault_power:cut", steps=steps, seed=1, one_in=count(2, 8))
    assert totals["cuts"] == steps
    assert totals["inside"] > 5


def test_an_index_that_lost_its_newest_rows(run, count):
    steps = count(200, 8)
    assert run("fault_power:cut_with_an_older_index", steps=steps, seed=2)["kept"] > steps


def test_eight_processes_one_of_them_killed_now_and_then(run, count):
    """Full: ten minutes, one killed each ten seconds."""
    seconds, every_s = count(600, 4), count(10, 1)
    totals = run("fault_processes:run_and_kill", seconds=seconds, every_s=every_s, workers=8, seed=1)
    assert totals["killed"] >= 2
    assert totals["acknowledged"] > 8


def test_processes_that_open_a_new_store_together(run, count):
    races = count(200, 3)
    assert run("fault_processes:open_together", races=races, processes=6, seed=1) == {"races": races}


def test_interleavings_of_changing_and_loading(run, count):
    """Loading while values are evicted, deleted and replaced."""
    rounds = count(10_000, 150)
    totals = run("fault_interleaving:interleave", rounds=rounds, seed=1)
    assert totals["switches"] > 10 * rounds
    assert totals["hits"] > rounds / 2
    assert totals["misses"] > rounds / 10
    assert totals["evicted"] > rounds / 10


# --- a store with one line taken out: the oracle must notice, or the suite proves nothing

CUT = {"steps": 5, "seed": 1, "one_in": 1000}
BROKEN = {
    "no file fsync": ("fault_power:cut", CUT, "bad-header"),
    "no folder fsync": ("fault_power:cut", CUT, "is lost"),
    # A value that is replaced between finding its path and opening it is there all the time.
    "no second look": ("fault_interleaving:interleave", {"rounds": 1000, "seed": 4}, "is lost"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_without_the_line_the_scenarios_oracle_speaks(run, name):
    scenario, arguments, seen = BROKEN[name]
    with pytest.raises(OracleError, match=seen):
        run(scenario, mutation=name, **arguments)
