"""Measures whole answers: documents as a person has them, ingested and asked as `ragblend ask` does.

    python -m benchmarks.measure_answers --model FILE.gguf

Three invented libraries (`newcomer/`), 78 files, with 60 questions that were written down with their answers before
anyone asked them. For each question: whether the right file's passage comes first, and whether the answer has the right
figure, name or phrase, by full prefill and by `probe-shift`. `--verbose` prints each answer.
"""

import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.common import DATA, Model, markdown_table, read_json, run
from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.app.library.ingest import ingest_paths
from ragblend.app.workspace import Workspaces
from ragblend.measuring.metrics import found_share

LIBRARIES = DATA / "newcomer"
METHODS = ("full", "probe-shift")
COLUMNS = ("questions", "right file first", "answer in passages", *METHODS, "read again", "full only")


def has_answer(text: str, question: dict[str, Any]) -> bool:
    """Whether a text has the answer in one of its spellings, as whole words."""
    return any(found_share(text, [each]) == 1 for each in (question["answer"], *question["also"]))


def ask(conversations: Conversations, question: dict[str, Any], verbose: bool) -> list[str]:
    """The COLUMNS in which a question counts."""
    answers = {
        method: conversations.answer(question["question"], AskOptions(method=method)).whole()
        for method in METHODS
    }
    if verbose:
        texts = "; ".join(f"{method}: {answer.text!r}" for method, answer in answers.items())
        print(f"{question['question']} {texts}; expected: {question['answer']!r}")
    full, fused = answers.values()
    right = [method for method, answer in answers.items() if has_answer(answer.text, question)]
    holds = {
        "questions": True,
        "right file first": [each.document for each in full.sources[:1]] == [question["file"]],
        "answer in passages": any(has_answer(each.text, question) for each in full.sources),
        "read again": fused.report.read_again_at is not None,
        "full only": right == ["full"],
    }
    return [*right, *(name for name, value in holds.items() if value)]


def ask_all(library: Path, model: str, verbose: bool) -> Counter[str]:
    """Ingest a library into a new home, and count its questions by column."""
    with tempfile.TemporaryDirectory() as home, Workspaces.open(home, model=model) as workspaces:
        ingest_paths(workspaces.first, [library / "files"])
        conversations = Conversations(workspaces)
        questions = read_json(library / "questions.json")
        with closing(conversations.engine):  # which ends what it does in the background in this home
            return Counter(name for each in questions for name in ask(conversations, each, verbose))


def main(model: Model = "default", verbose: bool = False) -> None:
    """Measure, and print a table."""
    counts = {each.name: ask_all(each, model, verbose) for each in sorted(LIBRARIES.iterdir())}
    counts["all"] = sum(counts.values(), Counter())
    rows = ([name, *(str(found[column]) for column in COLUMNS)] for name, found in counts.items())
    print(markdown_table(["library", *COLUMNS], rows))


if __name__ == "__main__":
    run(main, __doc__)
