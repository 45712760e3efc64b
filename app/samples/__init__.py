"""Sample documents about an invented tramway, and questions about them: for the demo, tests and benches."""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path


@dataclass(frozen=True)
class SampleQuestion:
    """A question that the samples answer.

    `answers` are spellings that count as right, each found in one of `documents` (file names in the folder).
    `hops` is 1, or 2 when no single passage answers it. `suggested`: shown to a newcomer, because the bundled model
    answers it rightly, with a citation.
    """

    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    hops: int
    suggested: bool = False

    def __post_init__(self) -> None:
        assert self.hops in (1, 2) and self.answers and len(self.documents) >= self.hops, self


def documents_folder() -> Path:
    """The folder that holds the sample documents, and nothing else."""
    return Path(str(files(__name__) / "documents"))


def questions() -> list[SampleQuestion]:
    """All questions, easy ones first; the first is the one that the demo asks."""
    rows = json.loads((files(__name__) / "questions.json").read_text(encoding="utf-8"))
    lists = ("answers", "documents")
    return [SampleQuestion(**row | {name: tuple(row[name]) for name in lists}) for row in rows]
