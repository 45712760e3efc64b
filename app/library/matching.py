"""Finds a passage's text on a page, whose text was extracted by another program.

White space, hyphens, case and ligatures differ between programs; letters do not. So both texts are folded to their
letters, which must match exactly.
"""

import unicodedata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from ragblend.app.library.tables import CELL_NAME

# Signs that `fold` leaves out: hyphens, and the bar that is between cells in our text, but not on the page.
UNFOLDED_SIGNS = frozenset("-\u00ad\u2010\u2011\u2012\u2212\x02\ufffe\uffff|")
SHORT_LETTERS = 4  # lines with fewer letters occur anywhere, so they are not searched separately
Folded = tuple[str, list[int]]  # the letters of a text, and each one's index in the text


def fold(characters: Sequence[str]) -> Folded:
    """Fold a text, or a list of strings, whose indexes then are those in the list."""
    found = [
        (letter, index)
        for index, character in enumerate(characters)
        for letter in unicodedata.normalize("NFKC", character).casefold()
        if letter not in UNFOLDED_SIGNS
        and not letter.isspace()
        and unicodedata.category(letter) not in {"Cc", "Cf"}
    ]
    return "".join(letter for letter, _ in found), [index for _, index in found]


def find(text: str, page: Folded, part: tuple[int, int] | None = None) -> list[tuple[int, int]] | None:
    """The (start, stop) indexes on the page of the text as a whole, or of each of its lines; None if it is not found.

    part: (start, stop) in the text: find all of it, so that other occurrences of the part are ignored, but return only
    where this part is.
    """
    (wanted, text_indexes), (letters, page_indexes) = fold(text), page
    if not wanted:
        return None
    start = letters.find(wanted)
    found = [(start, 0, len(wanted))] if start >= 0 else _by_lines(text, letters)
    part_start, part_stop = (bisect_left(text_indexes, index) for index in part or (0, len(text)))
    spans = [
        (at + max(part_start, start) - start, at + min(part_stop, stop) - start)
        for at, start, stop in found or ()
        if max(part_start, start) < min(part_stop, stop)
    ]
    return [(page_indexes[start], page_indexes[stop - 1] + 1) for start, stop in spans] or None


def _by_lines(text: str, letters: str) -> list[tuple[int, int, int]] | None:
    """Find each line of the text, because programs order columns and footers differently; None if one is not found.

    A line must come after the previous one, or occur only once. A table row that is not on the page as a whole is found
    cell by cell. Returns (start on the page, start in the text, stop in the text) of each line, counted in letters.
    """
    found: list[tuple[int, int, int]] = []
    cursor = end = 0
    lines = ([line] if fold(line)[0] in letters else line.split(" | ") for line in text.split("\n"))
    for line in chain.from_iterable(lines):
        wanted, _ = fold(line)
        begin, end = end, end + len(wanted)
        start = letters.find(wanted, cursor)
        column = CELL_NAME.match(line) if start < 0 and wanted not in letters else None
        if column is not None:  # the page has only the cell's value
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
