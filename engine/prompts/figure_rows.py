"""Finds figures and lines in a prompt's token ids (`figures.py` finds figures in text)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Bits of a token's kind. _NOT_IN_FIGURE: no figure may contain the token; _KNOWN: its kind has been computed.
_DIGIT, _BEGINS_WORD, _ENDS_LINE, _ENDS_SENTENCE, _NOT_IN_FIGURE, _BLANK, _LONG_NUMBER, _KNOWN = (
    1 << bit for bit in range(8)
)
_FIGURE_SIGNS = frozenset(".,:;/'’°%€$£#-‐‑‒–—−()*")  # allowed between and beside a figure's digits
_SENTENCE_STOPS = frozenset(".!?…")
_STOPS_WITHOUT_BLANK = frozenset("。！？")  # no blank follows these
NEAR_TOKENS = 3  # at most, between two parts of one figure, such as `9 March 1921`


@dataclass(frozen=True)
class FigureRows:
    """For each token of a prompt: (T,) bool whether it is part of a figure, (T,) int64 the number of its line.

    The end of a sentence also ends a line. If at most NEAR_TOKENS tokens are between two figures, all are one figure.
    """

    is_figure: Tensor
    lines: Tensor

    def to(self, device: torch.device) -> "FigureRows":
        return FigureRows(self.is_figure.to(device), self.lines.to(device))


class FigureFinder:
    """Finds figures in token ids. Each token id's kind (has a digit, begins a word) is computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._kinds = np.zeros(0, dtype=np.uint8)

    def __call__(self, token_ids: Sequence[int], starts: Iterable[int] = ()) -> FigureRows:
        """The figures and lines of a prompt. starts: positions where a line always begins (those of segments)."""
        kinds = self._kinds_of(np.asarray(token_ids, dtype=np.int64))
        lines = _lines(kinds, starts)
        return FigureRows(torch.from_numpy(_figures(kinds, lines)), torch.from_numpy(lines))

    def _kinds_of(self, ids: np.ndarray) -> np.ndarray:
        kinds = self._kinds  # another thread may replace it; kinds may then be computed twice
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
    if bare and set(bare[-1]) <= _SENTENCE_STOPS:
        kind |= _ENDS_SENTENCE
    if bare and bare[-1] in _STOPS_WITHOUT_BLANK:
        kind |= _ENDS_LINE
    if "\n" in text or not all(_may_be_in_figure(letter) for letter in bare):
        kind |= _NOT_IN_FIGURE
    return kind


def _may_be_in_figure(letter: str) -> bool:
    """Whether a figure may contain the character.

    Letters of scripts without blanks between words may not be in a figure: whole sentences would be figures.
    """
    return letter.isdigit() or letter in _FIGURE_SIGNS or (letter.isalpha() and ord(letter) < 0x0E00)


def _lines(kinds: np.ndarray, starts: Iterable[int]) -> np.ndarray:
    """The number of each token's line."""
    sentences = np.zeros(len(kinds), dtype=bool)
    sentences[:-1] = (kinds[:-1] & _ENDS_SENTENCE > 0) & (kinds[1:] & _BEGINS_WORD > 0)
    # The dots of `Nr. 339` and `12. März` end no sentence: a figure follows, or one or two digits precede.
    digit = kinds & _DIGIT > 0
    sentences[:-1] &= ~digit[1:]
    sentences[:-2] &= ~digit[2:] | (kinds[1:-1] & _BLANK == 0)
    after_short_number = _shifted(digit & (kinds & _LONG_NUMBER == 0), 1) & ~_shifted(digit, 3)
    sentences &= ~after_short_number
    begins = np.zeros(len(kinds), dtype=bool)
    begins[1:] = (sentences | (kinds & _ENDS_LINE > 0))[:-1]
    begins[[start for start in starts if 0 < start < len(kinds)]] = True
    return 1 + np.cumsum(begins)


def _shifted(marks: np.ndarray, tokens: int) -> np.ndarray:
    """The marks moved to later positions by this many tokens."""
    shifted = np.zeros_like(marks)
    shifted[tokens:] = marks[:-tokens]
    return shifted


def _figures(kinds: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """For each token, whether it is part of a figure."""
    separates = kinds & _NOT_IN_FIGURE > 0
    begins_word = (kinds & _BEGINS_WORD > 0) | separates | (np.diff(lines, prepend=0) > 0)
    begins_word[1:] |= separates[:-1]
    words = np.cumsum(begins_word)
    has_digit = np.zeros(len(kinds) + 1, dtype=bool)
    has_digit[words[kinds & _DIGIT > 0]] = True
    is_figure = has_digit[words]
    rows = np.flatnonzero(is_figure)
    sections = lines + np.cumsum(separates)  # a figure is within one section
    near = (np.diff(rows) <= NEAR_TOKENS + 1) & (np.diff(sections[rows]) == 0)
    for begin, end in zip(rows[:-1][near], rows[1:][near], strict=True):
        is_figure[begin:end] = True
    return is_figure
