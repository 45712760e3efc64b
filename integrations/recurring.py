"""Finds text that recurs from an earlier prompt, and so is probably a passage that was not registered. Keeps hashes of
sentences.

Some programs, tutorials of the frameworks included, retrieve passages in a way that no callback sees. Such passages
recur in prompts, in whole sentences (a template may put a word before them on the same line), but with other neighbours
and in another order. So every long paragraph becomes a passage by itself.
"""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.text_index import MINIMUM, HashedText

LEAST = 160  # characters, some 40 tokens: a shorter passage costs more to load than to read
MOST = 12_000  # characters, some 3,000 tokens, of one passage; longer text is several, cut after a line
QUESTION = 250  # characters: no line of a question is longer
SENTENCES = 1_500_000  # remembered: 30 MB, briefly twice that; then the older half is dropped
SENTENCES_A_PROMPT = 50_000  # examined at most: only adversarial texts have more
_RECENT = 1 << 15  # sentences that are not yet in the table
_ENDERS, _WIDE_ENDERS = (np.array([ord(mark) for mark in marks]) for marks in (".!?:;", "。！？"))
_QUESTION_MARKS = "?？؟"
_END = np.uint64(0)  # between two texts
Span = tuple[int, int]


class RecurringText:
    """The sentences of the prompts of one collection. Safe for threads."""

    def __init__(self, sentences: int = SENTENCES) -> None:
        self._limit, self._lock = sentences, threading.Lock()
        self._history: NDArray[np.uint64] = np.zeros(1 << 12, dtype=np.uint64)
        self._count = 0
        self._recent: dict[int, int] = {}  # key of a sentence -> its last index in the history
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)  # of older sentences, sorted
        self._at: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def recall(self, texts: Sequence[str], ends_with_question: bool) -> list[list[Span]]:
        """For each text of a prompt, the (start, stop) of parts from an earlier prompt, in whole sentences.

        Disjoint and ascending, in characters: the paragraphs within the longest runs of repeated sentences.
        ends_with_question: the last text ends with the question, which is never a passage. The texts are remembered for
        the next prompt, so repetitions within one do not count.
        """
        split = [_sentences_of(text) for text in texts]
        hashed = [HashedText(text).keys(*places) for text, places in zip(texts, split, strict=True)]
        found: list[list[Span]] = []
        with self._lock:
            for number, (text, (starts, lengths), keys) in enumerate(zip(texts, split, hashed, strict=True)):
                runs = self._runs(keys, lengths >= MINIMUM)
                if ends_with_question and number == len(texts) - 1:
                    runs = _before_question(text, starts, runs)
                found.append(list(_passages(text, starts, starts + lengths, runs)))
            for (_, lengths), keys in zip(split, hashed, strict=True):
                self._remember(keys, lengths >= MINIMUM)
        return found

    def _runs(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> Iterator[Span]:
        """Runs [first, last) of sentences that occurred like this before; each begins with a long sentence."""
        places = self._places(keys, is_long)
        first = 0
        for known in np.flatnonzero(places >= 0).tolist():
            if known < first:
                continue
            before = self._history[places[known] : min(places[known] + len(keys) - known, self._count)]
            same = before == keys[known : known + len(before)]
            first = known + (len(same) if same.all() else int(same.argmin()))
            yield known, first

    def _places(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Each sentence's last index in the history; -1 for a short one, and one that never occurred."""
        places = np.full(len(keys), -1, dtype=np.int64)
        if len(self._keys):
            at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
            places = np.where(self._keys[at] == keys, self._at[at], places)
        recent = [self._recent.get(key, -1) for key in keys.tolist()]
        return np.where(is_long, np.maximum(places, recent), -1)

    def _remember(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> None:
        if self._count + len(keys) + 1 > self._limit:
            self._drop_older_half()
        while self._count + len(keys) + 1 > len(self._history):
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self._count : self._count + len(keys)] = keys
        self._history[self._count + len(keys)] = _END
        for number in np.flatnonzero(is_long)[::-1].tolist():  # of repetitions within a text, the first
            self._recent[int(keys[number])] = self._count + number
        self._count += len(keys) + 1
        if len(self._recent) > _RECENT:
            recent = np.array(list(self._recent), dtype=np.uint64)
            self._merge(recent, np.array(list(self._recent.values()), dtype=np.int32))

    def _merge(self, keys: NDArray[np.uint64], at: NDArray[np.int32]) -> None:
        """Enter into the sorted table; newer entries replace older ones."""
        self._keys, first = np.unique(np.concatenate([keys, self._keys]), return_index=True)
        self._at = np.concatenate([at, self._at])[first]
        self._recent = {}

    def _drop_older_half(self) -> None:
        kept = self._history[self._count // 2 : self._count].copy()
        self._history, self._count = kept, len(kept)
        self._keys, self._at = self._keys[:0], self._at[:0]
        self._merge(kept[::-1], np.arange(len(kept) - 1, -1, -1, dtype=np.int32))


def _sentences_of(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the text's first sentences, without their separators; a blank line is an empty one."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    after_end = np.zeros(len(codes), dtype=bool)
    after_end[1:] = np.isin(codes[:-1], _ENDERS)
    separates = (codes == ord("\n")) | (codes == ord(" ")) & after_end
    ends = np.append(np.flatnonzero(separates | np.isin(codes, _WIDE_ENDERS)), len(codes))
    ends = ends[:SENTENCES_A_PROMPT]
    starts = np.append(0, ends[:-1] + 1)
    inside = starts < len(codes)
    return starts[inside], (ends - starts)[inside]


def _before_question(text: str, starts: NDArray[np.int64], runs: Iterator[Span]) -> Iterator[Span]:
    """Remove the question from the runs: the last line, and the line before it if that may be the question.

    It may be if everything to the end was repeated ("Answer:"); otherwise the text that differs after it is the
    question.
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
    """Start of the last non-empty line of text[:stop]; `stop` if the line is too long for a question."""
    before = text[:stop].rstrip()
    start = before.rfind("\n") + 1
    return start if len(before) - start <= QUESTION else stop


def _passages(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64], runs: Iterator[Span]
) -> Iterator[Span]:
    """Passages within runs of sentences: long paragraphs, and short ones joined until they are long enough."""
    for first, last in runs:
        held: Span | None = None
        for start, stop in _paragraphs(text, starts[first:last].tolist(), stops[first:last].tolist()):
            is_long = stop - start >= LEAST
            held = (start if is_long or held is None else held[0], stop)
            if held[1] - held[0] >= LEAST:
                if stop - start <= MOST:
                    yield held
                held = None


def _paragraphs(text: str, starts: Sequence[int], stops: Sequence[int]) -> Iterator[Span]:
    """Text between blank lines, cut where it is too long for one passage.

    Each begins with a long sentence: a word before it ("Source 2:") will be another one next time.
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
