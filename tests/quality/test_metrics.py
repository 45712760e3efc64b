"""Metrics against values calculated by hand."""

import math

import pytest
import torch

from ragblend.measuring import metrics


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, sat!", "cat sat"),
        ("An apple a day", "apple day"),
        ("theatre", "theatre"),  # an article inside a word stays
        ("U.S.A.", "usa"),
        ("\n", ""),
    ],
)
def test_normalisation_is_squads(text, normal) -> None:
    assert metrics.normalise(text) == normal


def test_gold_match_takes_any_of_the_answers_and_only_whole_ones() -> None:
    assert metrics.gold_match("The Peace Corps.", ["army", "Peace Corps"])
    assert not metrics.gold_match("Peace Corps of America", ["Peace Corps"])


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("asian man records", ["Asian Man Records"], 1),
        ("man records label", ["Asian Man Records"], 2 / 3),  # P = R = 2/3
        ("records records records", ["Asian Man Records"], 1 / 3),  # a repeated word counts once
        ("it is Asian Man Records", ["Asian Man Records"], 2 * (3 / 5) * 1 / (3 / 5 + 1)),
        ("nothing alike", ["Asian Man Records"], 0),
        ("", ["Asian Man Records"], 0),
        ("the", ["a"], 1),  # both empty once normalised
        ("green tea", ["black coffee", "green"], 2 / 3),  # the nearest answer
    ],
)
def test_f1_by_hand(answer, gold, value) -> None:
    assert metrics.f1(answer, gold) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("police killed the gunman", ["police kill the gunman"], 1.0),  # the stemmer
        ("police the gunman killed", ["police killed the gunman"], 3 / 4),  # in order are 3 of 4
        ("a b c d x", ["a b c d"], 2 * (4 / 5) / (4 / 5 + 1)),
        ("", ["something"], 0),
        ("tea", ["coffee", "tea"], 1.0),
    ],
)
def test_rouge_l_by_hand(answer, gold, value) -> None:
    assert metrics.rouge_l(answer, gold) == pytest.approx(value)


@pytest.mark.parametrize(
    ("answer", "required", "share"),
    [
        ("The numbers are 4,345,669 and 1241016.", ["4345669", "1241016"], 1),
        ("4345669", ["4345669", "1241016"], 0.5),
        ("It was 1931.", ["31"], 0),  # a part of a word is not the word
        ("the quiet lamp burns", ["Quiet Lamp"], 1),
        ("quiet old lamp", ["Quiet Lamp"], 0),
        ("HJRWT, XSGMT", ["XSGMT", "HJRWT"], 1),
        ("1234567,7654321", ["1234567", "7654321"], 1),  # no space: they were one word, 12345677654321
        ("HJRWT,XSGMT;ABCDE/FGHIJ\nKLMNO", ["XSGMT", "HJRWT", "ABCDE", "FGHIJ", "KLMNO"], 1),
        ("12345,67890,24680", ["67890", "12345", "24680"], 1),
        ("4,345,669,1241016", ["4345669", "1241016"], 1),
        ("It was 1,931.", ["1931"], 1),
        ("It was 1,931.", ["931"], 0),
        ("It was 1931.", ["1,931"], 1),
        ("1,2345", ["2345", "12345"], 0.5),  # groups of thousands have three figures
        ("It is 4.5, from 12:30 on.", ["45", "1230"], 0),
        ("It is 4.5, from 12:30.", ["4.5", "12:30"], 1),
        ("", ["x"], 0),
        ("anything", [], None),
    ],
)
def test_required_strings_are_found_as_whole_words(answer, required, share) -> None:
    assert metrics.found_share(answer, required) == share


def test_kl_by_hand() -> None:
    reference = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    first = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert metrics.kl_divergence(reference, other) == pytest.approx(first / 2, rel=1e-6)
    assert metrics.kl_divergence(other, reference) != pytest.approx(first / 2, rel=1e-2), "of direction"


def test_kl_ignores_shifted_logits_and_impossible_tokens() -> None:
    reference = torch.tensor([[2.0, 1.0, -torch.inf]])
    assert metrics.kl_divergence(reference, reference + 1000) == pytest.approx(0, abs=1e-12)
    assert metrics.kl_divergence(reference, reference) == 0
    assert math.isfinite(metrics.kl_divergence(reference, torch.tensor([[2.0, 1.0, 5.0]])))


def test_kl_of_nearly_equal_logits_is_exact() -> None:
    reference = torch.zeros(1, 50_000)
    other = reference.clone()
    other[0, 0] = 1e-2
    # To second order KL = p(1-p) d^2 / 2 with p = 1/50000; float32 sums of 50,000 terms would drown it.
    p = 1 / 50_000
    assert metrics.kl_divergence(reference, other) == pytest.approx(p * (1 - p) * 1e-4 / 2, rel=1e-2)


def test_kl_of_invalid_logits_is_not_0() -> None:
    """max(0.0, nan) is 0.0: logits of NaN looked perfect."""
    reference, spoilt = torch.zeros(2, 3), torch.zeros(2, 3)
    spoilt[1, 2] = torch.nan
    assert math.isnan(metrics.kl_divergence(reference, spoilt))
    assert math.isnan(metrics.kl_divergence(spoilt, reference))
    assert metrics.kl_divergence(reference, torch.tensor([[0.0, 0.0, -torch.inf]] * 2)) == math.inf


def test_top1_counts_the_positions_that_agree() -> None:
    reference = torch.tensor([[1.0, 2.0], [2.0, 1.0], [0.0, 1.0], [3.0, 0.0]])
    other = torch.tensor([[1.0, 2.0], [1.0, 2.0], [0.0, 9.0], [0.1, 0.0]])
    assert metrics.top1_agreement(reference, other) == 0.75


def test_recovery_is_1_for_full_0_for_reuse_and_unknown_without_divergence() -> None:
    assert metrics.recovery(0.0, 0.2) == 1
    assert metrics.recovery(0.2, 0.2) == 0
    assert metrics.recovery(0.3, 0.2) == pytest.approx(-0.5)
    assert metrics.recovery(0.0, 0.0) is None
