"""A power cut keeps what was fsynced: every value in the index exists, because of the fsyncs."""

import pytest
from fault_values import OracleError


@pytest.mark.timeout(1800)
def test_what_was_acknowledged_survives_a_power_cut(lab, tmp_path, count):
    steps = count(300, 16)
    totals = lab.run(
        "fault_power:cut", 1700, folder=tmp_path / "disk", steps=steps, seed=1, one_in=count(2, 8)
    )
    print(totals)
    assert totals["cuts"] == steps
    assert totals["inside"] > 5


@pytest.mark.timeout(1800)
def test_an_index_that_lost_its_newest_rows(lab, tmp_path, count):
    steps = count(200, 8)
    totals = lab.run(
        "fault_power:cut_with_an_older_index", 1700, folder=tmp_path / "disk", steps=steps, seed=2
    )
    print(totals)
    assert totals["kept"] > steps


@pytest.mark.parametrize(
    ("mutation", "seen"), [("no file fsync", "bad-header"), ("no folder fsync", "is lost")]
)
def test_without_the_fsync_the_oracle_speaks(lab, tmp_path, mutation, seen):
    with pytest.raises(OracleError, match=seen):
        lab.run(
            "fault_power:cut", 250, folder=tmp_path / "disk", steps=5, seed=1, one_in=1000, mutation=mutation
        )
