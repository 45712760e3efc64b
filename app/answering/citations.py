"""Numbered citations: the sources that an answer cites, unknown numbers, and matches for sentences without a number.

Pure functions over text. A model that was asked to cite writes `[2]`; a small one often does not, so a sentence without
a number gets that of the source with a sentence that says the same (`support.py`), marked as our match. A `[2]` that a
passage has, as scientific papers do, is that document's own: where the model copies it, it is text. Figures and names
are marked if no passage has them, and lead to the one that does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.support import (
    LEAST_WORDS,
    SOURCE_NUMBERS,
    SupportingSpan,
    is_statement,
    names,
    sentences,
    supporting_span,
)
from ragblend.engine.prompts.figures import contains, figures_in

_UNCLOSED = re.compile(r"\s*+(?:\[[\d\s,;]*)?+\Z")  # white space, and what may become a number
NUMBER = re.compile(r"\d+")
LINK = re.compile(r"\S*(?:://|\]\()\S*|`[^`\n]*`")
LEAST_WORDS_OF_MARK = 2  # the model's own number is less likely to be there by chance
DOUBT = "?"  # after a number whose source does not support the sentence, and in brackets after a figure of no passage


@dataclass(frozen=True)
class Citation:
    """One number at text[start:stop]; source is None if there is no such number.

    by `match`: the model wrote no number of a source that supports the sentence that ends at start == stop, but this
    one does. place: source.text[start:stop] supports the sentence; None if the model cites a source that does not.
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
class Mark:
    """A figure or name, text[start:stop], and a source that has it; None: none has.

    start == stop: the end of a sentence that no source supports.
    """

    start: int
    stop: int
    text: str = ""
    source: AnswerSource | None = None


@dataclass(frozen=True)
class CitedAnswer:
    """An answer with its citations and marks, each in the order of the text."""

    text: str
    citations: tuple[Citation, ...]
    marks: tuple[Mark, ...] = ()

    @cached_property
    def unknown(self) -> tuple[int, ...]:
        """Numbers that no source has."""
        return tuple(dict.fromkeys(c.number for c in self.citations if c.source is None))

    def pieces(self) -> list[str | Citation | Mark]:
        """Text, citations and marks in their order; the text is without the model's numbers and marked figures."""
        pieces: list[str | Citation | Mark] = []
        at = 0
        found: list[Citation | Mark] = [*self.citations, *self.marks]
        for each in sorted(found, key=lambda each: each.stop):
            if at < each.start:
                pieces.append(self.text[at : each.start])
            pieces.append(each)
            at = max(at, each.stop)
        return [*pieces, self.text[at:]] if at < len(self.text) else pieces


def cite(text: str, sources: Sequence[AnswerSource], unsupported: Sequence[str] = ()) -> CitedAnswer:
    """The citations of an answer: the model's own, and matches for sentences without a right one.

    unsupported: its figures and names that are not in the prompt, as the report has them.
    """
    found, marks = list[Citation](), list[Mark]()
    foreign, before = _foreign_marks(sources), ""
    for start, stop in sentences(text):
        here = _model_citations(text, start, stop, sources, foreign)
        if all(citation.place is None for citation in here):
            here += _matched_citation(text[start:stop], stop, sources, before)
        before = text[start:stop]
        found += here
        marks += _figures(
            text, start, stop, [each.source for each in here if each.place], sources, unsupported
        )
        if sources and not here and is_statement(text[start:stop]):
            marks.append(Mark(stop, stop))
    return CitedAnswer(text, tuple(found), tuple(marks))


def _figures(
    text: str,
    start: int,
    stop: int,
    cited: Sequence[AnswerSource | None],
    sources: Sequence[AnswerSource],
    unsupported: Sequence[str],
) -> list[Mark]:
    """The figures and names of a sentence: those of `unsupported`, and those that a source has, best a cited one."""
    sentence, marks = text[start:stop], list[Mark]()
    no_words = [match.span() for way in (SOURCE_NUMBERS, LINK) for match in way.finditer(text, start, stop)]
    for figure in sorted({*figures_in(sentence), *names(sentence), *unsupported}, key=len, reverse=True):
        having = (each for each in (*cited, *sources) if each is not None and contains(each.text, figure))
        source = None if figure in unsupported else next(having, None)
        if source is None and figure not in unsupported:
            continue
        standing = re.compile(rf"(?<![\w.,-]){re.escape(figure)}(?!\w|[.,-]\d)")
        for match in standing.finditer(text, start, stop):
            first, last = match.span()
            if not any(first < end and begin < last for begin, end in no_words):
                marks.append(Mark(first, last, figure, source))
                no_words.append((first, last))
    return sorted(marks, key=lambda mark: mark.start)


