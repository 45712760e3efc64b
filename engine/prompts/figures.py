"""Finds and compares figures in text: numbers, dates, amounts, codes and telephone numbers.

A figure is a word with a digit, and the words joined to it: `41`, `18,642.50`, `4-1163`, `KX-7731-B`, `0471/55821`.
Comparison ignores scripts and widths of digits, grouped thousands (18,642 and 18642), lengths of hyphens, and case.
Numbers in words are not figures: "twelve" is not found for 12. `figure_rows.py` finds figures in a prompt's tokens.
"""

import re
import unicodedata
from functools import lru_cache

_HYPHENS = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
_THOUSANDS = re.compile(r"(?<![\w.,-])\d{1,3}(?:[.,'’ ]\d{3})+(?![\d])")
_JOINED = r"[^\W_]*\d[^\W_]*"  # letters and at least one digit
FIGURE = re.compile(
    rf"(?:(?<![^\W_])[^\W\d_]{{1,4}}[-/])?{_JOINED}(?:[.,:/'’-]{_JOINED}|[-/][^\W\d_]{{1,3}}(?![^\W_]))*"
)
_GROUPED = re.compile(r"(?<![\w.,-])\d{1,3}(?:[  ]\d{3})+(?!\d)")  # by blanks: `18 642`
_UNIT = re.compile(r"(?<=\d)(?:st|nd|rd|th|[^\W\d_]{1,2})(?![^\W_])")  # of `9th`, `41m`, `20km`
_LIST_NUMBER = re.compile(r"^\s*\d{1,3}[.)]\s", re.MULTILINE)
_CITATION = re.compile(r"\[\d{1,4}(?:\s*[,;]\s*\d{1,4})*\]")


@lru_cache(maxsize=64)
def normalised(text: str) -> str:
    """The text in the form in which figures are compared."""
    folded = "".join(_ascii_digit(letter) for letter in unicodedata.normalize("NFKC", text)).casefold()
    spaced = " ".join(folded.translate(_HYPHENS).split())
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), spaced)


def contains(text: str, figure: str) -> bool:
    """Whether the text contains the whole figure or name: 4 is not in `4-1163`, 41 not in `41.5`."""
    return _occurs_in(normalised(figure), normalised(text))


def figures_in(text: str) -> list[str]:
    """The figures of a text as written, each once, in order; without citations and list numbers."""
    if len(_LIST_NUMBER.findall(text)) > 1:  # one alone may be `13. März`
        text = _LIST_NUMBER.sub("", text)
    plain = unicodedata.normalize("NFKC", _CITATION.sub(" ", text)).translate(_HYPHENS)
    grouped = _GROUPED.findall(plain)
    return list(dict.fromkeys([*grouped, *FIGURE.findall(_GROUPED.sub(" ", plain))]))


def unsupported_figures(answer: str, given: str) -> tuple[str, ...]:
    """The figures of an answer that do not occur in the prompt's text `given` (passages, question, history)."""
    found = figures_in(answer)
    if not found:
        return ()
    text = normalised(given)
    # With or without the letters of a unit after it: `41m` for `41 m`, `9th` for `9`.
    spellings = {figure: (normalised(figure), _UNIT.sub("", normalised(figure))) for figure in found}
    return tuple(f for f in found if not any(_occurs_in(spelling, text) for spelling in spellings[f]))


def _occurs_in(figure: str, text: str) -> bool:
    pattern = rf"(?<!\w)(?<!\d[.,-]){re.escape(figure)}(?!\w|[.,-]\d)"
    return re.search(pattern, text) is not None


def _ascii_digit(letter: str) -> str:
    return str(unicodedata.digit(letter)) if letter.isdigit() and not letter.isascii() else letter
