"""Finding a text in another that was read by another program: the same letters in the same order, or nothing.

White space, hyphens and the form of letters (ligatures, case) differ between readers of one page; letters do not. So
both are folded to their letters, and what is found is exact in those.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence

HYPHENS = frozenset("-\u00ad\u2010\u2011\u2012\u2212\x02\ufffe\uffff")
SHORT_LETTERS = 4  # a line of fewer stands anywhere: it is not looked for by itself


Folded = tuple[str, list[int]]  # the letters of a text, and where each of them stands in it


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
    return "".join(letters), places


def find(text: str, page: Folded, part: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """Where the text stands, as (start, stop) places: whole, or else every line of it; None if that cannot be told.

    part: of what is found only text[start:stop], which may stand elsewhere on the page as well.
    """
    (wanted, origins), (letters, places) = fold(text), page
    if not wanted:
        return None
    start = letters.find(wanted)
    found = [(start, 0, len(wanted))] if start >= 0 else _by_lines(text, letters)
    first, last = (bisect_left(origins, at) for at in part or (0, len(text)))
    cut = [(at, max(first, begin), min(last, end), begin) for at, begin, end in found or ()]
    spans = [(at + a - begin, at + b - begin) for at, a, b, begin in cut if a < b]
    return [(places[start], places[stop - 1] + 1) for start, stop in spans] or None


def _by_lines(text: str, letters: str) -> list[tuple[int, int, int]] | None:
    """Readers may take columns and foot lines in another order: each line must be there, behind the last or once.

    (place on the page, start, stop) of each, all in letters; start and stop are those of the line in the text.
    """
    found: list[tuple[int, int, int]] = []
    behind = end = 0
    for line in text.split("\n"):
        wanted, _ = fold(line)
        begin, end = end, end + len(wanted)
        if len(wanted) < SHORT_LETTERS:
            continue
        start = letters.find(wanted, behind)
        if start < 0:
            start = letters.find(wanted)
            if start < 0 or letters.find(wanted, start + 1) >= 0:
                return None
        found.append((start, begin, end))
        behind = start + len(wanted)
    return found
