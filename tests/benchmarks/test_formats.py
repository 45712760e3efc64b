"""Other data sets' formats are converted, or refused with the file, the record and the field."""

import json

import pytest

from benchmarks.formats import PASSAGES, convert
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import load as load_file


def load(path, form=None, passages=PASSAGES, skip=False):
    """Converted, and read as the product reads it."""
    form = form or ("longbench" if '"input"' in path.read_text() else "squad")
    converted = path.with_name("converted.json")
    converted.write_text(json.dumps(convert(path, form, passages)))
    return load_file(converted, skip)


@pytest.fixture
def write(tmp_path):
    def write(value, lines=False):
        path = tmp_path / "data.json"
        text = "\n".join(json.dumps(each) for each in value) if lines else json.dumps(value)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def longbench(**changed):
    parts = [f"Passage {n}:\nTown {n}\nThe mayor of town {n} is Keeper {n}." for n in range(1, 5)]
    record = {"context": "\n\n".join(parts), "input": "Who is the mayor of town 3?", "answers": ["Keeper 3"]}
    return record | {"dataset": "hotpotqa", "length": 40, "_id": "x"} | changed


def squad():
    def article(title, count):
        return {"title": title, "paragraphs": [paragraph(title, n) for n in range(count)]}

    def paragraph(title, n):
        answers = [{"text": f"{n} boats", "answer_start": 3}] * 2
        qas = [{"id": f"{title}{n}", "question": f"How many boats has {title} {n}?", "answers": answers}]
        return {"context": f"{title} {n} has {n} boats.", "qas": qas}

    return {"version": "1.1", "data": [article("North_Port", 3), article("South_Port", 9)]}


def test_summary_replaces_the_question(write) -> None:
    ctxs = [
        {"title": "A", "text": "Ten boats."},
        {"title": "", "text": "Two crews."},
        {"title": "", "text": "x"},
    ]
    path = write([{"ctxs": ctxs, "question": "How many?", "answers": ["10"]}])
    (question,) = load(path, "summary", passages=2).questions
    assert question.text.startswith("Summarise")
    assert question.passages == ("A\nTen boats.", "Two crews.")
    assert (question.instruction, question.required, question.task) == ("", (), "summary")


def test_longbench_contexts_are_split_at_their_passages(write) -> None:
    (question,) = load(write([longbench()], lines=True)).questions
    assert [passage[:10] for passage in question.passages] == [f"Passage {n}:" for n in range(1, 5)]
    assert (question.text, question.answers, question.task) == (
        "Who is the mayor of town 3?",
        ("Keeper 3",),
        "hotpotqa",
    )
    assert question.instruction is None


def test_squad_questions_get_their_paragraph_among_others(write) -> None:
    questions = load(write(squad()), passages=5).questions
    assert len(questions) == 12
    for question in questions:
        asked = question.text.removeprefix("How many boats has ").removesuffix("?").replace("_", " ")
        assert len(question.passages) == len(set(question.passages)) == 5
        assert sum(f"{asked} has" in passage.replace("_", " ") for passage in question.passages) == 1
        assert len(question.answers) == 1
    places = {[q.answers[0] in p for p in q.passages].index(True) for q in questions}
    assert len(places) > 2  # not always first
    data = squad()
    data["data"][0]["paragraphs"][1]["qas"][0] |= {"is_impossible": True}  # its paragraph does not answer it
    assert len(load(write(data)).questions) == 11


@pytest.mark.parametrize(
    ("records", "lines", "said"),
    [
        ([longbench(), {"input": "q", "answers": ["a"]}], True, "line 2: the field 'context' is missing"),
        ([longbench(), 3], True, "line 2: found a JSON number"),
        ([{"context": "c", "question": "q"}], False, "question 0: the field 'answers' is missing"),
        (
            {"data": [{"title": "t", "paragraphs": [{"qas": [{"question": "q"}]}]}]},
            False,
            "'context' is missing",
        ),
        (
            {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]},
            False,
            r"qas\[0\]: the field 'answers' is missing",
        ),
        ({"data": []}, False, "empty list"),
        ({"data": [{"title": "t", "paragraphs": []}]}, False, "no question that can be measured"),
    ],
)
def test_missing_fields_are_named_with_their_record(records, lines, said, write) -> None:
    path = write(records, lines)
    with pytest.raises(UsageError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)
