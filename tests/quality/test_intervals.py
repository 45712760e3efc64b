"""Bootstrap intervals: close to analytic ones, and reproducible."""

import numpy as np
import pytest

from ragblend.measuring.summary import difference_interval, mean_interval, recovery_interval


def test_the_interval_of_a_mean_is_the_normal_one_for_many_values() -> None:
    values = np.random.default_rng(3).normal(10, 2, size=400)
    low, high = mean_interval(values.tolist())
    assert (low, high) == mean_interval(values.tolist(), seed=0) != mean_interval(values.tolist(), seed=1)
    half = 1.96 * values.std(ddof=1) / 20
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_pairing_takes_the_difficulty_of_the_prompt_out() -> None:
    rng = np.random.default_rng(5)
    difficulty = rng.exponential(10, size=80)
    better, worse = difficulty, difficulty + 0.1 + rng.normal(0, 0.01, size=80)
    low, high = difference_interval(better.tolist(), worse.tolist())
    assert -0.11 < low < high < -0.09
    # Shuffled, the pairs are gone, and nothing can be said any more.
    low, high = difference_interval(better.tolist(), rng.permutation(worse).tolist())
    assert low < 0 < high


def test_recovery_resamples_numerator_and_denominator_together() -> None:
    reuse = np.random.default_rng(2).exponential(1, size=75)
    low, high = recovery_interval((0.25 * reuse).tolist(), reuse.tolist())
    assert (low, high) == (pytest.approx(0.75), pytest.approx(0.75))
