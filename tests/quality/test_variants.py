"""Parsing `--methods`, `--ratios`, `--compare` and lists of numbers."""

import pytest

from ragblend.engine.selection import METHODS, WITHOUT_RATIO
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.variants import (
    Variant,
    expand_all,
    parse_choices,
    parse_counts,
    parse_pairs,
    parse_variants,
)

A5, A15, B5, B15 = (Variant(name, ratio) for name in "ab" for ratio in (0.05, 0.15))
REUSE = Variant("reuse")
RUN = (Variant("full"), REUSE, A5, A15, B5, B15, Variant("c:m=1,n=2", 0.15))


@pytest.mark.parametrize(
    ("texts", "pairs"),
    [
        ("a,b", ((A5, B5), (A15, B15))),
        ("a,b; a@0.05,b@0.05; b,a", ((A5, B5), (A15, B15), (B5, A5), (B15, A15))),
        ("a@0.05,b@0.15", ((A5, B15),)),
        ("a@0.05, b", ((A5, B5),)),
        ("a,reuse", ((A5, REUSE), (A15, REUSE))),
        ("reuse,b@0.15", ((REUSE, B15),)),
        ("c:m=1,n=2,a", ((RUN[-1], A15),)),
        ("a@0.05,c:m=1,n=2@0.15", ((A5, RUN[-1]),)),
        ("a@0.05,a@0.15", ((A5, A15),)),
    ],
)
def test_pairs_are_at_equal_ratios_unless_both_are_named_and_add_up(texts, pairs) -> None:
    assert parse_pairs(texts.split(";"), RUN) == pairs


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (("a", "a,z", "a@0.3,b", "a@x,b", "", "a,b,c"), "--compare .*there are full, reuse, a@0.05"),
        (("a,a", "a@0.05,c:m=1,n=2"), "no ratio in common"),
    ],
)
def test_pairs_that_cannot_be_compared_are_refused(texts, said) -> None:
    for text in texts:
        with pytest.raises(UsageError, match=said):
            parse_pairs([text], RUN)


def variants(methods):
    return parse_variants(expand_all(methods, METHODS), "0.1", METHODS, WITHOUT_RATIO)


def test_all_is_every_policy_that_can_differ_and_can_be_part_of_a_list() -> None:
    """It was "there is no method 'all'" beside anything else, though the help offers it."""
    more = Variant("cacheblend:check_layer=2,shares=3/1", 0.1)
    everything = variants("all")
    exact = {"prefix", "recompute", "exact", "auto"}
    assert {each.method for each in everything} == METHODS.keys() - exact
    assert variants("all,cacheblend:check_layer=2,shares=3/1") == (*everything, more)
    assert variants("cacheblend:check_layer=2,shares=3/1, all") == (more, *everything)
    assert variants("all,full,all") == everything
    assert variants("full,reuse") == (Variant("full"), Variant("reuse"))


def test_methods_and_ratios_make_variants_once() -> None:
    known = {"full", "reuse", "random"}
    made = parse_variants("full, reuse,random,random", "0.05,0.15,0.05", known, {"full", "reuse"})
    assert made == (Variant("full"), Variant("reuse"), Variant("random", 0.05), Variant("random", 0.15))
    assert parse_variants("reuse", "", {"reuse"}, {"reuse"}) == (Variant("reuse"),)  # no ratio is needed


def test_methods_may_have_parameters() -> None:
    """A comma separates methods and parameters alike: what has an equals sign belongs to the method before it."""
    known = {"full", "cacheblend", "a3"}
    names = ["full", "cacheblend", "cacheblend:check_layer=2,shares=3/1", "a3:kernel=1", "a3"]
    made = parse_variants(",".join(names), "0.1", known, {"full"})
    assert [str(each) for each in made] == [names[0], *(f"{name} 0.1" for name in names[1:])]
    assert made[2].arguments == {"method": "cacheblend:check_layer=2,shares=3/1", "ratio": 0.1}
    for wrong, said in (("a3:kernl=1", "kernel"), ("a3:kernel=2", "odd"), ("x:kernel=1", "'x:kernel=1'")):
        with pytest.raises(UsageError, match=said):
            parse_variants(wrong, "0.1", known, {"full"})


@pytest.mark.parametrize(
    ("methods", "ratios", "said"),
    [
        ("", "0.1", "--methods"),
        ("x", "0.1", "'x'"),
        ("r", "", "--ratios"),
        ("r", "nan", "nan"),
        ("r", "15%", "15%"),
    ],
)
def test_wrong_methods_and_ratios_are_named(methods, ratios, said) -> None:
    with pytest.raises(UsageError, match=said):
        parse_variants(methods, ratios, {"r"}, set())


def test_counts_and_choices() -> None:
    assert parse_counts("3, 6,3", "--chunks") == (3, 6)
    assert parse_choices("cold", "--caches", ("warm", "cold")) == ("cold",)
    for wrong in ("0", "-1", "1.5", "²"):
        with pytest.raises(UsageError, match="--chunks"):
            parse_counts(wrong, "--chunks")
