"""What a question gives: the answer, where it comes from, what it cost; and its JSON (design: the command line)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from ragblend.engine.config import Report

# A name of the JSON beside the attribute of the engine's timings; retrieval, ttft and total are completed here.
ENGINE_TIMES = ("load_ms", "stall_ms", "move_ms", "select_ms", "prefill_ms")
PLAIN = ("node_id", "document", "location", "score", "text")  # of a source, in the JSON of an answer


@dataclass(frozen=True)
class AnswerSource:
    """A passage that the model was given, under its number, which it keeps for the whole conversation.

    score: the cosine similarity to the question; earlier: it came with an earlier question and is still before the
    model.
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

    @property
    def label(self) -> str:
        """The document and the place in it."""
        return f"{self.document}, {self.location}" if self.location else self.document

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "AnswerSource":
        return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})


def unsupported_notice(figures: Sequence[str]) -> str | None:
    """What a reader must know of an answer with figures that stand nowhere in its prompt; None where there are none."""
    if not figures:
        return None
    return f"Neither in the passages nor in the question: {', '.join(figures)}. Check before you rely on it."


@dataclass(frozen=True)
class Answer:
    """One answered question. retrieve_ms is part of its times to first token and in total.

    notice: what the user must know, such as passages that did not fit; None when there is nothing.
    """

    text: str
    model: str
    device: str
    sources: tuple[AnswerSource, ...]
    retrieve_ms: float
    report: Report
    notice: str | None = None

    @property
    def ttft_ms(self) -> float:
        """From the question to the first token, everything being loaded: retrieval, prefill, first token."""
        return self.retrieve_ms + self.report.timings.ttft_ms

    def to_json(self) -> dict[str, Any]:
        report, times = self.report, self.report.timings
        result: dict[str, Any] = {
            "answer": self.text,
            "model": self.model,
            "device": self.device,
            "method": report.method,
            "ratio": report.ratio,
            "sources": [{name: getattr(source, name) for name in PLAIN} for source in self.sources],
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
        if report.decision is not None:  # what the loading controller chose, and expected
            result["controller"] = report.decision.to_json()
        return result | ({"notice": self.notice} if self.notice else {})
