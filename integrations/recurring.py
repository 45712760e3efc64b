"""Passages that nobody announced: text that comes back in a later prompt is one. Hashes of lines, and no text.

A framework's own tutorial may fetch its passages in a way that no callback sees. They stand in the prompt all the same,
in whole lines, and what is retrieved once is retrieved again, between other neighbours and in another order.
"""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.finding import MINIMUM, Hashed

LEAST = 160  # characters, some 40 tokens: what is shorter costs more to fetch than to read
MOST = 12_000  # characters, some 3,000 tokens, of one passage; what is longer is several, cut after a line
LINES = 1_500_000  # remembered: 30 MB, and as much again for a moment; of more, the older half goes
LINES_A_PROMPT = 20_000  # looked at: far beyond any but texts made to be hard
_RECENT = 1 << 15  # lines that are not yet in the table
_END = np.uint64(0)  # between two texts
Places = list[tuple[int, int]]


class RecurringText:
    """The lines of the prompts of one collection. Safe for threads."""

    def __init__(self, lines: int = LINES) -> None:
        self._most, self._lock = lines, threading.Lock()
        self._lines: NDArray[np.uint64] = np.zeros(1 << 12, dtype=np.uint64)
        self._count = 0
        self._recent: dict[int, int] = {}  # key of a line -> where it stood last
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)  # of older lines, in order
        self._at: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def recall(self, texts: Sequence[str], is_asking: bool) -> list[Places]:
        """For each text of a prompt, where something stands that also stood, in whole lines, in an earlier prompt.

        Disjoint, ascending (start, stop), in characters: longest runs of lines that stood together once, without blank
        ones at the ends. is_asking: the last text ends with the question: its last two lines are read anew.
        The texts are remembered: in time for the next prompt, so what is repeated within one is nothing.
        """
        split = [_lines_of(text) for text in texts]
        hashed = [Hashed(text).keys(*places) for text, places in zip(texts, split, strict=True)]
        found: list[Places] = []
        with self._lock:
            for number, (text, (starts, lengths), keys) in enumerate(zip(texts, split, hashed, strict=True)):
                full = lengths >= MINIMUM
                last = _before_question(lengths) if is_asking and number == len(texts) - 1 else len(keys)
                runs = self._runs(keys[:last], full[:last])
                found.append(list(_passages(text, starts, starts + lengths, runs)))
            for (_, lengths), keys in zip(split, hashed, strict=True):
                self._remember(keys, lengths >= MINIMUM)
        return found

    def _runs(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Lines [first, last) that stood like this before; each begins with a line that is long enough to say so."""
        places = self._places(keys, full)
        first = 0
        for known in np.flatnonzero(places >= 0).tolist():
            if known < first:
                continue
            before = self._lines[places[known] : min(places[known] + len(keys) - known, self._count)]
            same = before == keys[known : known + len(before)]
            first = known + (len(same) if same.all() else int(same.argmin()))
            yield known, first

    def _places(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Where each line stood last; -1 for a short one, and where it never did."""
        places = np.full(len(keys), -1, dtype=np.int64)
        if len(self._keys):
            at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
            places = np.where(self._keys[at] == keys, self._at[at], places)
        recent = [self._recent.get(key, -1) for key in keys.tolist()]
        return np.where(full, np.maximum(places, recent), -1)

    def _remember(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> None:
        if self._count + len(keys) + 1 > self._most:
            self._drop_older_half()
        while self._count + len(keys) + 1 > len(self._lines):
            self._lines = np.concatenate([self._lines, np.zeros_like(self._lines)])
        self._lines[self._count : self._count + len(keys)] = keys
        self._lines[self._count + len(keys)] = _END
        for number in np.flatnonzero(full)[::-1].tolist():  # of a line that is there twice, the first
            self._recent[int(keys[number])] = self._count + number
        self._count += len(keys) + 1
        if len(self._recent) > _RECENT:
            recent = np.array(list(self._recent), dtype=np.uint64)
            self._enter(recent, np.array(list(self._recent.values()), dtype=np.int32))

    def _enter(self, keys: NDArray[np.uint64], at: NDArray[np.int32]) -> None:
        """Into the table, what is recent before what is older."""
        self._keys, first = np.unique(np.concatenate([keys, self._keys]), return_index=True)
        self._at = np.concatenate([at, self._at])[first]
        self._recent = {}

    def _drop_older_half(self) -> None:
        kept = self._lines[self._count // 2 : self._count].copy()
        self._lines, self._count = kept, len(kept)
        self._keys, self._at, self._recent = self._keys[:0], self._at[:0], {}
        newest = kept[::-1]
        self._enter(newest, np.arange(len(kept) - 1, -1, -1, dtype=np.int32))


def _lines_of(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the text's first lines; after a last newline there is none."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    ends = np.append(np.flatnonzero(codes == ord("\n")), len(codes))[:LINES_A_PROMPT]
    starts = np.append(0, ends[:-1] + 1)
    inside = starts < len(codes)
    return starts[inside], (ends - starts)[inside]


def _before_question(lengths: NDArray[np.int64]) -> int:
    """How many lines stand before the last two that are not empty."""
    written = np.flatnonzero(lengths)
    return int(written[-2]) if len(written) >= 2 else 0


def _passages(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64], runs: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Runs of lines as places of passages: not too short, and the long ones cut between lines."""
    for first, last in runs:
        part = (starts[first:last] - starts[first]) // (MOST // 2)
        for lines in np.split(np.arange(first, last), np.flatnonzero(np.diff(part)) + 1):
            start, stop = int(starts[lines[0]]), int(stops[lines[-1]])
            stop = start + len(text[start:stop].rstrip())
            if LEAST <= stop - start <= MOST:
                yield start, stop
