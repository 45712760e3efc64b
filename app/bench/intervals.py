"""Percentile bootstrap intervals over prompts, seeded, so that the same records give the same interval.

Every method is measured on the same prompts, so differences and ratios are resampled in pairs: a hard prompt
is hard for both, and its difficulty cancels out.
"""

from collections.abc import Callable, Sequence
from typing import Any

RESAMPLES = 5000
LEVEL = 0.95
Interval = tuple[float, float]


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of the mean; None for fewer than two values, of which nothing can be said."""
    return _interval([values], lambda mean: mean, seed)


def difference_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) - mean(others); both in the same order of prompts."""
    return _interval([values, others], lambda mean, other: mean - other, seed)


def ratio_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) / mean(others), in pairs; None if an `others` is not above 0."""
    if min(others, default=0.0) <= 0:
        return None
    return _interval([values, others], lambda mean, other: mean / other, seed)


def recovery_interval(kl: Sequence[float], kl_reuse: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of 1 - mean(kl)/mean(kl_reuse); None if reuse does not diverge on every prompt."""
    ends = ratio_interval(kl, kl_reuse, seed)
    return None if ends is None else (1 - ends[1], 1 - ends[0])


def _interval(columns: Sequence[Sequence[float]], of_means: Callable[..., Any], seed: int) -> Interval | None:
    from scipy.stats import bootstrap

    if len(columns[0]) < 2:
        return None
    found = bootstrap(
        columns,
        lambda *drawn, axis: of_means(*(column.mean(axis=axis) for column in drawn)),
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        paired=len(columns) > 1,
        rng=seed,
    ).confidence_interval
    return float(found.low), float(found.high)
