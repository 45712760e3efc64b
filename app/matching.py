"""Finding a text in another that was read by another program: the same letters in the same order, or nothing.

White space, hyphens and the form of letters (ligatures, case) differ between readers of one page; letters do not. So
both are folded to their letters, and what is found is exact in those.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

HYPHENS = frozenset("-\u00ad\u2010\u2011\u2012\u2212\x02\ufffe\uffff")
SHORT_LETTERS = 4  # a line of fewer stands anywhere: it is not looked for by itself


@dataclass(frozen=True)
class Folded:
    """The letters of a text; places[i] is where letter i stands in it."""

    letters: str
    places: tuple[int, ...]


def fold(characters: Sequence[str]) -> Folded:
    """Of a text, or of a list of characters that may be empty or several."""
    letters: list[str] = []
    places: list[int] = []
    for place, character in enumerate(characters):
        for letter in unicodedata.normalize("NFKC", character).casefold():
            if (
                letter not in HYPHENS
                and not letter.isspace()
                and unicodedata.category(letter) not in ("Cc", "Cf")
            ):
                letters.append(letter)
                places.append(place)
    return Folded("".join(letters), tuple(places))


def find(text: str, page: Folded, part: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """Where the text stands, as (start, stop) places: whole, or else every line of it; None if that cannot be told.

    part: of what is found only text[start:stop], which may stand elsewhere on the page as well.
    """
    wanted = fold(text)
    if not wanted.letters:
        return None
    start = page.letters.find(wanted.letters)
    found = [(start, 0, len(wanted.letters))] if start >= 0 else _by_lines(text, page)
    first, last = (bisect_left(wanted.places, at) for at in part or (0, len(text)))
    cut = [(at, max(first, begin), min(last, end), begin) for at, begin, end in found or ()]
    spans = [(at + a - begin, at + b - begin) for at, a, b, begin in cut if a < b]
    return [(page.places[start], page.places[stop - 1] + 1) for start, stop in spans] or None


def _by_lines(text: str, page: Folded) -> list[tuple[int, int, int]] | None:
    """Readers may take columns and foot lines in another order: each line must be there, behind the last or once.

    (place on the page, start, stop) of each, all in letters; start and stop are those of the line in the text.
    """
    found: list[tuple[int, int, int]] = []
    behind = end = 0
    for line in text.split("\n"):
        wanted = fold(line).letters
        begin, end = end, end + len(wanted)
        if len(wanted) < SHORT_LETTERS:
            continue
        start = page.letters.find(wanted, behind)
        if start < 0:
            start = page.letters.find(wanted)
            if start < 0 or page.letters.find(wanted, start + 1) >= 0:
                return None
        found.append((start, begin, end))
        behind = start + len(wanted)
    return found
