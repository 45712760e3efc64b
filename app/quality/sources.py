"""Loads a bench's questions: from a file, the user's own documents, generated ones, or the samples."""

import random
from dataclasses import dataclass
from pathlib import Path

from ragblend.app import samples
from ragblend.app.cli.common import option
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import Loaded, Question, choose, load, without_repeats
from ragblend.measuring.figure_questions import figure_questions

ALL_DOCUMENTS = "all"
PASSAGE_WORDS = 220  # of the samples' passages
PASSAGES = 6  # of a sample question
FIGURE_SETS = 25


@dataclass(frozen=True)
class QuestionSource:
    """Options that choose the questions: at most one of data, docs and figures.

    home, collection: where the documents of docs were ingested; docs: a folder or file of them, or `all`.
    """

    data: Path | None = option(
        None, "A JSON list of {ctxs: [{title, text}], question, answers}; the samples if absent."
    )
    docs: str | None = option(
        None, "Questions from ingested documents: those under this folder or file, or `all`."
    )
    figures: bool = option(
        False,
        "Generated questions about figures, 8 per set of passages, in 2 orders; nearly 400 without --limit.",
        "--figures",
    )
    collection: str | None = option(None, "Collection of --docs (default: as in the settings).")
    limit: int | None = option(None, "How many questions; all if absent.")
    seed: int | None = option(None, "Shuffles the questions, and seeds the intervals' bootstrap.", min=0)
    passages: int | None = option(None, "Only the first N passages of each question.")
    skip: bool = option(
        False, "Leave out, and report, what cannot be measured (no question, over the window).", "--skip"
    )
    home: Path | None = None

    @property
    def name(self) -> str:
        if self.figures:
            return "figures"
        if self.data is not None:
            return self.data.name
        return "samples" if self.docs is None else f"documents: {self.docs}"


def read(source: QuestionSource) -> Loaded:
    """Load the questions, each once, because records are keyed by a question's content. Raises UsageError."""
    if (source.data is not None) + (source.docs is not None) + source.figures > 1:
        raise UsageError("--data, --docs and --figures name different questions; give one of them")
    choose([], source.limit, source.seed, source.passages)  # refuses wrong values before anything is read
    if source.figures:  # not shuffled: the questions of a set must follow each other
        generated = choose(figure_questions(FIGURE_SETS, seed=source.seed or 0), passages=source.passages)
        distinct = without_repeats(generated)
        return Loaded(choose(distinct.questions, source.limit), distinct.skipped)
    found = _load(source)
    # Questions from documents already have the requested passages, and all that they need.
    passages = None if source.docs is not None else source.passages
    distinct = without_repeats(choose(found.questions, passages=passages))
    skipped = (*found.skipped, *distinct.skipped)
    return Loaded(choose(distinct.questions, source.limit, source.seed), skipped)


def _load(source: QuestionSource) -> Loaded:
    if source.data is not None:
        return load(source.data, source.skip)
    if source.docs is not None:
        from ragblend.measuring.docs_questions import make_questions

        documents = ingested(source)
        return Loaded(make_questions(documents, source.limit, source.passages, source.seed or 0))
    return Loaded(sample_questions())


def ingested(source: QuestionSource) -> list[list[str]]:
    """The passages of each ingested document that `docs` names, in order. Raises UsageError if there are none."""
    from ragblend.app.home import Home, absolute
    from ragblend.app.library.registry import Library
    from ragblend.app.settings import Settings

    assert source.docs is not None
    path, collection = Home.resolve(source.home).library, source.collection or Settings.collection
    below = None if source.docs == ALL_DOCUMENTS else absolute(source.docs)
    found: list[list[str]] = []
    if path.exists():
        with Library(path) as library:
            for document in library.documents(collection):
                if document.passages and (below is None or Path(document.path).is_relative_to(below)):
                    found.append([passage.text for passage in library.passages_of(document.id)])
    if not found:
        where = f"in the collection {collection!r}" if below is None else f"under {below}"
        raise UsageError(
            f"--docs: no ingested document is {where}; `ragblend ingest` it first (`ragblend docs list` lists them, "
            f"`--docs {ALL_DOCUMENTS}` takes every document)"
        )
    return found


def sample_text() -> str:
    """The text of all sample documents, one after another."""
    return "\n\n".join(text for _, text in sample_documents())


def sample_questions() -> list[Question]:
    """Every sample question with PASSAGES passages, those with its answers among them, shuffled."""
    passages = [(title, text) for title, whole in sample_documents() for text in pack_passages(whole)]
    asked = enumerate(samples.questions())
    return [_question(number, question, passages) for number, question in asked]


def _question(number: int, question: samples.SampleQuestion, passages: list[tuple[str, str]]) -> Question:
    ordered = list(passages)
    random.Random(question.question).shuffle(ordered)
    # First those of the right documents that contain an answer, then the rest of these documents, then all others.
    ordered.sort(key=lambda passage: _rank(question, passage))
    chosen = ordered[:PASSAGES]
    random.Random(question.question).shuffle(chosen)
    texts = tuple(f"{title}\n{text.strip()}" for title, text in chosen)
    place = f"the samples, question {number}"
    return Question(number, question.question, texts, tuple(question.answers), where=place)


def _rank(question: samples.SampleQuestion, passage: tuple[str, str]) -> int:
    title, text = passage
    if title not in question.documents:
        return 2
    return 0 if any(answer.lower() in text.lower() for answer in question.answers) else 1


def sample_documents() -> list[tuple[str, str]]:
    """The name and text of each sample document."""
    from ragblend.app.library.readers import read_document

    paths: list[Path] = sorted(samples.documents_folder().iterdir())
    return [(path.name, "\n\n".join(part.text for part in read_document(path).parts)) for path in paths]


def pack_passages(text: str) -> list[str]:
    """Cut a text into passages of whole paragraphs, each with at least PASSAGE_WORDS words."""
    packed: list[list[str]] = [[]]
    for paragraph in text.split("\n\n"):
        packed[-1].append(paragraph)
        if sum(len(each.split()) for each in packed[-1]) >= PASSAGE_WORDS:
            packed.append([])
    return ["\n\n".join(paragraphs) for paragraphs in packed if paragraphs]
