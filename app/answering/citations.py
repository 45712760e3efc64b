"""Numbered citations: the sources that an answer cites, unknown numbers, and matches for sentences without a number.

Pure functions over text. A model that was asked to cite writes `[2]`; a small one often does not, so a sentence without
a number gets that of a source with a sentence that says the same (`support.py`), marked as our match. A `[2]` in a
passage, as scientific papers have them, is the document's own: if the model copies it, it is no citation. A figure or
name of the answer links to a passage that has it, or is marked if it is not in the prompt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.support import (
    MIN_WORDS,
    SOURCE_NUMBERS,
    SupportingSpan,
    is_statement,
    names,
    sentences,
    supporting_span,
)
from ragblend.engine.prompts.figures import contains, figures_in

_UNFINISHED_END = re.compile(
    r"\s*+(?:\[[\d\s,;]*)?+\Z"
)  # white space, and a bracket that may become a citation
_NUMBER = re.compile(r"\d+")
_LINK_OR_CODE = re.compile(r"\S*(?:://|\]\()\S*|`[^`\n]*`")  # figures in these are not marked
MIN_WORDS_OF_MARK = 2  # the model's own number is less likely to be there by chance
DOUBT = "?"  # in a citation whose source does not support the sentence, and in brackets after an unsupported figure


@dataclass(frozen=True)
class Citation:
    """One number at text[start:stop]; source is None if there is no such number.

    by `match`: the model cited no source that supports the sentence, but this source does; start == stop is the
    sentence's end. place: source.text[start:stop] supports the sentence; None if the source does not support it.
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
    """A figure or name, text[start:stop], and a source that has it, or None.

    start == stop: the end of a sentence that has no citation.
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
        """Text, citations and marks in order; the text pieces leave out the model's numbers and the marked figures."""
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
    """The citations of an answer: the model's own, and a match for each sentence that none of these supports.

    unsupported: the answer's figures and names that are not in the prompt, from the report.
    """
    citations, marks = list[Citation](), list[Mark]()
    document_numbers, before = _document_numbers(sources), ""
    for start, stop in sentences(text):
        of_sentence = _model_citations(text, start, stop, sources, document_numbers)
        if all(citation.place is None for citation in of_sentence):
            of_sentence += _matched_citation(text[start:stop], stop, sources, before)
        before = text[start:stop]
        citations += of_sentence
        supporting = [citation.source for citation in of_sentence if citation.place]
        marks += _figure_marks(text, start, stop, supporting, sources, unsupported)
        if sources and not of_sentence and is_statement(text[start:stop]):
            marks.append(Mark(stop, stop))
    return CitedAnswer(text, tuple(citations), tuple(marks))


def _figure_marks(
    text: str,
    start: int,
    stop: int,
    supporting: Sequence[AnswerSource | None],
    sources: Sequence[AnswerSource],
    unsupported: Sequence[str],
) -> list[Mark]:
    """Marks for the figures and names of a sentence that are unsupported, or that a source has.

    supporting: sources that support the sentence, which are preferred.
    """
    sentence, marks = text[start:stop], list[Mark]()
    skipped = (SOURCE_NUMBERS, _LINK_OR_CODE)
    taken = [match.span() for pattern in skipped for match in pattern.finditer(text, start, stop)]
    for figure in sorted({*figures_in(sentence), *names(sentence), *unsupported}, key=len, reverse=True):
        candidates = (each for each in (*supporting, *sources) if each is not None)
        having = (each for each in candidates if contains(each.text, figure))
        source = None if figure in unsupported else next(having, None)
        if source is None and figure not in unsupported:
            continue
        whole_figure = re.compile(rf"(?<![\w.,-]){re.escape(figure)}(?!\w|[.,-]\d)")
        for match in whole_figure.finditer(text, start, stop):
            first, last = match.span()
            if not any(first < end and begin < last for begin, end in taken):
                marks.append(Mark(first, last, figure, source))
                taken.append((first, last))
    return sorted(marks, key=lambda mark: mark.start)


