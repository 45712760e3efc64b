"""Finds a text in a page that another program read, by its letters.

White space, hyphens and the form of letters (ligatures, case) differ between readers of a page; letters do not. So both
texts are folded to their letters, and a match is exact in those.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from ragblend.app.library.tables import CELL_NAME

HYPHENS = frozenset("-\u00ad\u2010\u2011\u2012\u2212\x02\ufffe\uffff")
SHORT_LETTERS = 4  # shorter lines occur anywhere, so they are not searched separately


Folded = tuple[str, list[int]]  # the letters of a text, and the index of each in it


def fold(characters: Sequence[str]) -> Folded:
    """Fold a text, or a list of strings with any number of characters each."""
    letters: list[str] = []
    places: list[int] = []
    for place, character in enumerate(characters):
        for letter in unicodedata.normalize("NFKC", character).casefold():
            if (
                letter not in HYPHENS
                and letter != "|"  # between the cells of a row, where a page has nothing
                and not letter.isspace()
                and unicodedata.category(letter) not in ("Cc", "Cf")
            ):
                letters.append(letter)
                places.append(place)
    return "".join(letters), places


def find(text: str, page: Folded, part: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """The (start, stop) indexes of the text on the page: as a whole, or line by line; None if it is not found.

    part: return only text[start:stop] of what is found; that part alone may also occur elsewhere on the page.
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
    """Readers may order columns and footers differently: each line, or cell of a row that is not there as a whole, must
    come after the last one, or occur once.

    Returns (index on the page, start, stop) of each line, all in letters; start and stop are those in the text.
    """
    found: list[tuple[int, int, int]] = []
    cursor = end = 0
    lines = ([line] if fold(line)[0] in letters else line.split(" | ") for line in text.split("\n"))
    for line in chain.from_iterable(lines):
        wanted, _ = fold(line)
        begin, end = end, end + len(wanted)
        start = letters.find(wanted, cursor)
        column = CELL_NAME.match(line) if start < 0 and wanted not in letters else None
        if column is not None:  # only the cell's value stands there
            wanted, _ = fold(line[column.end() :])
            begin, start = end - len(wanted), letters.find(wanted, cursor)
        if len(wanted) < SHORT_LETTERS:
            continue
        if start < 0:
            start = letters.find(wanted)
            if start < 0 or letters.find(wanted, start + 1) >= 0:
                return None
        found.append((start, begin, end))
        cursor = start + len(wanted)
    return found
