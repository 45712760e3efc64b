"""Prompt lookup decoding: guesses the next tokens of an answer that quotes the prompt.

Source: A. Saxena, 2023; it is speculative decoding (arXiv 2211.17192) without a second model. Guesses are verified in
one pass, and accepted only if the model chooses the same token, so the answer does not change, greedy or sampled, with
any processors.
"""

from collections.abc import Iterable

NGRAM_SIZES = (3, 2)
# Accepted tokens per pass that make guessing worthwhile: 4 rows take a quarter longer than 1 (SmolLM2).
BREAK_EVEN = 0.5
MAX_CREDIT = 4.0


class PromptLookup:
    """Guesses `count` tokens at a time, until too few of them were accepted."""

    def __init__(self, count: int, token_ids: Iterable[int]) -> None:
        self._count = count
        self._credit = MAX_CREDIT if count else -1.0  # below zero, nothing is guessed
        self._ids: list[int] = []
        self._next_index: dict[tuple[int, ...], int] = {}  # of the token after the n-gram's last occurrence
        for token in token_ids if count else ():
            self.add(token)

    def add(self, token: int) -> None:
        """Append the next token of prompt or answer."""
        for size in NGRAM_SIZES:
            self._next_index[tuple(self._ids[-size:])] = len(self._ids)
        self._ids.append(token)

    def propose(self) -> list[int]:
        """Guesses for the next `count` tokens, or none."""
        if self._credit >= 0:
            for size in NGRAM_SIZES:
                begin = self._next_index.get(tuple(self._ids[-size:]))
                if begin is not None and begin + self._count <= len(self._ids):
                    return self._ids[begin : begin + self._count]
        return []

    def record_accepted(self, tokens: int) -> None:
        """Record how many of the last guesses were accepted."""
        self._credit = min(MAX_CREDIT, self._credit + tokens - BREAK_EVEN)
