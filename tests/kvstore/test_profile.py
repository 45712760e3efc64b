"""Prefill times between and beyond the measured ones; files that are no profile."""

import json
from dataclasses import asdict

import pytest

from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.policy import PrefillProfile

GRID = PrefillProfile("by hand", (0, 100), (10, 20, 40), ((1.0, 3.0, 9.0), (5.0, 7.0, 17.0)))


@pytest.mark.parametrize(
    ("cached", "new", "ms"),
    [
        (0, 10, 1.0),
        (100, 40, 17.0),
        (0, 15, 2.0),
        (50, 20, 5.0),
        (25, 30, 0.75 * 6.0 + 0.25 * 12.0),
        (0, 60, 15.0),  # the last cell goes on: 6 ms for every 20 tokens
        (200, 10, 9.0),
        (0, 1, 0.0),  # a straight line through 10 and 20 would be below nothing
    ],
)
def test_times_are_interpolated_bilinearly_and_extrapolated_linearly(cached, new, ms):
    assert GRID.ms(cached, new) == pytest.approx(ms)


def test_a_bilinear_function_is_reproduced_exactly():
    def law(cached, new):
        return 2.0 + 0.5 * new + 0.001 * cached * new

    profile = PrefillProfile.of("a law", (0, 64, 1000), (1, 64, 500, 2000), law)
    for cached, new in ((3, 17), (500, 1999), (5000, 9000)):
        assert profile.ms(cached, new) == pytest.approx(law(cached, new))


def test_the_cost_of_a_token_is_its_share():
    assert GRID.ms_per_token(0, 20) == pytest.approx(3.0 / 20)
    assert GRID.ms_per_token(100, 0) == GRID.ms(100, 0)


def test_profiles_survive_json():
    assert PrefillProfile.from_json(json.loads(json.dumps(asdict(GRID)))) == GRID


@pytest.mark.parametrize(
    "change",
    [
        {"cached_tokens": [0]},
        {"cached_tokens": [100, 0]},
        {"new_tokens": [10, 10, 40]},
        {"new_tokens": [10, 20, "40"]},
        {"new_tokens": 7},
        {"prefill_ms": [[1, 2, 3]]},
        {"prefill_ms": [[1, 2, 3], [1, 2]]},
        {"prefill_ms": [[1, 2, 3], [1, 2, float("nan")]]},
        {"prefill_ms": [[1, 2, 3], [1, 2, -1]]},
        {"prefill_ms": [[1, 2, 3], [1, 2, None]]},
        {"prefill_ms": 3},
        {"surprise": 1},
    ],
)
def test_invalid_profiles_are_refused(change):
    with pytest.raises(UsageError, match="prefill profile"):
        PrefillProfile.from_json(asdict(GRID) | change)
