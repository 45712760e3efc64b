"""`--compare` names two variants of the run; the comparison is the paired bootstrap's."""

import pytest

from ragblend.app.bench.intervals import ratio_interval
from ragblend.app.bench.pairs import parse_pairs
from ragblend.app.bench.variants import Variant
from ragblend.kvstore.errors import UsageError

A5, A15, B5, B15 = (Variant(name, ratio) for name in "ab" for ratio in (0.05, 0.15))
REUSE = Variant("reuse")
RUN = (Variant("full"), REUSE, A5, A15, B5, B15, Variant("refine"), Variant("c:m=1,n=2", 0.15))


@pytest.mark.parametrize(
    ("text", "pairs"),
    [
        ("a,b", ((A5, B5), (A15, B15))),
        ("a@0.05,b@0.15", ((A5, B15),)),
        ("a@0.05, b", ((A5, B5),)),
        ("a,reuse", ((A5, REUSE), (A15, REUSE))),
        ("reuse,b@0.15", ((REUSE, B15),)),
        ("c:m=1,n=2,a", ((RUN[-1], A15),)),
        ("a@0.05,c:m=1,n=2@0.15", ((A5, RUN[-1]),)),
        ("a@0.05,a@0.15", ((A5, A15),)),
    ],
)
def test_pairs_are_at_equal_ratios_unless_both_are_named(text, pairs) -> None:
    assert parse_pairs([text], RUN) == pairs


def test_pairs_add_up_without_repeats() -> None:
    assert parse_pairs(["a,b", "a@0.05,b@0.05", "b,a"], RUN) == ((A5, B5), (A15, B15), (B5, A5), (B15, A15))


@pytest.mark.parametrize("text", ["a", "a,z", "a@0.3,b", "a@x,b", "", "a,refine", "a,b,c"])
def test_what_the_run_does_not_have_is_named(text) -> None:
    with pytest.raises(UsageError, match=r"--compare .*there are full, reuse, a@0.05"):
        parse_pairs([text], RUN)


@pytest.mark.parametrize("text", ["a,a", "a@0.05,c:m=1,n=2"])
def test_nothing_in_common_is_named(text) -> None:
    with pytest.raises(UsageError, match="no ratio in common"):
        parse_pairs([text], RUN)


def test_the_interval_of_a_ratio_is_paired() -> None:
    hard_and_easy = [0.01, 0.5, 2.0, 0.1, 0.03, 0.7]
    halves = [value / 2 for value in hard_and_easy]
    assert ratio_interval(halves, hard_and_easy) == pytest.approx((0.5, 0.5))  # unpaired it would be wide
    low, high = ratio_interval([0.1, 0.2, 0.3], [0.3, 0.2, 0.2])
    assert low < 6 / 7 < high
    assert ratio_interval([0.1], [0.2]) is None
    assert ratio_interval([0.1, 0.2], [0.0, 0.2]) is None
