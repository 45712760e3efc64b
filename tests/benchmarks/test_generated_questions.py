"""Generated questions: reproducible, of the requested length, with their answers in the text."""

import re

import pytest

from benchmarks.generate_questions import TASKS, generate, main, parse_spec
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import entry_question, load


def count_words(text):
    """A tokenizer that makes a token of every word, figure by figure of every number, and of every mark."""
    return len(re.findall(r"[A-Za-z]+|[0-9.,=?-]", text))


def made(*specs):
    entries = generate(list(map(parse_spec, specs)), count_words)
    return [entry_question(entry, place, "generated") for place, entry in enumerate(entries)]


def text_of(question):
    return "\n".join(question.passages)


@pytest.mark.parametrize("task", TASKS)
def test_a_larger_n_only_adds_questions(task) -> None:
    """n was a part of the seed: raising it threw away all that was measured."""
    few, many = made(f"{task},n=2,tokens=1500"), made(f"{task},n=4,tokens=1500")
    assert many[:2] == few
    others = made(f"{task},n=4,tokens=1500,seed=1")
    assert len({question.digest for question in [*many, *others]}) == 8
    assert [question.index for question in many] == [0, 1, 2, 3]


@pytest.mark.parametrize(("task", "tokens"), list(zip(TASKS, [600, 4000, 60_000, 1500], strict=True)))
def test_passages_have_the_requested_length(task, tokens) -> None:
    (question,) = made(f"{task},n=1,tokens={tokens},chunk=200")
    sizes = [count_words(passage) for passage in question.passages]
    assert sum(sizes) == pytest.approx(tokens, rel=0.05)
    assert max(sizes) <= 200
    assert len(set(question.passages)) == len(sizes)  # two that are equal would share one stored KV


@pytest.mark.parametrize("task", ["single_needle", "multi_key", "multi_value", "multi_query"])
def test_required_answers_are_the_needles_of_the_asked_keys(task) -> None:
    for question in made(f"{task},n=8,tokens=1500,items=5"):
        said = re.findall(r"magic numbers of ([\w-]+) is (\d+)\.", text_of(question))
        asked = re.findall(r"\w+-\w+", question.text)
        assert sorted(number for key, number in said if key in asked) == sorted(question.required)
        assert len(said) == (1 if task == "single_needle" else 5)
        assert len(question.required) == (5 if task in ("multi_value", "multi_query") else 1)


def test_needles_are_at_the_requested_depth_of_the_same_text() -> None:
    """At every depth the same sentences, so that depths are compared and not texts."""
    texts = {}
    for depth in (0, 50, 100):
        (question,) = made(f"single_needle,n=1,tokens=1500,depth={depth}")
        assert question.task == f"single_needle 1,500 at {depth}%"
        texts[depth] = re.split(r"(?<=\.)\s", text_of(question))
    places = {depth: next(n for n, s in enumerate(text) if "magic" in s) for depth, text in texts.items()}
    last = len(texts[0]) - 1
    assert places == {0: 0, 50: round(last / 2), 100: last}
    assert sorted(texts[0]) == sorted(texts[50]) == sorted(texts[100])


def test_written_questions_are_counted_by_the_models_tokenizer(model_folder, home, engine, tmp_path) -> None:
    out = tmp_path / "new" / "made.json"
    main(["multi_value,tokens=1200,chunk=300,n=2", "multi_key,tokens=900,n=1"], out, str(model_folder), home)
    questions = load(out).questions
    assert [question.task for question in questions] == ["multi_value 1,200"] * 2 + ["multi_key 900"]
    assert sum(map(engine.count_tokens, questions[0].passages)) == pytest.approx(1200, rel=0.05)
    assert all(question.required for question in questions)


def test_questions_of_recorded_runs_are_made_again() -> None:
    """Settings that are gone were a part of the seed."""
    (question,) = made("multi_value,tokens=2000,n=1")
    assert question.required == ("2610272", "1715594", "6774411", "4844350")


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("multi_valu", "did you mean 'multi_value'"),
        ("other:multi_key", "no task 'other:multi_key'"),
        ("", "no task ''"),
        ("multi_key,length=4", "'length' is unknown; there are n, tokens"),
        ("multi_key,n=0", "from 1 to"),
        ("multi_key,tokens=4k", "tokens is '4k'"),
        ("multi_key,n", "n is ''"),
        ("multi_key,seed=-1", "seed is '-1'"),
        ("multi_key,items=500", "items is '500'"),
        ("multi_key,depth=101", "depth is '101'; expected a whole number from 0 to 100"),
    ],
)
def test_a_wrong_spec_is_named(spec, said) -> None:
    with pytest.raises(UsageError, match=said):
        parse_spec(spec)
