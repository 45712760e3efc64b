"""`--data` in every format: guessed, read as it is meant, and refused with the file, the record and the field."""

import json
from itertools import pairwise

import pytest

from ragblend.app.bench.data_formats import FORMATS, load
from ragblend.app.bench.packing import PASSAGE_WORDS, pack, split_parts
from ragblend.kvstore.errors import UsageError


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


def samsum(count=12, words=90):
    return [
        {"id": str(n), "dialogue": f"Ann: {f'word{n} ' * words}\r\nBo: yes", "summary": f"Ann says {n}."}
        for n in range(count)
    ]


def squad():
    def article(title, count):
        return {"title": title, "paragraphs": [paragraph(title, n) for n in range(count)]}

    def paragraph(title, n):
        answers = [{"text": f"{n} boats", "answer_start": 3}] * 2
        qas = [{"id": f"{title}{n}", "question": f"How many boats has {title} {n}?", "answers": answers}]
        return {"context": f"{title} {n} has {n} boats.", "qas": qas}

    return {"version": "1.1", "data": [article("North_Port", 3), article("South_Port", 9)]}


def test_a_longbench_context_is_cut_where_its_passages_begin(write) -> None:
    (question,) = load(write([longbench()], lines=True)).questions
    assert [passage[:10] for passage in question.passages] == [f"Passage {n}:" for n in range(1, 5)]
    assert (question.text, question.answers, question.task) == (
        "Who is the mayor of town 3?",
        ("Keeper 3",),
        "hotpotqa",
    )
    assert question.instruction is None


def test_a_longbench_task_that_asks_nothing_is_told_what_to_do(write) -> None:
    context = "\n\n".join(f"{n} " + "word " * 100 for n in range(20))
    record = longbench(context=context, input="", dataset="gov_report")
    (question,) = load(write([record], lines=True)).questions
    assert question.text.startswith("Write a one-page summary")
    assert question.instruction == ""
    assert len(question.passages) == 7
    assert "".join("".join(question.passages).split()) == "".join(context.split())  # nothing is lost


def test_samsum_shows_other_dialogues_and_never_its_own_summary(write) -> None:
    questions = load(write(samsum()), passages=2).questions
    assert len(questions) == 12
    for number, question in enumerate(questions):
        assert len(question.passages) == 2
        assert question.answers == (f"Ann says {number}.",)
        shown = "\n".join(question.passages)
        assert shown.count("Dialogue: ") == shown.count("Summary: Ann says") >= 4
        assert f"Ann says {number}." not in shown
        assert f"word{number} word{number}" in question.text
    assert load(write(samsum(), lines=True), passages=2).questions == questions


def test_squads_own_file_gives_each_question_its_paragraph_among_others(write) -> None:
    questions = load(write(squad()), passages=5).questions
    assert len(questions) == 12
    for question in questions:
        asked = question.text.removeprefix("How many boats has ").removesuffix("?").replace("_", " ")
        assert len(question.passages) == len(set(question.passages)) == 5
        assert sum(f"{asked} has" in passage.replace("_", " ") for passage in question.passages) == 1
        assert len(question.answers) == 1
    places = {[q.answers[0] in p for p in q.passages].index(True) for q in questions}
    assert len(places) > 2  # not always first


def test_squads_rows_are_read_as_well(write) -> None:
    rows = [
        {
            "context": f"It has {n} boats.",
            "question": f"How many on {n}?",
            "answers": {"text": [str(n)], "answer_start": [7]},
        }
        for n in range(3)
    ]
    questions = load(write(rows, lines=True)).questions
    assert [question.answers for question in questions] == [("0",), ("1",), ("2",)]
    assert {len(question.passages) for question in questions} == {3}


def test_a_question_without_an_answer_is_left_out_and_reported(write) -> None:
    data = squad()
    data["data"][0]["paragraphs"][1]["qas"][0] |= {"is_impossible": True, "answers": []}
    loaded = load(write(data))
    assert len(loaded.questions) == 11
    (skipped,) = loaded.skipped
    assert skipped.where.endswith("question 0, paragraphs[1], qas[0]")
    assert "does not answer it" in skipped.reason


def test_questions_are_called_by_their_records_and_not_by_what_is_left(write) -> None:
    path = write([longbench(), longbench(input=" "), longbench(input="Who else?")], lines=True)
    loaded = load(path, skip=True)
    assert [question.place for question in loaded.questions] == [f"{path}, line 1", f"{path}, line 3"]


def test_skip_is_advised_only_where_it_was_not_given(write) -> None:
    path = write([longbench(), longbench(input=" ")], lines=True)
    with pytest.raises(UsageError, match=r"pass --skip to leave it out$"):
        load(path)
    (skipped,) = load(path, skip=True).skipped
    assert "--skip" not in skipped.reason


