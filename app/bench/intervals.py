"""Percentile bootstrap intervals over prompts, seeded, so that the same records give the same interval.

Every method is measured on the same prompts, so differences and ratios are resampled in pairs: a hard prompt
is hard for both, and its difficulty cancels out.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 5000
LEVEL = 0.95
Interval = tuple[float, float]


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of the mean; None for fewer than two values, of which nothing can be said."""
    return _interval([values], lambda means: means[0], seed)


def difference_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) - mean(others); both in the same order of prompts."""
    return _interval([values, others], lambda means: means[0] - means[1], seed)


def ratio_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) / mean(others), in pairs; None if an `others` is not above 0."""
    if min(others, default=0.0) <= 0:
        return None
    return _interval([values, others], lambda means: means[0] / means[1], seed)


def recovery_interval(kl: Sequence[float], kl_reuse: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of 1 - mean(kl)/mean(kl_reuse); None if reuse does not diverge on every prompt."""
    if min(kl_reuse, default=0.0) <= 0:
        return None
    return _interval([kl, kl_reuse], lambda means: 1 - means[0] / means[1], seed)


def _interval(
    columns: Sequence[Sequence[float]],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    seed: int,
) -> Interval | None:
    samples = np.asarray(columns, dtype=np.float64)  # (columns, n): a ragged list raises, which is our bug
    n = samples.shape[1]
    if n < 2:
        return None
    drawn = np.random.default_rng(seed).integers(0, n, size=(RESAMPLES, n))
    means = samples[:, drawn].mean(axis=-1)  # (columns, RESAMPLES), the same prompts in every column
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.percentile(statistic(means), [tail, 100 - tail])
    return float(low), float(high)
