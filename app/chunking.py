"""Parts of a document -> passages of at most so many tokens of the model, each with where it stands."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ragblend.app.documents import Passage, node_id
from ragblend.app.readers import Part

SEPARATOR = "\n\n"
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Cut:
    """How long a passage is and how much two neighbours share, in tokens of the model.

    overlap_tokens is 0 by default: what two passages share would be encoded twice, stored twice, and read twice by
    the model whenever both are retrieved.
    """

    chunk_tokens: int = 512
    overlap_tokens: int = 0


def cut_document(document: str, parts: Sequence[Part], count_tokens: CountTokens, cut: Cut) -> list[Passage]:
    """Split on sentences with LlamaIndex's SentenceSplitter, over the borders of pages and sections.

    Filling passages up matters more than stopping at a heading: every passage that is retrieved costs the same
    few fresh tokens around it, however short it is.
    """
    from llama_index.core.node_parser import SentenceSplitter

    splitter = SentenceSplitter(
        chunk_size=cut.chunk_tokens,
        chunk_overlap=cut.overlap_tokens,
        tokenizer=lambda piece: range(count_tokens(piece)),  # it only asks for the length
        paragraph_separator=SEPARATOR,
    )
    text = SEPARATOR.join(part.text for part in parts)
    pieces = splitter.split_text(text)
    places = locate(text, pieces, parts)
    return [
        Passage(
            node_id(document, index, piece), document, index, piece, place or _part_of(index, len(pieces))
        )
        for index, (piece, place) in enumerate(zip(pieces, places, strict=True))
    ]


def locate(text: str, pieces: Sequence[str], parts: Sequence[Part]) -> list[str]:
    """Where each piece stands: the place of its first part, and of its last when that differs ("p. 3 - p. 4")."""
    starts = [0, *accumulate(len(part.text) + len(SEPARATOR) for part in parts)][: len(parts)]
    places, cursor = [], 0
    for piece in pieces:
        start = text.find(piece, cursor)
        start = (
            text.find(piece) if start < 0 else start
        )  # with overlap a piece begins before the last one's end
        assert start >= 0, "the splitter changed the text"
        first, last = (bisect_right(starts, at) - 1 for at in (start, start + len(piece) - 1))
        places.append(_span(parts[first].location, parts[last].location))
        cursor = start + 1
    return places


def _span(first: str, last: str) -> str:
    if first == last or not last:
        return first
    return f"{first} – {last}" if first else last


def _part_of(index: int, count: int) -> str:
    return f"part {index + 1} of {count}"
