"""The sample documents and their questions in the benches' format, for who has no data of their own."""

import random
from pathlib import Path

from ragblend.app import samples
from ragblend.app.bench.data import Question

PASSAGE_WORDS = 220
PASSAGES = 6


def sample_source() -> str:
    """The words of all sample documents, one after another."""
    return "\n\n".join(text for _, text in _documents())


def sample_questions() -> list[Question]:
    """Every sample question with `PASSAGES` passages, those that hold its answers among them, mixed."""
    passages = [(title, text) for title, whole in _documents() for text in _passages(whole)]
    asked = enumerate(samples.questions())
    return [_question(number, question, passages) for number, question in asked]


def _question(number: int, question: samples.Question, passages: list[tuple[str, str]]) -> Question:
    mixed = list(passages)
    random.Random(question.question).shuffle(mixed)
    # Those of the right documents that hold an answer first, then the rest of these documents, then all
    # others.
    mixed.sort(key=lambda passage: _distance(question, passage))
    chosen = mixed[:PASSAGES]
    random.Random(question.question).shuffle(chosen)
    texts = tuple(f"{title}\n{text.strip()}" for title, text in chosen)
    place = f"the samples, question {number}"
    return Question(number, question.question, texts, tuple(question.answers), where=place)


def _distance(question: samples.Question, passage: tuple[str, str]) -> int:
    title, text = passage
    if title not in question.documents:
        return 2
    return 0 if any(answer.lower() in text.lower() for answer in question.answers) else 1


def _documents() -> list[tuple[str, str]]:
    from ragblend.app.readers import read_document

    paths: list[Path] = sorted(samples.documents_folder().iterdir())
    return [(path.name, "\n\n".join(part.text for part in read_document(path))) for path in paths]


def _passages(text: str) -> list[str]:
    """Whole paragraphs, packed until a passage has `PASSAGE_WORDS` words."""
    packed: list[list[str]] = [[]]
    for paragraph in text.split("\n\n"):
        packed[-1].append(paragraph)
        if sum(len(each.split()) for each in packed[-1]) >= PASSAGE_WORDS:
            packed.append([])
    return ["\n\n".join(paragraphs) for paragraphs in packed if paragraphs]
