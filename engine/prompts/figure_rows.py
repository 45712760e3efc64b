"""Finds figures and lines in a prompt's token ids (`figures.py` finds figures in text)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DIGIT, _BEGINS_WORD, _ENDS_LINE, _ENDS_SENTENCE, _BREAKS, _BLANK, _LONG_NUMBER, _KNOWN = (
    1 << bit for bit in range(8)
)
_INSIDE = frozenset(".,:;/'’°%€$£#-‐‑‒–—−()*")  # allowed between and beside a figure's digits
_STOPS = frozenset(".!?…")
_WIDE_STOPS = frozenset("。！？")
NEAR_TOKENS = 3  # between two parts of one figure, such as `9 March 1921`


@dataclass(frozen=True)
class FigureRows:
    """For each token of a prompt: (T,) bool whether it is part of a figure, (T,) int64 the number of its line.

    A sentence's end also ends a line. Tokens between two figures that are NEAR_TOKENS apart belong to one figure.
    """

    is_figure: Tensor
    lines: Tensor

    def to(self, device: torch.device) -> "FigureRows":
        return FigureRows(self.is_figure.to(device), self.lines.to(device))


class FigureFinder:
    """Finds figures in token ids. The kind of a token (a digit, the beginning of a word) is computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.zeros(0, dtype=np.uint8)

    def __call__(self, token_ids: Sequence[int], starts: Iterable[int] = ()) -> FigureRows:
        """The figures and lines of a prompt; starts: positions where a line always begins (those of segments)."""
        kinds = self._kinds_of(np.asarray(token_ids, dtype=np.int64))
        lines = _lines(kinds, starts)
        return FigureRows(torch.from_numpy(_figures(kinds, lines)), torch.from_numpy(lines))

    def _kinds_of(self, ids: np.ndarray) -> np.ndarray:
        kinds = self._kinds  # another thread may replace it; results are then computed again
        if (missing := int(ids.max(initial=-1)) + 1 - len(kinds)) > 0:
            kinds = np.pad(kinds, (0, missing))
        for token_id in np.unique(ids[kinds[ids] == 0]).tolist():
            kinds[token_id] = _kind(self._tokenizer, token_id)
        self._kinds = kinds
        found: np.ndarray = kinds[ids]
        return found


def text_of_token(tokenizer: Any, token_id: int) -> tuple[str, bool]:
    """A token's text, and whether it begins a word: decoding drops the blank before the first token."""
    text, piece = tokenizer.decode([token_id]), tokenizer.convert_ids_to_tokens(token_id) or ""
    return text, text[:1].isspace() or piece[:1] in ("▁", "Ġ")


def _kind(tokenizer: Any, token_id: int) -> int:
    text, begins_word = text_of_token(tokenizer, token_id)
    bare = text.strip()
    kind = _KNOWN
    if digits := sum(letter.isdigit() for letter in bare):
        kind |= _DIGIT
    if digits > 2:
        kind |= _LONG_NUMBER
    if not bare:
        kind |= _BLANK
    if begins_word:
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
    """Whether a figure may contain the token. Not letters of scripts without blanks between words: whole sentences
    would be figures.
    """
    return letter.isdigit() or letter in _INSIDE or (letter.isalpha() and ord(letter) < 0x0E00)


def _lines(kinds: np.ndarray, starts: Iterable[int]) -> np.ndarray:
    sentences = np.zeros(len(kinds), dtype=bool)
    sentences[:-1] = (kinds[:-1] & _ENDS_SENTENCE > 0) & (kinds[1:] & _BEGINS_WORD > 0)
    # Not the dot of `Nr. 339` or of `12. März`: before a figure, or after a number of one or two digits.
    digit = kinds & _DIGIT > 0
    sentences[:-1] &= ~digit[1:]
    sentences[:-2] &= ~digit[2:] | (kinds[1:-1] & _BLANK == 0)
    short = _shifted(digit & (kinds & _LONG_NUMBER == 0), 1) & ~_shifted(digit, 3)
    sentences &= ~short
    begins = np.zeros(len(kinds), dtype=bool)
    begins[1:] = (sentences | (kinds & _ENDS_LINE > 0))[:-1]
    begins[[start for start in starts if 0 < start < len(kinds)]] = True
    return 1 + np.cumsum(begins)


def _shifted(marks: np.ndarray, tokens: int) -> np.ndarray:
    """The marks shifted by that many tokens."""
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
    parts = lines + np.cumsum(breaks)  # figures do not cross these
    near = (np.diff(rows) <= NEAR_TOKENS + 1) & (np.diff(parts[rows]) == 0)
    for begin, end in zip(rows[:-1][near], rows[1:][near], strict=True):
        is_figure[begin:end] = True
    return is_figure
