"""The answer to a question: its text, its sources, its cost, and its JSON (that of `ragblend ask --json`)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ragblend.app.library.documents import Document, DocumentPassage
from ragblend.engine.config import Report

# The engine's timings that are copied to the JSON; retrieval, ttft and total are added here.
ENGINE_TIMES = ("load_ms", "stall_ms", "move_ms", "select_ms", "prefill_ms")
SOURCE_KEYS = (
    "number",
    "node_id",
    "document",
    "location",
    "score",
    "text",
)  # the fields of a source in the JSON


@dataclass(frozen=True)
class AnswerSource:
    """A passage in the prompt, with its number, which stays the same in the whole conversation.

    score: the cosine similarity to the question; earlier: found for an earlier question and still in the prompt.
    """

    number: int
    node_id: str
    document_id: str
    collection: str
    document: str
    location: str
    score: float
    text: str
    earlier: bool = False

    @classmethod
    def of(
        cls, document: Document, passage: DocumentPassage, score: float, number: int = 0
    ) -> "AnswerSource":
        where = document.id, document.collection, document.name, passage.location
        return cls(number, passage.node_id, *where, round(score, 4), passage.text)

    @property
    def label(self) -> str:
        """The document and the location in it."""
        return f"{self.document}, {self.location}" if self.location else self.document

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "AnswerSource":
        return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})


def unsupported_notice(figures: Sequence[str]) -> str | None:
    """The warning about figures in an answer that are not in its prompt; None if there are none."""
    if not figures:
        return None
    return f"Neither in the passages nor in the question: {', '.join(figures)}. Check before you rely on it."


@dataclass(frozen=True)
class Answer:
    """One answered question. retrieve_ms is included in the time to first token and the total time.

    notice: what the user must know, such as passages that did not fit; None if there is nothing. citations: those that
    the page shows, each as `Citation.to_json` returns it.
    """

    text: str
    model: str
    device: str
    sources: tuple[AnswerSource, ...]
    retrieve_ms: float
    report: Report
    notice: str | None = None
    citations: tuple[dict[str, Any], ...] = ()

    @property
    def ttft_ms(self) -> float:
        """The time from the question to the first token, once the models are loaded: retrieval and prefill."""
        return self.retrieve_ms + self.report.timings.ttft_ms

    def to_json(self) -> dict[str, Any]:
        report, times = self.report, self.report.timings
        result: dict[str, Any] = {
            "answer": self.text,
            "model": self.model,
            "device": self.device,
            "method": report.method,
            "ratio": report.ratio,
            "sources": [{name: getattr(source, name) for name in SOURCE_KEYS} for source in self.sources],
            "citations": list(self.citations),
            "tokens": asdict(report.tokens),
            "timings": {
                "retrieve_ms": round(self.retrieve_ms, 2),
                **{name: round(getattr(times, name), 2) for name in ENGINE_TIMES},
                "ttft_ms": round(self.ttft_ms, 2),
                "total_ms": round(self.retrieve_ms + times.total_ms, 2),
                "tokens_per_s": round(times.tokens_per_s, 2),
            },
            "store": {"hits": report.hits, "misses": report.misses},
            "unsupported_figures": list(report.unsupported_figures),
            "read_again_at": report.read_again_at,
        }
        if report.decision is not None:  # the loading controller's choice and estimate
            result["controller"] = report.decision.to_json()
        return result | ({"notice": self.notice} if self.notice else {})
