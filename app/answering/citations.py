"""Numbered citations: the sources that an answer cites, unknown numbers, and matches for sentences without a number.

Pure functions over text. A model that was asked to cite writes `[2]`; a small one often does not, so a sentence without
a number gets that of the source with a sentence that says the same (`support.py`), marked as our match. A `[2]` that a
passage has, as scientific papers do, is that document's own: where the model copies it, it is text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.support import NUMBERS, SupportingSpan, sentences, supporting

_UNCLOSED = re.compile(r"\s*+(?:\[[\d\s,;]*)?+\Z")  # white space, and what may become a number
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Citation:
    """One number at text[start:stop]; source is None if there is no such number.

    by `match`: the model wrote no number, but that source supports the sentence that ends at start == stop. place:
    source.text[start:stop] supports the sentence; None if the model cites a source that does not.
    """

    start: int
    stop: int
    number: int
    source: AnswerSource | None
    by: Literal["model", "match"] = "model"
    place: tuple[int, int] | None = None

    def to_json(self) -> dict[str, Any]:
        """With the source's node id, and the part of its text that supports the sentence as `quote`."""
        source, place = self.source, self.place
        return {
            "number": self.number,
            "start": self.start,
            "stop": self.stop,
            "by": self.by,
            "node_id": source.node_id if source else None,
            "quote": source.text[slice(*place)] if source and place else None,
        }


@dataclass(frozen=True)
class CitedAnswer:
    """An answer with its citations, in the order of the text."""

    text: str
    citations: tuple[Citation, ...]

    @cached_property
    def unknown(self) -> tuple[int, ...]:
        """Numbers that no source has."""
        return tuple(dict.fromkeys(c.number for c in self.citations if c.source is None))

    def pieces(self) -> list[str | Citation]:
        """Text and citations in their order; the text is without the model's numbers."""
        pieces: list[str | Citation] = []
        at = 0
        for citation in self.citations:
            if at < citation.start:
                pieces.append(self.text[at : citation.start])
            pieces.append(citation)
            at = max(at, citation.stop)
        return [*pieces, self.text[at:]] if at < len(self.text) else pieces


def cite(text: str, sources: Sequence[AnswerSource]) -> CitedAnswer:
    """The citations of an answer: the model's own, and matches for sentences without one."""
    found: list[Citation] = []
    foreign = _foreign_marks(sources)
    for start, stop in sentences(text):
        found += _model_citations(text, start, stop, sources, foreign) or _matched_citation(
            text[start:stop], stop, sources
        )
    return CitedAnswer(text, tuple(found))


def with_marks(text: str, sources: Sequence[AnswerSource], finished: bool = True) -> str:
    """The text with the matched numbers after their sentences; a document's mark that looks like one is escaped.

    Not finished: only what later text cannot change, so that the next call's result begins with this one's.
    """
    text = text if finished else _UNCLOSED.sub("", text)
    ends = [stop for _, stop in sentences(text)]
    if not finished and len(ends) > 1 and text[ends[-2] :].lstrip().startswith("["):
        ends.pop()  # it may become a number by the model, which belongs to the sentence before
        text = text[: ends[-1]]
    certain = ends if finished else ends[:-1]
    added = [
        (citation.start, f" [{citation.number}]")
        for citation in cite(text, sources).citations
        if citation.by == "match" and citation.start in certain
    ]
    foreign, ours = _foreign_marks(sources), {source.number for source in sources}
    added += [
        (match.start(), "\\") for match, numbers in _marks(text) if foreign & numbers and ours & numbers
    ]
    marked, at = "", 0
    for place, mark in sorted(added):
        marked, at = f"{marked}{text[at:place]}{mark}", place
    return marked + text[at:]


@lru_cache(maxsize=512)
def marks_in(text: str) -> frozenset[int]:
    """The numbers that stand in square brackets in a text."""
    return frozenset(number for _, numbers in _marks(text) for number in numbers)


def _foreign_marks(sources: Sequence[AnswerSource]) -> set[int]:
    """Numbers that are marks of the documents: the prompt shows the model no others."""
    return {number for source in sources for number in marks_in(source.text)}


def _marks(text: str, *span: int) -> list[tuple[re.Match[str], set[int]]]:
    return [(match, set(map(int, NUMBER.findall(match.group())))) for match in NUMBERS.finditer(text, *span)]


def _model_citations(
    text: str, start: int, stop: int, sources: Sequence[AnswerSource], foreign: set[int]
) -> list[Citation]:
    """The numbers in square brackets; `[1, 3]` gives two citations at the same position."""
    numbers = [
        (match.start(), match.end(), int(number))
        for match, found in _marks(text, start, stop)
        if not foreign & found
        for number in NUMBER.findall(match.group())
    ]
    named, sentence = {number for _, _, number in numbers}, text[start:stop]
    known = {source.number: source for source in sources if source.number in named}
    found = {number: _support(sentence, source) for number, source in known.items()}
    places = {number: (place.start, place.stop) for number, place in found.items() if place is not None}
    return [Citation(*each, known.get(each[2]), place=places.get(each[2])) for each in numbers]


def _matched_citation(sentence: str, end: int, sources: Sequence[AnswerSource]) -> list[Citation]:
    """The source with the sentence that matches most words; of equal ones the first in rank."""
    found = [(place.share, -s.number, s, place) for s in sources if (place := _support(sentence, s))]
    if not found:
        return []
    _, _, best, place = max(found)
    return [Citation(end, end, best.number, best, "match", (place.start, place.stop))]


def _support(sentence: str, source: AnswerSource) -> SupportingSpan | None:
    return supporting(sentence, source.text, about=source.document)
