"""Numbered citations: which sources an answer names, which numbers do not exist, and what its sentences rest on.

Pure functions over text. A model that was asked to cite writes `[2]`; a small one often does not, so sentences without
a number are matched with the passages by their words, and marked as found by us.
"""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Literal

from ragblend.app.answer import Source

NUMBERS = re.compile(r"\[(\d{1,4}(?:\s*[,;]\s*\d{1,4})*)\]")
SENTENCE = re.compile(r"[^.!?\n]*(?:[.!?](?=\d)[^.!?\n]*)*(?:[.!?]+|\n|$)")
WORD = re.compile(r"\w+")
MATCHED_SHARE = 0.6  # of a sentence's words that must stand in the passage
MATCHED_WORDS = 3  # fewer words say nothing about where they are from
COMMON = frozenset(
    """the and for that with this from are was were has have had not but its his her their they you your can will which
    what who when where how does did been being than then there here also into about only just such""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class SourceRow:
    """A source under its number, which it keeps for the whole conversation.

    earlier: it came with an earlier question and is still before the model.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "SourceRow":
        return cls(**{field.name: value[field.name] for field in fields(cls) if field.name in value})

    @property
    def plain(self) -> Source:
        """Without number and collection, as the command line has it."""
        return Source(self.node_id, self.document, self.location, self.score, self.text)


@dataclass(frozen=True)
class Citation:
    """One number at text[start:stop]; source is None if there is no such number.

    by `match`: the model wrote no number, but the sentence that ends at start == stop stands in that source.
    """

    start: int
    stop: int
    number: int
    source: SourceRow | None
    by: Literal["model", "match"] = "model"


@dataclass(frozen=True)
class Cited:
    """An answer and its citations, in the order of the text."""

    text: str
    citations: tuple[Citation, ...]

    @cached_property
    def unknown(self) -> tuple[int, ...]:
        """Numbers that no source has."""
        return tuple(dict.fromkeys(c.number for c in self.citations if c.source is None))

    def pieces(self) -> list[str | Citation]:
        """Text and citations in turn; the numbers themselves are not in the text."""
        pieces: list[str | Citation] = []
        at = 0
        for citation in self.citations:
            if at < citation.start:
                pieces.append(self.text[at : citation.start])
            pieces.append(citation)
            at = max(at, citation.stop)
        return [*pieces, self.text[at:]] if at < len(self.text) else pieces


def cite(text: str, sources: Sequence[SourceRow]) -> Cited:
    """The citations of an answer: the model's own, and matches for the sentences that have none."""
    known = {source.number: source for source in sources}
    found: list[Citation] = []
    for sentence in SENTENCE.finditer(text):
        own = _written(text, sentence.start(), sentence.end(), known)
        found += own or _matched(text, sentence.start(), sentence.end(), sources)
    return Cited(text, _without_repeats(found))


def snippet(source: SourceRow, question: str = "", length: int = 200) -> str:
    """The part of the passage that holds most of the question's words, `length` characters at most."""
    text = " ".join(source.text.split())
    if len(text) <= length:
        return text
    wanted = words(question)
    starts = [
        0,
        *(found.start() for found in re.finditer(r"(?<=\s)\S", text) if found.start() <= len(text) - length),
    ]
    best = max(starts, key=lambda start: (len(wanted & words(text[start : start + length])), -start))
    piece = text[best : best + length]
    whole_words = piece if best + length >= len(text) else piece.rsplit(" ", 1)[0]
    return ("… " if best else "") + whole_words + (" …" if best + len(whole_words) < len(text) else "")


def words(text: str) -> set[str]:
    """The words that say something, folded."""
    found = (word.casefold() for word in WORD.findall(text))
    return {word for word in found if word not in COMMON and (len(word) > 2 or word.isdigit())}


def _written(text: str, start: int, stop: int, known: dict[int, SourceRow]) -> list[Citation]:
    """The numbers in square brackets; `[1, 3]` gives two at the same place."""
    return [
        Citation(match.start(), match.end(), int(number), known.get(int(number)))
        for match in NUMBERS.finditer(text, start, stop)
        for number in re.findall(r"\d+", match.group(1))
    ]


def _matched(text: str, start: int, stop: int, sources: Sequence[SourceRow]) -> list[Citation]:
    """The one source in which most of the sentence's words stand; none where two are as good."""
    wanted = words(text[start:stop])
    if len(wanted) < MATCHED_WORDS:
        return []
    shares = sorted(
        ((len(wanted & words(s.text)) / len(wanted), -s.number, s) for s in sources), reverse=True
    )
    if not shares or shares[0][0] < MATCHED_SHARE:
        return []
    if len(shares) > 1 and shares[1][0] == shares[0][0]:
        return []
    end = start + len(text[start:stop].rstrip())
    best = shares[0][2]
    return [Citation(end, end, best.number, best, "match")]


def _without_repeats(found: Sequence[Citation]) -> tuple[Citation, ...]:
    """A run of sentences that match the same source is marked once, at its end."""
    kept: list[Citation] = []
    for citation in found:
        last = kept[-1] if kept else None
        if last is not None and last.by == citation.by == "match" and last.number == citation.number:
            kept.pop()
        kept.append(citation)
    return tuple(kept)
