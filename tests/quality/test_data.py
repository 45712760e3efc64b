"""Question files are parsed, or refused with the file, the record and the field."""

import json

import pytest

from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import choose, load


def test_a_passage_is_title_and_text(data_file, entries) -> None:
    entries[3]["ctxs"][0] = {"title": "", "text": " words "}
    data_file.write_text(json.dumps(entries))
    questions = load(data_file).questions
    assert questions[3].passages[0] == "words"
    assert [question.index for question in questions] == [0, 1, 2, 3]
    assert questions[1].text == "What did the keeper do on day 1?"
    assert questions[1].answers == ("rang a bell", "day 1")
    assert questions[1].passages[2] == f"page 12\n{entries[1]['ctxs'][2]['text']}"


@pytest.mark.parametrize(
    ("skip", "said"),
    [(False, "pass --skip to leave it out$"), (True, "no question that can be measured")],
)
def test_one_question_at_least_must_be_usable(data_file, entries, skip, said) -> None:
    data_file.write_text(json.dumps([entries[1] | {"question": " "}]))
    with pytest.raises(UsageError, match=said):
        load(data_file, skip)


def test_a_file_of_another_format_is_refused(data_file) -> None:
    data_file.write_text(json.dumps([{"context": "c", "input": "q", "answers": ["a"]}]))
    with pytest.raises(UsageError, match="'ctxs' is missing; found context, input, "):
        load(data_file)


def test_choosing_limits_shuffles_and_shortens(data_file) -> None:
    questions = load(data_file).questions
    assert [q.index for q in choose(questions, limit=2)] == [0, 1]
    assert len(choose(questions, limit=9)) == 4
    assert [len(q.passages) for q in choose(questions, passages=2)] == [2, 2, 2, 2]
    orders = {tuple(q.index for q in choose(questions, seed=seed)) for seed in range(20)}
    assert len(orders) > 5
    assert choose(questions, seed=3) == choose(questions, seed=3)
    assert {q.digest for q in choose(questions, seed=1)} == {q.digest for q in questions}
    assert choose(questions, passages=2)[0].digest != questions[0].digest


@pytest.mark.parametrize("option", ["limit", "passages"])
def test_limits_of_zero_are_refused(data_file, option) -> None:
    with pytest.raises(UsageError, match=f"--{option} is 0"):
        choose(load(data_file).questions, **{option: 0})


def spoil(entry, field, value):
    """The second question with one field changed; a value of None takes the field out."""
    *path, last = field.split(".")
    for step in path:
        entry = entry[int(step) if step.isdigit() else step]
    if value is None:
        del entry[last]
    else:
        entry[last] = value


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("question", None, "question 1: the field 'question' is missing"),
        ("question", 7, "question 1: the field 'question' is a JSON number; expected a string"),
        ("question", "  ", "question 1: 'question' is empty"),
        ("answers", None, "'answers' is missing; found ctxs, question; add 'answers', a list"),
        ("answers", "one", "question 1: the field 'answers' is a JSON string; expected a list"),
        ("answers", [], "question 1: 'answers' must be"),
        ("answers", [3], "question 1: 'answers' must be a list of one or more strings; found number in it"),
        ("ctxs", None, "question 1: the field 'ctxs' is missing"),
        ("ctxs", [], "question 1: 'ctxs' is empty"),
        ("ctxs", ["text"], r"question 1, ctxs\[0\]: found a JSON string; expected an object with 'title'"),
        ("ctxs.2.text", None, r"question 1, ctxs\[2\]: the field 'text' is missing"),
        ("ctxs.2.title", None, r"question 1, ctxs\[2\]: the field 'title' is missing"),
        ("required", "one", "question 1: the field 'required' is a JSON string; expected a list"),
        ("required", ["one", " "], "question 1: 'required' must be a list of strings that are not empty"),
        ("instruction", 3, "question 1: the field 'instruction' is a JSON number"),
        ("ctxs.2.text", "", r"question 1, ctxs\[2\]: 'text' is empty"),
    ],
)
def test_a_bad_entry_is_named(entries, data_file, field, value, said) -> None:
    spoil(entries[1], field, value)
    data_file.write_text(json.dumps(entries))
    with pytest.raises(UsageError, match=said) as caught:
        load(data_file)
    assert str(data_file) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON"),
        (b"[{", "is not JSON"),
        (b"\xff\xfe[", "not UTF-8"),
        (b"{}", "JSON object; expected a list"),
        (b"[]", "empty list"),
        (b"[1]", "question 0: found a JSON number"),
        (b"[" * 100_000, "is not JSON"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, said) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)
