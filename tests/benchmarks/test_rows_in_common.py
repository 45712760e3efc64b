"""Rows in common: for pairs of questions, and without those that all questions have."""

import pytest

from benchmarks.rows_in_common import chosen, in_common
from ragblend import Engine


def test_pairs_are_compared_with_and_without_common_rows() -> None:
    assert in_common([[{1, 2, 3, 4}, {1, 2, 5, 6}, {1, 3, 5, 7}]]) == (
        pytest.approx(0.5),
        pytest.approx(1 / 3),
    )
    assert in_common([[{1, 2}, {1, 2}]]) == (1.0, 1.0)


def test_question_aware_methods_select_other_rows_per_question(smollm2_home) -> None:
    """On the bundled model: first tokens of passages are the same for all (but for ties), what is looked at is not."""
    engine = Engine.open(home=smollm2_home)
    epic, probe = (in_common(list(chosen(engine, method, 0.15, 1)))[0] for method in ("epic", "probe"))
    assert epic > 0.97
    assert probe < 0.9
