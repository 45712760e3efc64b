"""One put, delete, gc and open, killed or failed at each system call that they make."""

import errno

import pytest

WHAT = ["put", "replace", "delete", "gc"]
OPENS = ["open", "first open", "open a ruined index"]


@pytest.fixture
def traced_lab(lab):
    """Skips where no child can be traced."""
    reason = lab.run("fault_system_calls:unavailable", 30)
    if reason:
        pytest.skip(reason)
    return lab


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("what", [*WHAT, *OPENS])
def test_killed_at_every_system_call(traced_lab, tmp_path, count, what):
    """Reduced: at every call that changes something."""
    totals = traced_lab.run(
        "fault_system_calls:kill_at_every_call",
        1700,
        folder=tmp_path / "case",
        what=what,
        every=count(True, False),
    )
    print(what, totals)
    assert totals["killed"] > 5


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
    )
    print(what, totals)
    assert totals["failed"] > 2
