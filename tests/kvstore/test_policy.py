"""Eviction: entries and policies as pure functions, against formulas written out by hand."""

import json
import math
from dataclasses import asdict

import pytest

from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.policy import (
    EVICTION_POLICIES,
    Entry,
    PrefillProfile,
    clock_after,
    computed,
    eviction_policy_named,
    joined,
    ranked,
    used,
)


def test_a_decaying_count_is_the_sum_of_decayed_retrievals():
    half_life, times = 7.0, [1.0, 2.0, 9.0, 9.5, 30.0]
    entry = Entry("a", 10)
    for at in times:
        entry = used(entry, at, half_life)
    assert entry.frequency == pytest.approx(sum(2 ** ((at - 30.0) / half_life) for at in times))
    assert entry.used_at == 30.0


@pytest.mark.parametrize("half_life", [None, 5.0])
def test_joined_counts_equal_counting_in_one_place(half_life):
    here, apart, whole = Entry("a", 10), Entry("a", 0), Entry("a", 10)
    for at in (1.0, 2.0, 4.0, 9.0, 9.0, 11.0):
        whole = used(whole, at, half_life)
        if at < 5:
            here = used(here, at, half_life)
        else:
            apart = used(apart, at, half_life)
    found = joined(here, apart, half_life)
    assert (found.nbytes, found.used_at) == (10, 11.0)
    assert found.frequency == pytest.approx(whole.frequency)


def test_a_clock_that_goes_back_does_not_change_a_count():
    entry = used(used(Entry("a", 10), 1e9, 10.0), 5.0, 10.0)
    assert (entry.used_at, entry.frequency) == (1e9, 2.0)


def test_the_cost_is_the_mean_over_computations():
    entry = Entry("a", 10)
    for cost in (3.0, 1.0, 8.0):
        entry = computed(entry, cost)
    assert (entry.cost, entry.computations) == (pytest.approx(4.0), 3)


ENTRY = Entry("a", nbytes=2000, used_at=50.0, tokens=100, frequency=3.0, cost=1.5, computations=2)


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("lru", 50.0),
        ("gdsf", 7.0 + 3.0 / 100),
        ("pgdsf", 7.0 + 3.0 * 1.5),
    ],
)
def test_each_policy_is_its_formula(name, priority):
    assert ranked(ENTRY, EVICTION_POLICIES[name], clock=7.0).priority == pytest.approx(priority)


def test_an_unknown_policy_is_refused_with_the_known_ones():
    assert eviction_policy_named("lru") is EVICTION_POLICIES["lru"]
    with pytest.raises(UsageError, match="'lrv' is unknown; there are lru, gdsf, pgdsf"):
        eviction_policy_named("lrv")


def test_unknown_costs_and_sizes_give_finite_priorities():
    for policy in EVICTION_POLICIES.values():
        assert math.isfinite(ranked(Entry("a", 0), policy, 0.0).priority)


def test_the_clock_is_the_largest_evicted_priority_and_never_goes_back():
    low, high = Entry("a", 1, priority=2.0), Entry("b", 1, priority=5.0)
    assert clock_after(0.0, [high, low]) == 5.0
    assert clock_after(9.0, [high, low]) == 9.0
    assert clock_after(4.0, []) == 4.0


# --- prefill times between and beyond the measured ones


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
