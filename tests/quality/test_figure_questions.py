"""Generated questions about figures, and the scores of their answers."""

import json
import re
from dataclasses import replace

import pytest

from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.prompts.figures import contains
from ragblend.engine.prompts.passage_match import matching_passage
from ragblend.kvstore.errors import UsageError
from ragblend.measuring import metrics
from ragblend.measuring.data import Question
from ragblend.measuring.figure_questions import PASSAGES, QUESTIONS_A_SET, figure_questions
from ragblend.measuring.prefilling import continue_prefill, timed_prefill
from ragblend.measuring.quality import build_prompt
from ragblend.measuring.variants import Variant


@pytest.fixture(scope="module")
def questions():
    return figure_questions(sets=8)


def test_each_question_comes_with_its_passages_in_two_orders(questions):
    assert figure_questions(sets=8) == questions != figure_questions(sets=8, seed=1)
    first, second = questions[:QUESTIONS_A_SET], questions[QUESTIONS_A_SET : 2 * QUESTIONS_A_SET]
    assert [each.text for each in first] == [each.text for each in second]
    assert first[0].passages != second[0].passages
    assert set(first[0].passages) == set(second[0].passages)
    assert len({each.digest for each in questions}) == len(questions)


def test_a_set_has_both_languages_both_sizes_and_all_kinds(questions):
    assert {len(each.passages) for each in questions} == set(PASSAGES)
    kinds = {f"{language} {kind}" for language in ("en", "de") for kind in ("one", "table", "several")}
    assert {each.task for each in questions} == kinds


def test_each_figure_is_in_one_passage_with_similar_ones_in_others(questions):
    alike = []
    for question in questions:
        for figure in question.required:
            holding = [each for each in question.passages if contains(each, figure)]
            assert len(holding) == 1, (question.text, figure)
            others = [each for each in question.passages if each not in holding]
            kind = re.sub(r"[^\W\d]+", r"\\w+", re.sub(r"\d+", "0", re.escape(figure))).replace("0", r"\d+")
            alike.append(any(re.search(kind, each) for each in others))
    assert sum(alike) > 0.85 * len(alike)


def test_the_passage_that_matches_the_question_best_is_the_one_with_the_answer(smollm2_home):
    """The second look reads only that one (docs/methods.md)."""
    engine = Engine.open(home=smollm2_home)
    tokenizer = engine.tokenizer
    engine.close()
    of_one = [each for each in figure_questions(sets=15, seed=1) if answering(each)]
    found = [matching_passage(prompt_of(tokenizer, each)) in answering(each) for each in of_one]
    assert len(found) > 200 and sum(found) >= 0.98 * len(found)


def answering(question):
    """The passages that have all figures of the answer."""
    return [
        number
        for number, passage in enumerate(question.passages)
        if all(contains(passage, figure) for figure in question.required)
    ]


def prompt_of(tokenizer, question):
    def ids(text):
        return tuple(tokenizer(text)["input_ids"])

    passages = [Chunk(passage, token_ids=ids(passage)) for passage in question.passages]
    return Prompt([*passages, Literal("", ids(f" {question.text} Answer in one short sentence."))])


FEW = ("--figures", "--passages", "2", "--max-new-tokens", "4")
ASKED = Question(
    0, "How long is it?", ("It is 41 metres long.", "That is 339 metres long."), ("41",), None, ("41",)
)


def test_only_right_figures_of_full_prefill_count():
    assert metrics.right_figures(ASKED, "It is 41 metres long.") == ("41",)
    assert metrics.right_figures(ASKED, "It is 4 metres long.") == ()
    gold = Question(0, "When?", ("In 1921.",), ("May 1921",))
    assert metrics.right_figures(gold, "It was in 1921.") == ("1921",)
    assert metrics.right_figures(Question(0, "Who?", ("Ann.",), ("Ann",)), "Ann") == ()


@pytest.mark.parametrize(
    ("answer", "other"), [("339 metres", True), ("17 metres", False), ("No idea.", False)]
)
def test_another_passages_figure_differs_from_an_invented_one(answer, other):
    assert metrics.has_other_figure(answer, ASKED, ("41",)) is other


def test_another_figure_of_the_right_passage_is_not_another_passages():
    asked = replace(ASKED, passages=("It has 41 lamps and 77 doors.", "That one has 339 lamps."))
    assert not metrics.has_other_figure("77", asked, ("41",))
    assert metrics.has_other_figure("339", asked, ("41",))


def test_positions_of_figures_in_tokens():
    pieces = ["It", " is", " 1", "8,", "6", "42", ".", " Mara", " Dol", "vin", "!"]
    assert metrics.figure_positions(pieces, ["18,642"]) == [2, 3, 4, 5]
    assert metrics.figure_positions(pieces, ["Mara Dolvin"]) == [7, 8, 9]
    assert metrics.figure_positions(pieces, ["339"]) == []
    assert metrics.figure_positions(["186", "42", " volumes"], ["18,642"]) == [0, 1]


def test_a_continued_reference_is_full_prefill(engine, questions):
    short = [replace(each, passages=each.passages[:2]) for each in questions]
    first, second = (build_prompt(engine, each, 8) for each in short[:2])
    whole = timed_prefill(engine, second, Variant("full")).prefilled
    going_on = continue_prefill(engine, timed_prefill(engine, first, Variant("full")), second)
    assert going_on is not None
    assert (going_on.prefilled.logits - whole.logits).abs().max() < 1e-4
    answer = [3, 4, 5]
    found, expected = (engine.continue_logits(each, answer) for each in (going_on.prefilled, whole))
    assert (found - expected).abs().max() < 1e-4
    other_order = build_prompt(engine, short[QUESTIONS_A_SET], 8)
    assert continue_prefill(engine, going_on, other_order) is None


def test_a_model_without_right_figures_is_an_error(bench):
    with pytest.raises(UsageError, match="answers none of the 2 questions rightly"):
        bench("quality", *FEW, "--limit", "2", "--methods", "reuse")


def test_figures_are_counted_over_right_answers_only(bench, monkeypatch, tmp_path):
    seen: list[str] = []

    def right(question, answer):
        """Of the second question full prefill has no figure right."""
        seen.append(question.digest) if question.digest not in seen else None
        return () if seen.index(question.digest) == 1 else ("41",)

    monkeypatch.setattr("ragblend.measuring.metrics.right_figures", right)
    arguments = ("quality", *FEW, *["--limit", "3", "--methods", "reuse,epic", "--ratios", "0.15", "--json"])
    rows = json.loads(bench(*arguments).stdout)
    counted = [(row["method"], row["n"], row["figures_n"]) for row in rows]
    assert counted == [(method, 2, 2) for method in ("full", "reuse", "epic")]
    report = json.loads((tmp_path / "out" / "quality.json").read_text())
    assert (report["settings"]["questions"], report["settings"]["asked"]) == (2, 3)
    again = json.loads(bench(*arguments).stdout)
    assert again == rows
