"""Killed at random moments: nothing acknowledged is lost, nothing wrong is served, nothing is left over."""

import pytest


@pytest.mark.timeout(3600)
def test_killed_at_random_moments(lab, root, count):
    kills = count(1000, 60)
    totals = lab.run("fault_killing:kill", 3500, root=root, kills=kills, seed=1)
    assert totals["killed"] == kills
    assert totals["acknowledged"] > kills
    assert totals["held"] > kills
