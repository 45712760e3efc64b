"""Overwritten pages of library.sqlite: readable rows are kept, and lost ones are named."""

from collections import Counter

from fault_library import make_library, verdict_on


def test_what_damage_leaves_is_kept_and_what_it_takes_is_named(tmp_path, count):
    sound = tmp_path / "library.sqlite"
    truth = make_library(sound)
    assert len(truth) == 72
    verdicts = Counter(
        verdict_on(sound, tmp_path / "spoilt.sqlite", truth, seed) for seed in range(count(400, 25))
    )
    print(dict(verdicts))
    assert set(verdicts) <= {"harmless", "rescued", "refused"}
    assert verdicts["rescued"] > verdicts.total() / 2
