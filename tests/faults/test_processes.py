"""Eight processes on two stores, of which some are killed; and two hundred concurrent first openings."""

import pytest


@pytest.mark.timeout(1800)
def test_eight_processes_one_of_them_killed_now_and_then(lab, tmp_path, count):
    """Full: ten minutes, one killed each ten seconds."""
    seconds, every_s = count(600, 4), count(10, 1)
    totals = lab.run(
        "fault_processes:run_and_kill",
        seconds + 900,
        folder=tmp_path / "home",
        seconds=seconds,
        every_s=every_s,
        workers=8,
        seed=1,
    )
    print(totals)
    assert totals["killed"] >= 2
    assert totals["acknowledged"] > 8


@pytest.mark.timeout(1800)
def test_processes_that_open_a_new_store_together(lab, tmp_path, count):
    races = count(200, 3)
    assert lab.run(
        "fault_processes:open_together", 1700, folder=tmp_path / "races", races=races, processes=6, seed=1
    ) == {"races": races}
