"""From the text that a framework made of its passages back to segments: chunks, and what is written around them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ragblend.engine.prompt import Chunk, Literal, Segment
from ragblend.integrations.finding import MINIMUM
from ragblend.integrations.passages import Passage, PassageRegistry

Piece = str | Passage
"""Text, or a passage that the framework named explicitly (a content block with an id)."""


def resolve(
    pieces: Sequence[Piece], registry: PassageRegistry | None, named: Sequence[Passage] = ()
) -> tuple[Segment, ...]:
    """The pieces as segments whose texts, concatenated, are the pieces' texts, concatenated.

    A passage is a chunk as it stands. Adjacent texts are one text, in which `named` passages are looked for first,
    the longest first, wherever they occur, and the registry's in what is left. Named passages that are not there are
    ignored, and so are those of fewer than 16 characters: they would be found inside other words.
    """
    return tuple(segment for piece in _found(pieces, registry, named) if (segment := _segment(piece)))


def _found(
    pieces: Sequence[Piece], registry: PassageRegistry | None, named: Sequence[Passage]
) -> Iterator[Piece]:
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if not is_text:
            yield from group
            continue
        for piece in _split_by_names(["".join(piece for piece in group if isinstance(piece, str))], named):
            yield from _split_by_registry(piece, registry) if isinstance(piece, str) else [piece]


def _segment(piece: Piece) -> Segment | None:
    """None for what has no text."""
    if isinstance(piece, str):
        return Literal(piece, verbatim=True) if piece else None
    return Chunk(piece.text, piece.node_id) if piece.text else None


def _split_by_registry(text: str, registry: PassageRegistry | None) -> Iterator[Piece]:
    """The literals between two chunks stay one literal each, and may be empty."""
    at = 0
    for found in registry.find(text) if registry is not None else []:
        yield text[at : found.start]
        yield Passage(text[found.start : found.stop], found.node_id)
        at = found.stop
    yield text[at:]


def _split_by_names(pieces: Iterable[Piece], named: Sequence[Passage]) -> list[Piece]:
    """Cut named passages out of the texts among `pieces`; of two with one text the first gives its node id."""
    by_text: dict[str, Passage] = {}
    for passage in named:
        if len(passage.text) >= MINIMUM:
            by_text.setdefault(passage.text, passage)
    longest_first = sorted(by_text.values(), key=lambda passage: len(passage.text), reverse=True)
    split = list(pieces)
    for _, equally_long in groupby(longest_first, key=lambda passage: len(passage.text)):
        wanted = list(equally_long)
        split = [part for piece in split for part in _cut(piece, wanted)]
    return split


def _cut(piece: Piece, wanted: Sequence[Passage]) -> Iterator[Piece]:
    """Cut passages of one length out of a text, the earliest first; each is searched for once through the text."""
    if not isinstance(piece, str):
        yield piece
        return
    at = 0
    places = {passage: piece.find(passage.text) for passage in wanted}
    while places := {passage: place for passage, place in places.items() if place >= 0}:
        first = min(places, key=lambda passage: places[passage])
        yield piece[at : places[first]]
        yield first
        at = places[first] + len(first.text)
        places = {p: place if place >= at else piece.find(p.text, at) for p, place in places.items()}
    yield piece[at:]
