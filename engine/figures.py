"""Figures in a text: numbers, dates, amounts, codes and telephone numbers; compared by what they say.

A figure is a word with a digit in it, and what is joined to it: `41`, `18,642.50`, `4-1163`, `KX-7731-B`, `0471/55821`.
Two ways to write one figure are equal: digits of other scripts and widths, grouped thousands (18,642 and 18642),
hyphens of any length, capitals. Numbers in words are no figures: "twelve" is not found for 12.

In a prompt's tokens figures are found by `FigureFinder`, for policies that recompute them as a whole.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

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


def normalised(text: str) -> str:
    """The text as figures are compared in it."""
    folded = "".join(_ascii_digit(letter) for letter in unicodedata.normalize("NFKC", text)).casefold()
    spaced = " ".join(folded.translate(_HYPHENS).split())
    return _THOUSANDS.sub(lambda number: re.sub(r"\D", "", number[0]), spaced)


def contains(text: str, figure: str) -> bool:
    """Whether the text has that figure, or name, as a whole: 4 is not in `4-1163`, 41 not in `41.5`."""
    return _stands_in(normalised(figure), normalised(text))


def figures_in(text: str) -> list[str]:
    """The figures of a text as they are written there, each once, in their order; no citations, no list numbers."""
    if len(_LIST_NUMBER.findall(text)) > 1:  # one alone may be `13. März`
        text = _LIST_NUMBER.sub("", text)
    plain = unicodedata.normalize("NFKC", _CITATION.sub(" ", text)).translate(_HYPHENS)
    grouped = _GROUPED.findall(plain)
    return list(dict.fromkeys([*grouped, *FIGURE.findall(_GROUPED.sub(" ", plain))]))


def unsupported_figures(answer: str, given: str) -> tuple[str, ...]:
    """The figures of an answer that stand nowhere in what the model was given (passages, question, history)."""
    found = figures_in(answer)
    if not found:
        return ()
    known = normalised(given)
    return tuple(figure for figure in found if not _supported(normalised(figure), known))


def _supported(figure: str, known: str) -> bool:
    """With or without the letters of a unit behind it: `41m` for `41 m`, `9th` for `9`."""
    return _stands_in(figure, known) or _stands_in(_UNIT.sub("", figure), known)


def _stands_in(figure: str, text: str) -> bool:
    pattern = rf"(?<!\w)(?<!\d[.,-]){re.escape(figure)}(?!\w|[.,-]\d)"
    return re.search(pattern, text) is not None


def _ascii_digit(letter: str) -> str:
    return str(unicodedata.digit(letter)) if letter.isdigit() and not letter.isascii() else letter


# --- tokens: which rows of a prompt belong to one figure, and to one line

_DIGIT, _BEGINS_WORD, _ENDS_LINE, _ENDS_SENTENCE, _BREAKS, _BLANK, _LONG_NUMBER, _KNOWN = (
    1 << bit for bit in range(8)
)
_INSIDE = frozenset(".,:;/'’°%€$£#-‐‑‒–—−()*")  # what a figure may have between and beside its digits
_STOPS = frozenset(".!?…")
_WIDE_STOPS = frozenset("。！？")
NEAR_TOKENS = 3  # between two figures: `9 March 1921` is one


@dataclass(frozen=True)
class FigureRows:
    """Of each token of a prompt: (T,) bool whether it is part of a figure, (T,) int64 the number of its line.

    A line ends with a sentence, too. Whatever stands between two figures that are so near is part of both.
    """

    is_figure: Tensor
    lines: Tensor

    def to(self, device: torch.device) -> "FigureRows":
        return FigureRows(self.is_figure.to(device), self.lines.to(device))


class FigureFinder:
    """Finds figures in token ids. What a token is (a digit, the beginning of a word) is found out once a token."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.zeros(0, dtype=np.uint8)

    def __call__(self, token_ids: Sequence[int], starts: Iterable[int] = ()) -> FigureRows:
        """The figures and lines of a prompt; starts: positions at which a line begins in any case (its segments')."""
        kinds = self._kinds_of(np.asarray(token_ids, dtype=np.int64))
        lines = _lines(kinds, starts)
        return FigureRows(torch.from_numpy(_figures(kinds, lines)), torch.from_numpy(lines))

    def _kinds_of(self, ids: np.ndarray) -> np.ndarray:
        kinds = self._kinds  # another thread may replace it; what that one found is found again
        if (missing := int(ids.max(initial=-1)) + 1 - len(kinds)) > 0:
            kinds = np.pad(kinds, (0, missing))
        for token_id in np.unique(ids[kinds[ids] == 0]).tolist():
            kinds[token_id] = _kind(self._tokenizer, token_id)
        self._kinds = kinds
        found: np.ndarray = kinds[ids]
        return found