def test_a_dialogue_with_no_other_to_show_is_left_out_and_not_measured_without_passages(write) -> None:
    """It had no passages at all, so every method agreed with full prefill."""
    path = write([*samsum(1), {"dialogue": "", "summary": "s"}])
    with pytest.raises(UsageError, match="no question that can be measured"):
        load(path, skip=True)
    several = load(write([*samsum(2), {"dialogue": "", "summary": "s"}]), skip=True)
    assert [len(question.passages) for question in several.questions] == [1, 1]
    assert len(several.skipped) == 1


@pytest.mark.parametrize("form", FORMATS)
def test_an_empty_question_is_named_or_with_skip_reported(form, write, entries) -> None:
    data = {
        "cacheblend": [*entries, entries[0] | {"question": " "}],
        "longbench": [longbench(), longbench(input="  ")],
        "samsum": [*samsum(3), {"dialogue": "", "summary": "s"}],
        "squad": [
            *({"context": f"c {n}", "question": f"q {n}", "answers": {"text": ["a"]}} for n in range(3)),
            {"context": "c", "question": "", "answers": {"text": ["a"]}},
        ],
    }[form]
    path = write(data, lines=form == "longbench")
    with pytest.raises(UsageError, match=rf"{path.name}, (line 2|question \d): '\w+' is empty"):
        load(path)
    loaded = load(path, skip=True)
    assert len(loaded.questions) == len(data) - 1
    assert [question.index for question in loaded.questions] == list(range(len(data) - 1))
    assert len(loaded.skipped) == 1


@pytest.mark.parametrize(
    ("records", "lines", "said"),
    [
        ([longbench(), longbench(answers=[])], True, "line 2: 'answers' must be a list"),
        ([longbench(), {"input": "q", "answers": ["a"]}], True, "line 2: the field 'context' is missing"),
        ([longbench(), longbench(context="")], True, "line 2: 'context' is empty"),
        ([longbench(), 3], True, "line 2: found a JSON number"),
        ([*samsum(2), {"dialogue": "d"}], False, "question 2: the field 'summary' is missing"),
        ([*samsum(2), {"dialogue": "d", "summary": " "}], False, "question 2: 'summary' is empty"),
        (samsum(1), False, "has one dialogue"),
        ({"data": [{"title": "t", "paragraphs": [{"qas": []}]}]}, False, r"paragraphs\[0\]: .*'context'"),
        (
            {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [{"question": "q"}]}]}]},
            False,
            r"qas\[0\]: the field 'answers' is missing",
        ),
        (
            [{"context": "c", "question": "q", "is_impossible": True, "answers": {"text": [{"text": "a"}]}}],
            False,
            "question 0: 'answers' must be a list of one or more strings; found object in it",
        ),
        ([*samsum(1), {"dialogue": " ", "summary": "s"}], False, "question 0: there is no other dialogue"),
        ({"data": []}, False, "empty list"),
        ({"data": [{"title": "t", "paragraphs": []}]}, False, "no question that can be measured"),
        ([{"text": "a", "label": 1}], False, "none of cacheblend, longbench.*text, label.*--format"),
        ([{"question": "q", "answers": ["a"]}], False, "question 0: the field 'ctxs' is missing"),
    ],
)
def test_what_is_missing_is_named_with_its_record(records, lines, said, write) -> None:
    path = write(records, lines)
    with pytest.raises(UsageError, match=said) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_a_line_that_is_not_json_is_named(write) -> None:
    path = write([longbench()], lines=True)
    path.write_text(path.read_text() + "\n\n{broken\n")
    with pytest.raises(UsageError, match="line 3 is not JSON"):
        load(path)


def test_a_named_format_is_not_guessed(write) -> None:
    path = write(samsum())
    with pytest.raises(UsageError, match="question 0: the field 'question' is missing"):
        load(path, "cacheblend")
    with pytest.raises(UsageError, match="--format: 'csv' is unknown"):
        load(path, "csv")


def test_packing_keeps_every_word_and_the_limit() -> None:
    pieces = [f"p{n} " + "w " * (37 * n % 900) for n in range(40)]
    packed = list(pack(pieces, None, 300))
    assert " ".join(packed).split() == " ".join(pieces).split()
    assert max(len(passage.split()) for passage in packed) <= 300
    assert min(len(a.split()) + len(b.split()) for a, b in pairwise(packed)) > 300
    assert list(pack(pieces, 3, 300)) == packed[:3]


def test_few_shot_examples_share_passages_and_numbered_passages_do_not() -> None:
    examples = "".join(f"Dialogue: a{n}\nSummary: b\n" for n in range(40))
    assert len(split_parts(examples)) == 1
    assert len(split_parts("".join(f"Passage {n}:\nshort\n" for n in range(40)))) == 40
    assert max(len(part.split()) for part in split_parts("one " * 5000)) == PASSAGE_WORDS
