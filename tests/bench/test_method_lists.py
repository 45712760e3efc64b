"""`--methods all`: what it stands for, by itself and in a list."""

from ragblend.app.bench.quality_report import with_all
from ragblend.app.bench.variants import Variant, parse_variants
from ragblend.engine.selection import METHODS, WITHOUT_RATIO


def variants(methods):
    return parse_variants(with_all(methods, METHODS), "0.1", METHODS, WITHOUT_RATIO)


def test_all_is_every_policy_but_those_that_are_full_prefill_by_other_ways() -> None:
    assert {each.method for each in variants("all")} == METHODS.keys() - {"prefix", "recompute"}


def test_all_may_stand_in_a_list() -> None:
    """It was "there is no method 'all'" beside anything else, though the help offers it."""
    more = Variant("probe:passes=2,shift=none", 0.1)
    everything = variants("all")
    assert variants("all,probe:passes=2,shift=none") == (*everything, more)
    assert variants("probe:passes=2,shift=none, all") == (more, *everything)
    assert variants("all,full,all") == everything
    assert variants("full,reuse") == (Variant("full"), Variant("reuse"))
