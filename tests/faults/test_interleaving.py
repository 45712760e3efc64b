"""Loading while values are evicted, deleted and replaced, in thousands of seeded interleavings."""

import pytest
from fault_values import OracleError


@pytest.mark.timeout(1800)
def test_interleavings_of_changing_and_loading(lab, tmp_path, count):
    rounds = count(10_000, 150)
    totals = lab.run("fault_interleaving:interleave", 1700, folder=tmp_path / "kv", rounds=rounds, seed=1)
    print(totals)
    assert totals["switches"] > 10 * rounds
    assert totals["hits"] > rounds / 2
    assert totals["misses"] > rounds / 10
    assert totals["evicted"] > rounds / 10


def test_without_a_second_look_the_oracle_speaks(lab, tmp_path):
    """A value that is replaced between finding its path and opening it is there all the time."""
    with pytest.raises(OracleError, match="is lost"):
        lab.run(
            "fault_interleaving:interleave",
            280,
            folder=tmp_path / "kv",
            rounds=1000,
            seed=1,
            mutation="no second look",
        )
