"""Finds passages in a framework's text, and splits it into prompt segments."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from ragblend.engine.prompts.segments import Chunk, Literal, Segment
from ragblend.integrations.passages import Passage, PassageRegistry, PassageSpan
from ragblend.integrations.text_index import MIN_TEXT_CHARS, TextIndex, hash_texts

Piece = str | Passage
"""Text, or a passage that the framework named explicitly (a content block with an id)."""


def segments(pieces: Iterable[Piece]) -> tuple[Segment, ...]:
    """Passages as chunks and text as literals; empty ones are left out."""
    return tuple(
        Literal(piece, verbatim=True) if isinstance(piece, str) else Chunk(piece.text, piece.node_id)
        for piece in pieces
        if (piece if isinstance(piece, str) else piece.text)
    )


def split_at_passages(
    pieces: Sequence[Piece], registry: PassageRegistry | None, named: Sequence[Passage] = ()
) -> Iterator[Piece]:
    """Split texts so that every passage in them is a piece of its own; concatenated, the pieces are the same.

    Adjacent texts are joined. `named` passages are looked for first, the longest first, and registered ones in the
    remaining text. Named passages of fewer than 16 characters are ignored: they would be found inside words.
    """
    for is_text, group in groupby(pieces, key=lambda piece: isinstance(piece, str)):
        if not is_text:
            yield from group
            continue
        text = "".join(piece for piece in group if isinstance(piece, str))
        for piece in split_at_spans(text, _named_spans(text, named)):
            if isinstance(piece, str) and registry is not None:
                yield from split_at_spans(piece, registry.find(piece))
            else:
                yield piece


def _named_spans(text: str, named: Sequence[Passage]) -> list[PassageSpan]:
    """Spans of named passages in the text; of two with the same text the first gives its node id."""
    by_text = {passage.text: passage for passage in reversed(named) if len(passage.text) >= MIN_TEXT_CHARS}
    index = TextIndex()
    index.add(hash_texts(by_text))
    found = index.find(text, lambda _, start, stop: by_text.get(text[start:stop]))
    return [PassageSpan(start, stop, passage.node_id) for start, stop, passage in found]


def split_at_spans(text: str, spans: Sequence[PassageSpan]) -> Iterator[Piece]:
    """Alternate text and passages; the text between two passages may be empty."""
    at = 0
    for span in spans:
        yield text[at : span.start]
        yield Passage(text[span.start : span.stop], span.node_id)
        at = span.stop
    yield text[at:]
