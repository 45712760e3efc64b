"""`ragblend tune` chooses by its measurements, and changes nothing on noise."""

import pytest

from ragblend.engine.selection import METHODS
from ragblend.kvstore.errors import UsageError
from ragblend.measuring import tune
from ragblend.measuring.data import Question
from ragblend.measuring.records import Journal, Record
from ragblend.measuring.variants import Variant

REUSE, CURRENT = Variant("reuse"), Variant("epic", 0.15)
GOOD, CHEAP = Variant("good", 0.15), Variant("good", 0.05)
VARIANTS = (REUSE, CURRENT, GOOD, CHEAP)


class Bench:
    """Stands in for `quality.run`: a record a (question, variant) with a divergence of our choice, 1 s each."""

    def __init__(self, kl, keeps=lambda place, variant: None):
        self.kl, self.keeps, self.now, self.measured, self.warmed = kl, keeps, 0.0, [], []

    def run(self, engine, questions, variants, journal, should_stop, progress, warm, **options):
        self.warmed += [warm] * any(
            (each.digest, variants[0].method, None) not in journal for each in questions
        )
        for place, question in enumerate(questions):
            todo = [each for each in variants if (question.digest, each.method, each.ratio) not in journal]
            if todo and should_stop():
                return len(questions) - place
            for variant in todo:
                self.now += 1
                self.measured.append((question.index, variant))
                journal.add(self.record(question, variant))
        return 0

    def record(self, question, variant):
        return Record(
            question=question.digest, method=variant.method, ratio=variant.ratio, kl=self.kl(question.index, variant),
            top1=1.0, exact_match=True, gold_match=False, f1=0.0, rouge_l=0.0, recomputed_fraction=variant.ratio or 0.0,
            ttft_ms=10.0, full_ttft_ms=40.0, prompt_tokens=100, answer="",
            figures_kept=self.keeps(question.index, variant), figures_other=False,
        )  # fmt: skip


@pytest.fixture
def questions():
    return [Question(place, f"question {place}", ("passage",), ("answer",)) for place in range(40)]


@pytest.fixture
def find(questions, tmp_path, monkeypatch):
    """find(kl, ...) -> (verdict, bench)."""

    def find(
        kl, variants=VARIANTS, current=CURRENT, seconds=10_000, most_ratio=0.15, asked=questions, **more
    ):
        bench = Bench(kl, **more)
        monkeypatch.setattr(tune.quality, "run", bench.run)
        journal = Journal(tmp_path / "journal.jsonl")
        limits = most_ratio, journal, seconds
        return tune.find_best(None, asked, variants, current, *limits, clock=lambda: bench.now), bench

    return find


def by_method(table):
    """Divergences that differ from question to question in the same way for all."""
    return lambda place, variant: table[variant] * (1 + place % 5)


@pytest.mark.parametrize(
    ("kl", "loses_figures", "best", "better", "reason"),
    [
        ({REUSE: 0.4, CURRENT: 0.3, GOOD: 0.1, CHEAP: 0.2}, None, GOOD, True, "better: 0.33 times its divergence"),
        (
            lambda place, variant: {REUSE: 0.5, CURRENT: 0.3, CHEAP: 0.5}.get(variant, 0.4 if place % 2 else 0.19),
            None, GOOD, False, "more minutes may tell",
        ),
        ({REUSE: 0.04, CURRENT: 0.01, GOOD: 0.0001, CHEAP: 0.03}, GOOD, CURRENT, False, "the current method is"),
        (
            {REUSE: 0.2, CURRENT: 0.0001, GOOD: 0.01, CHEAP: 0.2}, CURRENT, GOOD, True,
            "loses figures in 10 of 40 answers, good 0.15 in 0",
        ),
    ],
    ids=["clearly better", "by a hair", "lower KL but lost figures", "the current one loses figures"],
)  # fmt: skip
def test_the_best_variant_is_chosen(find, kl, loses_figures, best, better, reason) -> None:
    """Figures, lost here in every fourth answer, count before divergence."""
    kl = kl if callable(kl) else by_method(kl)
    verdict, _ = find(kl, keeps=lambda place, variant: variant != loses_figures or place % 4 != 0)
    assert (verdict.best, verdict.better, verdict.questions) == (best, better, 40)
    assert reason in verdict.reason
    assert verdict.comparison is None or verdict.comparison["against"] == "epic"


