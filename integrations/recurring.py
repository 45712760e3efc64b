"""Passages that nobody announced: text that comes back in a later prompt is one. Hashes of sentences, and no text.

A framework's own tutorial may fetch its passages in a way that no callback sees. They stand in the prompt all the same,
in whole sentences (a template may put a word before them on the same line), and what is retrieved once is retrieved
again, between other neighbours and in another order: so every long paragraph is a passage by itself.
"""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.finding import MINIMUM, Hashed

LEAST = 160  # characters, some 40 tokens: what is shorter costs more to fetch than to read
MOST = 12_000  # characters, some 3,000 tokens, of one passage; what is longer is several, cut after a line
QUESTION = 250  # characters: no line of a question is longer
SENTENCES = 1_500_000  # remembered: 30 MB, and as much again for a moment; of more, the older half goes
SENTENCES_A_PROMPT = 50_000  # looked at: far beyond any but texts made to be hard
_RECENT = 1 << 15  # sentences that are not yet in the table
_ENDERS, _WIDE_ENDERS = (np.array([ord(mark) for mark in marks]) for marks in (".!?:;", "。！？"))
_QUESTION_MARKS = "?？؟"
_END = np.uint64(0)  # between two texts
Places = list[tuple[int, int]]


class RecurringText:
    """The sentences of the prompts of one collection. Safe for threads."""

    def __init__(self, sentences: int = SENTENCES) -> None:
        self._most, self._lock = sentences, threading.Lock()
        self._said: NDArray[np.uint64] = np.zeros(1 << 12, dtype=np.uint64)
        self._count = 0
        self._recent: dict[int, int] = {}  # key of a sentence -> where it stood last
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)  # of older sentences, in order
        self._at: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def recall(self, texts: Sequence[str], is_asking: bool) -> list[Places]:
        """For each text of a prompt, where something stands that also stood, in whole sentences, in an earlier prompt.

        Disjoint, ascending (start, stop), in characters: the paragraphs in longest runs of sentences that stood so
        once. is_asking: the last text ends with the question, which is read anew.
        The texts are remembered: in time for the next prompt, so what is repeated within one is nothing.
        """
        split = [_sentences_of(text) for text in texts]
        hashed = [Hashed(text).keys(*places) for text, places in zip(texts, split, strict=True)]
        found: list[Places] = []
        with self._lock:
            for number, (text, (starts, lengths), keys) in enumerate(zip(texts, split, hashed, strict=True)):
                runs = self._runs(keys, lengths >= MINIMUM)
                if is_asking and number == len(texts) - 1:
                    runs = _before_question(text, starts, runs)
                found.append(list(_passages(text, starts, starts + lengths, runs)))
            for (_, lengths), keys in zip(split, hashed, strict=True):
                self._remember(keys, lengths >= MINIMUM)
        return found

    def _runs(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Sentences [first, last) that stood like this before; each begins with one that is long enough to say so."""
        places = self._places(keys, full)
        first = 0
        for known in np.flatnonzero(places >= 0).tolist():
            if known < first:
                continue
            before = self._said[places[known] : min(places[known] + len(keys) - known, self._count)]
            same = before == keys[known : known + len(before)]
            first = known + (len(same) if same.all() else int(same.argmin()))
            yield known, first

    def _places(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Where each sentence stood last; -1 for a short one, and where it never did."""
        places = np.full(len(keys), -1, dtype=np.int64)
        if len(self._keys):
            at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
            places = np.where(self._keys[at] == keys, self._at[at], places)
        recent = [self._recent.get(key, -1) for key in keys.tolist()]
        return np.where(full, np.maximum(places, recent), -1)

    def _remember(self, keys: NDArray[np.uint64], full: NDArray[np.bool_]) -> None:
        if self._count + len(keys) + 1 > self._most:
            self._drop_older_half()
        while self._count + len(keys) + 1 > len(self._said):
            self._said = np.concatenate([self._said, np.zeros_like(self._said)])
        self._said[self._count : self._count + len(keys)] = keys
        self._said[self._count + len(keys)] = _END
        for number in np.flatnonzero(full)[::-1].tolist():  # of one that is there twice, the first
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
        kept = self._said[self._count // 2 : self._count].copy()
        self._said, self._count = kept, len(kept)
        self._keys, self._at, self._recent = self._keys[:0], self._at[:0], {}
        newest = kept[::-1]
        self._enter(newest, np.arange(len(kept) - 1, -1, -1, dtype=np.int32))


def _sentences_of(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the text's first sentences, without what separates them; a blank line is an empty one."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    after_end = np.zeros(len(codes), dtype=bool)
    after_end[1:] = np.isin(codes[:-1], _ENDERS)
    separates = (codes == ord("\n")) | (codes == ord(" ")) & after_end
    ends = np.append(np.flatnonzero(separates | np.isin(codes, _WIDE_ENDERS)), len(codes))[
        :SENTENCES_A_PROMPT
    ]
    starts = np.append(0, ends[:-1] + 1)
    inside = starts < len(codes)
    return starts[inside], (ends - starts)[inside]


def _before_question(
    text: str, starts: NDArray[np.int64], runs: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """The runs without the question: the last line, and the one before it where that is one, or may be.

    It may be where all to the end stood so before ("Answer:"); else what differs behind it is the question.
    """
    last = _last_line(text, len(text))
    line = _last_line(text, last)
    asks = any(mark in text[line:last] for mark in _QUESTION_MARKS)
    before, question = (int(starts.searchsorted(at)) for at in (line, last))
    for first, stop in runs:
        end = min(stop, before if asks or stop == len(starts) else question)
        if first < end:
            yield first, end


def _last_line(text: str, stop: int) -> int:
    """Where the last line of text[:stop] begins that is not empty; `stop` where it is too long for a question."""
    before = text[:stop].rstrip()
    start = before.rfind("\n") + 1
    return start if len(before) - start <= QUESTION else stop


def _passages(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64], runs: Iterator[tuple[int, int]]
) -> Iterator[tuple[int, int]]:
    """Runs of sentences as places of passages: long paragraphs, and as many short ones together as make a long one."""
    for first, last in runs:
        held: tuple[int, int] | None = None
        for start, stop in _paragraphs(text, starts[first:last].tolist(), stops[first:last].tolist()):
            is_long = stop - start >= LEAST
            held = (start if is_long or held is None else held[0], stop)
            if held[1] - held[0] >= LEAST:
                if stop - start <= MOST:
                    yield held
                held = None


def _paragraphs(text: str, starts: Sequence[int], stops: Sequence[int]) -> Iterator[tuple[int, int]]:
    """What stands between blank lines, and in parts where it is too long for one passage.

    It begins with a sentence that says something: a word before it ("Source 2:") is another one next time.
    """
    begin, end = 0, 0
    for start, stop in zip(starts, stops, strict=True):
        is_empty = not text[start:stop].strip()
        is_line = text[start - 1 : start] in ("", "\n") and text[stop : stop + 1] in ("", "\n")
        if end > begin and ((is_empty and is_line) or stop - begin > MOST // 2):
            yield begin, end
            begin = end = stop
        if (end > begin and not is_empty) or stop - start >= MINIMUM:
            begin, end = begin if end > begin else start, start + len(text[start:stop].rstrip())
    if end > begin:
        yield begin, end