def with_marks(
    text: str, sources: Sequence[AnswerSource], finished: bool = True, unsupported: Sequence[str] = ()
) -> str:
    """The text with matched numbers after their sentences, and with DOUBT at unsupported citations and figures.

    A document's number that looks like one of ours is escaped. finished: False while the answer is being written; then
    only the part that later text cannot change is returned, so that the next call's result begins with this one's.
    """
    text = text if finished else _UNFINISHED_END.sub("", text)
    spans, document_numbers = sentences(text), _document_numbers(sources)
    if not finished and spans:
        if len(spans) > 1 and text[spans[-2][1] :].lstrip().startswith("["):
            spans.pop()  # it may become a citation, which belongs to the sentence before it
            text = text[: spans[-1][1]]
        # Whether a citation is supported depends on the whole sentence, so an unfinished one ends before its first.
        brackets = _brackets(text, spans[-1][0])
        first_citation = (match.start() for match, numbers in brackets if not document_numbers & numbers)
        text = text[: next(first_citation, len(text))].rstrip()
    finished_stops = [stop for _, stop in (spans if finished else spans[:-1])]
    cited = cite(text[: max(finished_stops, default=0)], sources, unsupported)
    insertions = [
        (each.stop, f" [{each.number}]") if each.by == "match" else (each.stop - 1, DOUBT)
        for each in cited.citations
        if each.by == "match"
        or each.source is None
        or (each.place is None and _is_in_statement(each, text, spans))
    ]
    insertions += [(mark.stop, f" [{DOUBT}]") for mark in cited.marks if mark.text and mark.source is None]
    ours = {source.number for source in sources}
    insertions += [
        (match.start(), "\\")
        for match, numbers in _brackets(text)
        if document_numbers & numbers and ours & numbers
    ]
    marked, at = "", 0
    for position, inserted in sorted(dict.fromkeys(insertions), key=lambda each: each[0]):
        marked, at = f"{marked}{text[at:position]}{inserted}", position
    return marked + text[at:]


def _is_in_statement(citation: Citation, text: str, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether the citation is in a sentence long enough to be called unsupported."""
    return any(a <= citation.start < b and is_statement(text[a:b]) for a, b in spans)


@lru_cache(maxsize=512)
def bracketed_numbers(text: str) -> frozenset[int]:
    """The numbers in square brackets in a text."""
    return frozenset(number for _, numbers in _brackets(text) for number in numbers)


def _document_numbers(sources: Sequence[AnswerSource]) -> set[int]:
    """Numbers in square brackets in the passages: the documents' own, as the prompt does not number its passages."""
    return {number for source in sources for number in bracketed_numbers(source.text)}


def _brackets(text: str, *span: int) -> list[tuple[re.Match[str], set[int]]]:
    """Each pair of square brackets with numbers (`[1, 3]`), and its numbers; span: search from here (to there)."""
    return [
        (match, set(map(int, _NUMBER.findall(match.group()))))
        for match in SOURCE_NUMBERS.finditer(text, *span)
    ]


def _model_citations(
    text: str, start: int, stop: int, sources: Sequence[AnswerSource], document_numbers: set[int]
) -> list[Citation]:
    """The sentence's numbers in square brackets; `[1, 3]` gives two citations at the same position.

    A source supports its citation if it supports the sentence, or the words since the number before it.
    """
    citations, words_start = list[Citation](), start
    for match, numbers in _brackets(text, start, stop):
        if document_numbers & numbers:
            continue
        words_before = text[words_start : match.start()]
        claims = (text[start:stop], MIN_WORDS), (words_before, MIN_WORDS_OF_MARK)
        for number in map(int, _NUMBER.findall(match.group())):
            source = next((source for source in sources if source.number == number), None)
            spans = (_support(claim, source, least) for claim, least in claims) if source is not None else ()
            span = next((each for each in spans if each is not None), None)
            place = None if span is None else (span.start, span.stop)
            citations.append(Citation(match.start(), match.end(), number, source, place=place))
        words_start = match.end() if words_before.strip() else words_start  # `[1] [2]` cite the same words
    return citations


def _matched_citation(
    sentence: str, end: int, sources: Sequence[AnswerSource], before: str
) -> list[Citation]:
    """A citation of the source that supports most of the sentence's words, or []; of equal sources the first."""
    spans = ((source, _support(sentence, source, before=before)) for source in sources)
    found = [(span.share, -source.number, source, span) for source, span in spans if span is not None]
    if not found:
        return []
    _, _, best, span = max(found)
    return [Citation(end, end, best.number, best, "match", (span.start, span.stop))]


def _support(
    sentence: str, source: AnswerSource, least_words: int = MIN_WORDS, before: str = ""
) -> SupportingSpan | None:
    about = f"{source.document} {source.location}"
    return supporting_span(sentence, source.text, about, least_words, before)
