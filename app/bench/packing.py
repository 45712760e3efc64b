"""Long texts as passages: cut where their parts begin, packed to about so many words."""

import re
from collections.abc import Iterable
from itertools import islice

PASSAGE_WORDS = 360  # about 512 tokens of English
# How the contexts of LongBench begin their parts, whichever comes first: its passages, few-shot examples, paragraphs.
PARTS = (r"Passage \d+:", r"Paragraph \d+:", r"Dialogue: ", r"Question: ", r"Passage:")
_SPACE = re.compile(r"\s+")


def split_parts(context: str, most_words: int = PASSAGE_WORDS) -> list[str]:
    """A context as passages: its own parts if they are marked, else paragraphs packed together."""
    for mark in PARTS:
        parts = re.split(rf"(?m)^(?={mark})", context)
        if len(parts) > 2:
            numbered = r"\d" in mark  # a numbered part is a document of its own, an example only one of many
            return (
                [p for part in parts for p in pack([part], None, most_words)]
                if numbered
                else list(pack(parts, None, most_words))
            )
    return list(pack(context.split("\n\n") if "\n\n" in context else context.split("\n"), None, most_words))


def pack(pieces: Iterable[str], most: int | None, words: int = PASSAGE_WORDS) -> Iterable[str]:
    """Whole pieces put together to passages of at most `words` words, a longer one cut; `most` passages, None: all."""
    return islice(_packed(pieces, words), most)


def _packed(pieces: Iterable[str], words: int) -> Iterable[str]:
    held: list[str] = []
    count = 0
    for piece in (part for whole in pieces for part in _cut(whole.strip(), words)):
        size = len(piece.split())
        if held and count + size > words:
            yield "\n\n".join(held)
            held, count = [], 0
        held.append(piece)
        count += size
    if held:
        yield "\n\n".join(held)


def _cut(piece: str, words: int) -> Iterable[str]:
    """The piece itself, or, if it is too long, parts of it that end at a space."""
    if not piece:
        return
    while len(piece.split()) > words:
        spaces = [found.start() for found in _SPACE.finditer(piece)]
        end = spaces[words - 1]
        yield piece[:end]
        piece = piece[end:].strip()
    yield piece