@pytest.mark.parametrize(
    ("current", "said"),
    [(Variant("full"), "full is exact"), (Variant("probe"), "has the ratio auto")],
)
def test_an_incomparable_variant_is_replaced_only_on_request(find, current, said) -> None:
    """Docs say that nothing is replaced unless it is shown to be better; this was, without a comparison."""
    table = {REUSE: 0.4, GOOD: 0.1, CHEAP: 0.2}
    verdict, _ = find(by_method(table), variants=tuple(table), current=current)
    assert (verdict.best, verdict.better, verdict.on_request) == (GOOD, False, True)
    assert said in verdict.reason
    assert "first token 4.0 times faster" in verdict.reason


def test_a_method_with_parameters_is_compared_as_any_other(find) -> None:
    """A method with parameters was "not one to compare with", and replaced without a comparison."""
    current = tune.current_variant("a3:kernel=1", 0.15)
    assert current == Variant("a3:kernel=1", 0.15)
    assert current in tune.candidates(METHODS, 0.15, current)
    table = {REUSE: 0.4, current: 0.1, GOOD: 0.3, CHEAP: 0.3}
    verdict, _ = find(by_method(table), variants=tuple(table), current=current)
    assert (verdict.best, verdict.better) == (current, False)
    anew = [Question(place, f"another {place}", ("passage",), ("answer",)) for place in range(8)]
    verdict, _ = find(by_method(table | {current: 0.9}), tuple(table), current, asked=anew)
    assert (verdict.better, verdict.comparison["against"]) == (True, "a3:kernel=1")


def test_clear_losers_are_dropped_early(find) -> None:
    losers = [Variant(f"loser{n}", 0.15) for n in range(5)]
    table = {REUSE: 0.4, CURRENT: 0.2, GOOD: 0.1, **dict.fromkeys(losers, 0.9)}
    verdict, bench = find(by_method(table), variants=tuple(table))
    asked = {variant: sum(each == variant for _, each in bench.measured) for variant in table}
    assert asked[GOOD] == asked[CURRENT] == asked[REUSE] == 40
    assert {asked[loser] for loser in losers} == {8}
    assert {row["method"] for row in verdict.dropped} == {loser.method for loser in losers}
    assert {row["n"] for row in verdict.dropped} == {8}
    assert {row["n"] for row in verdict.rows} == {40}


def test_the_time_limit_holds_and_a_second_run_resumes(find) -> None:
    kl = by_method({REUSE: 0.4, CURRENT: 0.3, GOOD: 0.1, CHEAP: 0.2})
    first, bench = find(kl, seconds=30)
    assert 30 <= first.seconds < 34
    assert first.questions == 8
    before = bench.measured
    second, bench = find(kl, seconds=30)
    assert second.questions > first.questions
    assert not set(before) & set(bench.measured)


def test_too_few_questions_are_refused(questions, monkeypatch) -> None:
    monkeypatch.setattr(tune.quality, "run", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(UsageError, match="there are 3 questions; 6 are the fewest"):
        tune.find_best(None, questions[:3], VARIANTS, CURRENT, 0.15, None, 60)


def test_candidates_are_all_policies_but_the_controls() -> None:
    current = Variant("prophet", 0.4)
    found = tune.candidates(METHODS, 0.15, current)
    methods = {variant.method for variant in found}
    assert methods == {name for name, p in METHODS.items() if p.fixed_ratio is None} - {"random", "auto"} | {
        "reuse"
    }
    assert {variant.ratio for variant in found if variant.method == "cacheblend"} == {0.05, 0.1, 0.15}
    assert current in found
    control = Variant("random", 0.4)
    assert control in tune.candidates(METHODS, 0.15, control), "it may stand"
    assert Variant("full") not in tune.candidates(METHODS, 0.15, Variant("full"))
    assert Variant("prophet") not in tune.candidates(METHODS, 0.15, Variant("prophet"))  # its ratio is `auto`
    assert [v.ratio for v in tune.candidates({"epic": METHODS["epic"]}, 0.0, REUSE)] == [None]
    with pytest.raises(UsageError, match=r"--most-ratio is 1\.5"):
        tune.candidates(METHODS, 1.5, REUSE)


def test_a_resumed_run_warms_up_before_its_first_new_question(find, questions):
    """It was timed cold: methods run unrecorded before the first question, which the journal had."""
    kl = by_method({REUSE: 0.4, CURRENT: 0.3, GOOD: 0.1, CHEAP: 0.2})
    find(kl, asked=questions[:8])
    _, bench = find(kl, asked=questions[:16])
    assert bench.warmed[0] and not any(bench.warmed[1:]) and len(bench.warmed) == 2
