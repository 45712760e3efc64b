"""The questions can be answered from the samples, and the two-hop ones really join two documents."""

import re

import pytest

from ragblend.app.samples import SampleQuestion, questions

QUESTIONS = questions()
# What each two-hop question does not say, but both of its documents do: the name that joins them.
BRIDGES = {
    "Who trained the keeper who found the leak in the north cistern?": "Keziah Blount",
    "Who cast the bell that closes the causeway with nine strokes?": "Constance",
    "What is the boiler pressure of the locomotive that Moss & Haldane built?": "Dunlin",
    "Who proposed the repair of the only pier that the 2023 survey graded poor?": "Pier 19",
    "How many legs hold up the tower in which the school choir spent the night?": "Midway Refuge",
    "Who is the apprentice of the author of the Dunlin maintenance manual?": "Hesper Lund",
    "On which lightship had the man served whom Tobit Crane engaged as the first keeper?": "Nathaniel Quist",
    "Who owned the quarry whose stone the survey recommends for the repair of Pier 19?": "Harl Head",
    "What does the locomotive burn that fetched the school choir from the Refuge?": "Dunlin",
    "Which office does the woman hold who recorded the interview with Keziah Blount?": "Ruth Averill",
}


def says(text: str, phrase: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, re.IGNORECASE) is not None


def test_there_are_enough_questions_and_the_easy_ones_come_first() -> None:
    hops = [question.hops for question in QUESTIONS]
    assert 20 <= len(QUESTIONS) <= 24
    assert hops == sorted(hops)
    assert hops.count(2) >= 8
    assert len({question.question for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.question)
def test_every_answer_stands_in_its_documents(question: SampleQuestion, pages: dict[str, list[str]]) -> None:
    evidence = " ".join(text for name in question.documents for text in pages[name])
    for answer in question.answers:
        assert says(evidence, answer), answer
        assert not says(question.question, answer), "the question gives its answer away"


@pytest.mark.parametrize(
    "question", [q for q in QUESTIONS if q.hops == 2], ids=lambda question: question.question
)
def test_a_two_hop_question_is_joined_by_a_name(
    question: SampleQuestion, pages: dict[str, list[str]]
) -> None:
    bridge = BRIDGES[question.question]
    assert len(question.documents) == 2
    assert not says(question.question, bridge)
    for name in question.documents:
        assert any(says(text, bridge) for text in pages[name]), f"{name} does not mention {bridge}"


@pytest.mark.parametrize(
    "question", [q for q in QUESTIONS if q.hops == 1], ids=lambda question: question.question
)
def test_a_one_hop_question_needs_one_page(question: SampleQuestion, pages: dict[str, list[str]]) -> None:
    for name in question.documents:
        assert any(says(text, question.answers[0]) for text in pages[name]), f"{name} does not answer it"


@pytest.mark.parametrize(
    "row",
    [{"answers": ()}, {"hops": 3}, {"hops": 2}, {"documents": ()}],
    ids=["answer", "hops", "two hops", "file"],
)
def test_invalid_question_is_refused(row: dict[str, object]) -> None:
    good: dict[str, object] = {"question": "Q?", "answers": ("a",), "documents": ("d.md",), "hops": 1}
    SampleQuestion(**good)  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        SampleQuestion(**{**good, **row})  # type: ignore[arg-type]
