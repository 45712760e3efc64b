"""Put, delete, gc and open, killed or failing at each of their system calls."""

import errno

import pytest

WHAT = ["put", "replace", "delete", "gc"]
OPENS = ["open", "first open", "open a ruined index"]
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


@pytest.fixture
def traced_lab(lab):
    """Skips where no child can be traced."""
    reason = lab.run("fault_system_calls:unavailable", 280)
    if reason:
        pytest.skip(reason)
    return lab


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", [*WHAT, *OPENS])
def test_killed_at_every_system_call(traced_lab, tmp_path, count, what):
    totals = traced_lab.run(
        "fault_system_calls:kill_at_every_call",
        1700,
        folder=tmp_path / "case",
        what=what,
        every=count(True, False),
        stride=count(1, STRIDES[what][0]),
    )
    print(what, totals)
    assert totals["killed"] > (0 if what == "open" else 2)  # a sound store is only read


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("what", [*WHAT, *OPENS])
def test_failed_at_every_system_call(traced_lab, tmp_path, count, what, code, lasting):
    totals = traced_lab.run(
        "fault_system_calls:fail_at_every_call",
        1700,
        folder=tmp_path / "case",
        what=what,
        code=code,
        lasting=lasting,
        all_calls=count(True, False),
        stride=count(1, STRIDES[what][1]),
    )
    print(what, totals)
    assert totals["failed"] > 0
