"""Questions generated from documents: answers are in the passages, and not in the questions."""

import re

import pytest

from ragblend.app.quality.sources import (
    PASSAGE_WORDS,
    QuestionSource,
    ingested,
    pack_passages,
    read,
    sample_documents,
)
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.docs_questions import ANSWER_GAP, NAME_GAP, make_questions


@pytest.fixture(scope="module")
def documents():
    assert PASSAGE_WORDS
    return [pack_passages(text) for _, text in sample_documents()]


def test_answers_are_in_the_passages_and_not_in_the_question(documents) -> None:
    questions = make_questions(documents, 80)
    assert len(questions) == len({question.digest for question in questions}) == 80
    for question in questions:
        (answer,) = question.required
        assert len(question.passages) == len(set(question.passages)) == 6
        assert any(answer in " ".join(passage.split()) for passage in question.passages)
        assert not re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", question.text)
        assert ANSWER_GAP in question.text
    assert {question.task for question in questions} == {"docs cloze", "docs two-hop"}


def test_a_two_hop_question_needs_the_name_that_two_passages_share() -> None:
    filler = "The keeper walked along the wall and counted every lamp that was burning there."
    first = f"In the old harbour lived a pilot called Marit Vool with seven grey cats. {filler}"
    second = f"Nobody was surprised when the prize of Sandwick went to Marit Vool in the year 1931. {filler}"
    first = f"{first} They say that the prize of 1931 made Marit Vool a very rich woman indeed."
    third = "A barge came in with coal and stone for the new sea wall every second week of summer."
    documents = [[first], [second, third]]
    questions = [each for seed in range(10) for each in make_questions(documents, 20, passages=2, seed=seed)]
    hops = [question for question in questions if question.task == "docs two-hop"]
    assert len(hops) == 10
    for question in hops:
        assert question.text.count(NAME_GAP) == 3  # the explanation, and one in either sentence
        assert "Marit" not in question.text
        assert set(question.passages) == {first, second}
        assert not re.search(rf"\b{question.required[0]}\b", question.text)
    asked = {question.required[0] for question in hops}
    assert "Sandwick" in asked
    assert "1931" in asked  # though never where the other sentence says it


@pytest.fixture
def library(home, tmp_path):
    """A home with two ingested documents of one collection, and one of another."""
    import numpy as np

    from ragblend.app.home import Home
    from ragblend.app.library.documents import DocumentPassage, FileFacts
    from ragblend.app.library.registry import Library

    store = Library(Home(home).create().library)
    for collection, path in (("default", "a/one.txt"), ("default", "b/two.txt"), ("other", "a/three.txt")):
        key = store.begin(collection, str(tmp_path / path))
        passages = [DocumentPassage(f"{key}{n}", key, n, f"{path} passage {n}", f"p. {n}") for n in range(2)]
        store.replace_passages(key, FileFacts(1, 1, "x"), "r", passages, [np.zeros((1, 4), "f4")] * 2)
    store.close()
    return home


def test_ingested_documents_are_found_by_folder_file_or_all(library, tmp_path) -> None:
    def found(docs, **more):
        return [texts[0] for texts in ingested(QuestionSource(docs=str(docs), home=library, **more))]

    assert found("all") == ["a/one.txt passage 0", "b/two.txt passage 0"]
    assert found(tmp_path / "a") == ["a/one.txt passage 0"]
    assert found(tmp_path / "b" / "two.txt") == ["b/two.txt passage 0"]
    assert found("all", collection="other") == ["a/three.txt passage 0"]


def test_documents_that_were_not_ingested_are_named(library, tmp_path) -> None:
    with pytest.raises(UsageError, match="ragblend ingest"):
        ingested(QuestionSource(docs=str(tmp_path / "c"), home=library))
    with pytest.raises(UsageError, match="collection 'none'"):
        ingested(QuestionSource(docs="all", home=library, collection="none"))
    nowhere = tmp_path / "new"
    with pytest.raises(UsageError, match="ragblend ingest"):
        ingested(QuestionSource(docs="all", home=nowhere))
    assert not nowhere.exists()


def test_needed_passages_are_kept_with_few_passages(library, documents, monkeypatch) -> None:
    """`--docs all --passages 1` cut the mixed passages once more, and kept the first one whichever it was."""
    monkeypatch.setattr("ragblend.app.quality.sources.ingested", lambda source: documents)
    loaded = read(QuestionSource(docs="all", home=library, passages=1))
    hops = [question for question in loaded.questions if question.task == "docs two-hop"]
    assert hops
    assert {len(question.passages) for question in hops} == {2}
    assert {len(q.passages) for q in loaded.questions if q.task == "docs cloze"} == {1}
    for question in loaded.questions:
        assert any(question.required[0] in " ".join(passage.split()) for passage in question.passages)
