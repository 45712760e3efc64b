"""From the text that a framework made of its passages back to segments: chunks, and what is written around them."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ragblend.engine.prompts.segments import Chunk, Literal, Segment
from ragblend.integrations.finding import MINIMUM, TextIndex, known
from ragblend.integrations.passages import Found, Passage, PassageRegistry

Piece = str | Passage
"""Text, or a passage that the framework named explicitly (a content block with an id)."""


def segments(pieces: Iterable[Piece]) -> tuple[Segment, ...]:
    """A passage is a chunk, a text is a literal; what has no text is left out."""
    return tuple(segment for piece in pieces if (segment := _segment(piece)))


def found_in(
    pieces: Sequence[Piece], registry: PassageRegistry | None, named: Sequence[Passage] = ()
) -> Iterator[Piece]:
    """The pieces, cut so that every passage in their texts is a piece; concatenated they are what they were.

    A passage is one as it stands. Adjacent texts are one text, in which `named` passages are looked for first, the
    longest first, wherever they occur, and the registry's in what is left. Named passages that are not there are
    ignored, and so are those of fewer than 16 characters: they would be found inside other words.
    """
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if not is_text:
            yield from group
            continue
        text = "".join(piece for piece in group if isinstance(piece, str))
        for piece in cut(text, _named_in(text, named)):
            yield from cut(piece, _known_in(piece, registry)) if isinstance(piece, str) else [piece]


def _segment(piece: Piece) -> Segment | None:
    """None for what has no text."""
    if isinstance(piece, str):
        return Literal(piece, verbatim=True) if piece else None
    return Chunk(piece.text, piece.node_id) if piece.text else None


def _known_in(text: str, registry: PassageRegistry | None) -> list[Found]:
    return registry.find(text) if registry is not None else []


def _named_in(text: str, named: Sequence[Passage]) -> list[Found]:
    """Where named passages stand; of two with one text the first gives its node id."""
    by_text = {passage.text: passage for passage in reversed(named) if len(passage.text) >= MINIMUM}
    index = TextIndex()
    index.add(known(by_text))
    found = index.find(text, lambda _, start, stop: by_text.get(text[start:stop]))
    return [Found(start, stop, passage.node_id) for start, stop, passage in found]


def cut(text: str, places: Sequence[Found]) -> Iterator[Piece]:
    """The literals between two chunks stay one literal each, and may be empty."""
    at = 0
    for place in places:
        yield text[at : place.start]
        yield Passage(text[place.start : place.stop], place.node_id)
        at = place.stop
    yield text[at:]