def _kind(tokenizer: Any, token_id: int) -> int:
    text, piece = tokenizer.decode([token_id]), tokenizer.convert_ids_to_tokens(token_id) or ""
    bare = text.strip()
    kind = _KNOWN
    if digits := sum(letter.isdigit() for letter in bare):
        kind |= _DIGIT
    if digits > 2:
        kind |= _LONG_NUMBER
    if not bare:
        kind |= _BLANK
    if text[:1].isspace() or piece[:1] in ("▁", "Ġ"):
        kind |= _BEGINS_WORD
    if "\n" in text:
        kind |= _ENDS_LINE
    if bare and set(bare[-1]) <= _STOPS:
        kind |= _ENDS_SENTENCE
    if bare and bare[-1] in _WIDE_STOPS:
        kind |= _ENDS_LINE
    if "\n" in text or not all(_fits(letter) for letter in bare):
        kind |= _BREAKS
    return kind


def _fits(letter: str) -> bool:
    """Whether it may stand in a figure. Scripts without blanks between words break it, or all would be one."""
    return letter.isdigit() or letter in _INSIDE or (letter.isalpha() and ord(letter) < 0x0E00)


def _lines(kinds: np.ndarray, starts: Iterable[int]) -> np.ndarray:
    sentences = np.zeros(len(kinds), dtype=bool)
    sentences[:-1] = (kinds[:-1] & _ENDS_SENTENCE > 0) & (kinds[1:] & _BEGINS_WORD > 0)
    # Not the dot of `Nr. 339` or of `12. März`: one before a figure, or behind a number of one or two digits.
    digit = kinds & _DIGIT > 0
    sentences[:-1] &= ~digit[1:]
    sentences[:-2] &= ~digit[2:] | (kinds[1:-1] & _BLANK == 0)
    short = _behind(digit & (kinds & _LONG_NUMBER == 0), 1) & ~_behind(digit, 3)
    sentences &= ~short
    begins = np.zeros(len(kinds), dtype=bool)
    begins[1:] = (sentences | (kinds & _ENDS_LINE > 0))[:-1]
    begins[[start for start in starts if 0 < start < len(kinds)]] = True
    return 1 + np.cumsum(begins)


def _behind(marks: np.ndarray, tokens: int) -> np.ndarray:
    """The marks, each so many tokens later."""
    later = np.zeros_like(marks)
    later[tokens:] = marks[:-tokens]
    return later


def _figures(kinds: np.ndarray, lines: np.ndarray) -> np.ndarray:
    breaks = kinds & _BREAKS > 0
    begins = (kinds & _BEGINS_WORD > 0) | breaks | (np.diff(lines, prepend=0) > 0)
    begins[1:] |= breaks[:-1]
    words = np.cumsum(begins)
    has_digit = np.zeros(len(kinds) + 1, dtype=bool)
    has_digit[words[kinds & _DIGIT > 0]] = True
    is_figure = has_digit[words]
    rows = np.flatnonzero(is_figure)
    parts = lines + np.cumsum(breaks)  # what may be one figure
    near = (np.diff(rows) <= NEAR_TOKENS + 1) & (np.diff(parts[rows]) == 0)
    for begin, end in zip(rows[:-1][near], rows[1:][near], strict=True):
        is_figure[begin:end] = True
    return is_figure
