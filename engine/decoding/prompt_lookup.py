"""Guessing an answer's next tokens: an answer from passages quotes them, so what followed there may follow here.

Source: prompt lookup decoding (A. Saxena, 2023), which is speculative decoding (arXiv 2211.17192) without a second
model. Guesses are read in one pass, and a guess counts only if the answer's own choice is the same token: greedy or
drawn, with whatever processors, tokens stay what they were.
"""

from collections.abc import Iterable

GRAMS = (3, 2)
# A pass over a token and its guesses takes a quarter more than one over the token (SmolLM2, 4 rows for 1).
NEEDED = 0.5
PATIENCE = 4.0


class PromptLookup:
    """Guesses `count` tokens at a time, until too few of them were right."""

    def __init__(self, count: int, token_ids: Iterable[int]) -> None:
        self._count, self._credit = count, PATIENCE if count else -1.0
        self._ids: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # where those tokens were last followed by something
        for token in token_ids if count else ():
            self.add(token)

    def add(self, token: int) -> None:
        """What comes next in prompt and answer."""
        for size in GRAMS:
            self._behind[tuple(self._ids[-size:])] = len(self._ids)
        self._ids.append(token)

    def propose(self) -> list[int]:
        """As many as were asked for, or none."""
        if self._credit >= 0:
            for size in GRAMS:
                begin = self._behind.get(tuple(self._ids[-size:]))
                if begin is not None and begin + self._count <= len(self._ids):
                    return self._ids[begin : begin + self._count]
        return []

    def record_accepted(self, tokens: int) -> None:
        """So many of the last guesses."""
        self._credit = min(PATIENCE, self._credit + tokens - NEEDED)
