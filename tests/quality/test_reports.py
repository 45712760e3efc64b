"""Tables, pictures and reports from hand-made records."""

import io
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from ragblend.app.quality.sources import PASSAGES, sample_questions, sample_text
from ragblend.measuring.data import Question
from ragblend.measuring.plots import pareto, plot_quality
from ragblend.measuring.records import Record
from ragblend.measuring.report import report_page
from ragblend.measuring.result_tables import print_tables, quality_tables
from ragblend.measuring.summary import comparison_matrix, fastest_within, summarise
from ragblend.measuring.variants import Variant

KLS = {"full": 0.0, "reuse": 0.4, "random": 0.3, "cacheblend": 0.1}
VARIANTS = (Variant("full"), Variant("reuse"), Variant("random", 0.15), Variant("cacheblend", 0.15))


@pytest.fixture
def questions():
    return [Question(place, f"question {place}", ("passage",), ("answer",)) for place in range(5)]


@pytest.fixture
def records(questions):
    """Records with the KL of KLS on every question, rising a little from one to the next."""
    made = (
        Record(
            question=question.digest, method=variant.method, ratio=variant.ratio,
            kl=KLS[variant.method] * (1 + place / 10), top1=0.5, exact_match=place % 2 == 0,
            gold_match=False, f1=0.25, rouge_l=0.5, recomputed_fraction=0.1, ttft_ms=10.0 * (place + 1),
            full_ttft_ms=40.0 * (place + 1) if place else 1000.0, prompt_tokens=100, answer="x",
        )
        for variant in VARIANTS
        for place, question in enumerate(questions)
    )  # fmt: skip
    return {record.key: record for record in made}


@pytest.fixture
def summary(records, questions):
    return summarise(records, questions, VARIANTS, seed=0)


def test_rows_by_hand(summary) -> None:
    rows, _ = summary
    cacheblend = rows[3]
    assert cacheblend["kl"] == pytest.approx(0.12)
    assert cacheblend["recovery"] == pytest.approx(0.75)
    assert cacheblend["recovery_ci"] == (pytest.approx(0.75), pytest.approx(0.75))
    assert cacheblend["exact_match"] == 0.6
    assert cacheblend["ttft_ms"] == 30
    assert cacheblend["speedup"] == 4  # the median of the pairs: the first pair's 100 does not count


def test_comparisons_by_hand(summary) -> None:
    _, comparisons = summary
    found = {(each["method"], each["against"]): each for each in comparisons}
    assert set(found) == {("random", "reuse"), ("cacheblend", "reuse"), ("cacheblend", "random")}
    assert found["cacheblend", "random"]["kl_difference"] == pytest.approx(-0.24)
    assert found["cacheblend", "random"]["verdict"] == "better"
    assert found["cacheblend", "random"]["nearer_on"] == 1


def test_a_speed_up_counts_if_the_score_is_kept(records, questions) -> None:
    """reuse is fastest and loses half of the score, random loses 1.6%, cacheblend none: by hand."""
    scores, waits = {"reuse": 0.125, "random": 0.246}, {"reuse": 1.0, "random": 5.0, "full": 40.0}
    told = {
        key: replace(
            each, f1=scores.get(each.method, 0.25), ttft_ms=waits.get(each.method, 10.0), full_ttft_ms=40.0
        )
        for key, each in records.items()
    }
    rows, _ = summarise(told, questions, VARIANTS, seed=0)
    assert [row["score_share"] for row in rows] == pytest.approx([1, 0.5, 0.984, 1])
    assert rows[1]["score_share_ci"] == pytest.approx((0.5, 0.5))
    kept = [(row["loss"], row["method"], row["speedup"]) for row in fastest_within(rows)]
    assert kept == [(0.01, "cacheblend", 4), (0.02, "random", 8)]
    assert [row["method"] for row in fastest_within(rows, (0.6,))] == ["reuse"]
    assert fastest_within(rows[:2]) == []  # full prefill keeps the score, and is no speed-up
    rows, _ = summarise(told, questions, VARIANTS[1:], seed=0)  # without full prefill there is no share
    assert {row["score_share"] for row in rows} == {None} and fastest_within(rows) == []


def test_the_matrix_compares_each_pair_once_without_the_reference(records, questions) -> None:
    matrix = comparison_matrix(records, questions, VARIANTS, seed=0)
    found = {(each["method"], each["against"]): each for each in matrix}
    assert set(found) == {("reuse", "random"), ("reuse", "cacheblend"), ("random", "cacheblend")}
    last = found["random", "cacheblend"]
    assert last["kl_ratio"] == pytest.approx(3)
    assert last["kl_ratio_ci"] == pytest.approx((3, 3))
    assert (last["ratio"], last["against_ratio"], last["verdict"]) == (0.15, 0.15, "worse")
    assert (last["same_cost"], last["cost_difference"]) == (True, 0)


def test_table_cells_are_text_not_markup(summary) -> None:
    rows, comparisons = summary
    text = io.StringIO()
    named = [row | {"method": f"[red]{row['method']}[/red]"} for row in rows]
    print_tables(Console(file=text, width=250), quality_tables(named, comparisons))
    assert "[red]cacheblend[/red]" in text.getvalue()
    assert "75.0%" in text.getvalue()
    assert "better" in text.getvalue()


def test_the_pareto_front() -> None:
    points = [(10, 0.4), (20, 0.5), (30, 0.2), (30, 0.3), (50, 0.2), (90, 0.0)]
    rows = [{"ttft_ms": ttft_ms, "kl": kl} for ttft_ms, kl in points]
    assert [(row["ttft_ms"], row["kl"]) for row in pareto(rows)] == [(10, 0.4), (30, 0.2), (90, 0.0)]


EVIL = '</script><script>alert("x")</script><b>'


class Outline(HTMLParser):
    """What a browser would make of a page: its tags, its links, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.sources += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_report_is_self_contained_and_escapes_text(records, summary, questions, tmp_path) -> None:
    rows, comparisons = summary
    plot_quality(rows, "title " * 40, tmp_path / "quality.png")
    results = {
        "rows": rows,
        "comparisons": comparisons,
        "matrix": comparison_matrix(records, questions, VARIANTS, 0),
        "tasks": [],
        "within": [],
        "environment": {"model": EVIL, "dtype": "float32", "gpu": None, "cpu": "cpu", "threads": 2, "kv_codec": "raw"},
        "settings": {
            "data": EVIL, "questions": 5, "max_new_tokens": 32, "seed": None,
            "skipped": [{"where": "line 2", "reason": f"line 2 is {EVIL}"}],
        },
    }  # fmt: skip
    results["rows"] = [*rows, rows[3] | {"method": "<td><script>alert(1)</script>"}]
    page = Outline(report_page(results, {EVIL: tmp_path / "quality.png"}))
    assert {"script", "b"} & set(page.tags) == set()
    assert page.text.count(EVIL) >= 4
    assert "<td><script>alert(1)</script>" in page.text
    assert [each[:30] for each in page.sources] == ["data:image/png;base64,iVBORw0K"]
    assert "5 prompts are too few to compare methods" in page.text
    assert "1 records were left out" in page.text
    assert "0.33" in page.text  # cacheblend against random


def test_sample_questions_have_a_passage_with_an_answer() -> None:
    questions = sample_questions()
    assert len(questions) >= 20
    assert {len(question.passages) for question in questions} == {PASSAGES}
    for question in questions:
        text = " ".join(question.passages).lower()
        assert any(answer.lower() in text for answer in question.answers), question.text
    assert sample_questions() == questions  # mixed the same way every time: records are kept under them
    assert len(sample_text().split()) > 3000