def with_marks(
    text: str, sources: Sequence[AnswerSource], finished: bool = True, unsupported: Sequence[str] = ()
) -> str:
    """The text with the matched numbers after their sentences, and with doubts where a source does not say that.

    A document's mark that looks like a number of ours is escaped. Not finished: only what later text cannot change, so
    that the next call's result begins with this one's.
    """
    text = text if finished else _UNCLOSED.sub("", text)
    spans, foreign = sentences(text), _foreign_marks(sources)
    if not finished and spans:
        if len(spans) > 1 and text[spans[-2][1] :].lstrip().startswith("["):
            spans.pop()  # it may become a number by the model, which belongs to the sentence before
            text = text[: spans[-1][1]]
        # Whether a number is right depends on the whole sentence.
        begun = (match.start() for match, numbers in _marks(text, spans[-1][0]) if not foreign & numbers)
        text = text[: next(begun, len(text))].rstrip()
    certain = [stop for _, stop in (spans if finished else spans[:-1])]
    cited = cite(text[: max(certain, default=0)], sources, unsupported)
    added = [
        (each.stop, f" [{each.number}]") if each.by == "match" else (each.stop - 1, DOUBT)
        for each in cited.citations
        if each.by == "match"
        or each.source is None
        or (each.place is None and _is_in_statement(each, text, spans))
    ]
    added += [(mark.stop, f" [{DOUBT}]") for mark in cited.marks if mark.text and mark.source is None]
    ours = {source.number for source in sources}
    added += [
        (match.start(), "\\") for match, numbers in _marks(text) if foreign & numbers and ours & numbers
    ]
    marked, at = "", 0
    for place, mark in sorted(dict.fromkeys(added), key=lambda each: each[0]):
        marked, at = f"{marked}{text[at:place]}{mark}", place
    return marked + text[at:]


def _is_in_statement(citation: Citation, text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether its sentence has enough words to say that the source does not support it."""
    return any(a <= citation.start < b and is_statement(text[a:b]) for a, b in spans)


@lru_cache(maxsize=512)
def marks_in(text: str) -> frozenset[int]:
    """The numbers that stand in square brackets in a text."""
    return frozenset(number for _, numbers in _marks(text) for number in numbers)


def _foreign_marks(sources: Sequence[AnswerSource]) -> set[int]:
    """Numbers that are marks of the documents: the prompt shows the model no others."""
    return {number for source in sources for number in marks_in(source.text)}


def _marks(text: str, *span: int) -> list[tuple[re.Match[str], set[int]]]:
    return [
        (match, set(map(int, NUMBER.findall(match.group()))))
        for match in SOURCE_NUMBERS.finditer(text, *span)
    ]


def _model_citations(
    text: str, start: int, stop: int, sources: Sequence[AnswerSource], foreign: set[int]
) -> list[Citation]:
    """The numbers in square brackets; `[1, 3]` gives two citations at the same position.

    A number is right if its source supports the sentence, or the words since the number before it.
    """
    citations, said_from = list[Citation](), start
    for match, numbers in _marks(text, start, stop):
        if foreign & numbers:
            continue
        said = (text[start:stop], LEAST_WORDS), (text[said_from : match.start()], LEAST_WORDS_OF_MARK)
        for number in map(int, NUMBER.findall(match.group())):
            source = next((source for source in sources if source.number == number), None)
            found = (_support(words, source, least) for words, least in said) if source is not None else ()
            place = next((each for each in found if each is not None), None)
            place_of = None if place is None else (place.start, place.stop)
            citations.append(Citation(match.start(), match.end(), number, source, place=place_of))
        said_from = match.end() if text[said_from : match.start()].strip() else said_from
    return citations


def _matched_citation(
    sentence: str, end: int, sources: Sequence[AnswerSource], before: str
) -> list[Citation]:
    """The source with the sentence that matches most words; of equal ones the first in rank."""
    places = ((s, _support(sentence, s, before=before)) for s in sources)
    found = [(place.share, -s.number, s, place) for s, place in places if place is not None]
    if not found:
        return []
    _, _, best, place = max(found)
    return [Citation(end, end, best.number, best, "match", (place.start, place.stop))]


def _support(
    sentence: str, source: AnswerSource, least_words: int = LEAST_WORDS, before: str = ""
) -> SupportingSpan | None:
    about = f"{source.document} {source.location}"
    return supporting_span(sentence, source.text, about, least_words, before)
