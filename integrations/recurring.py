"""Finds text that recurs from an earlier prompt, and so is probably an unregistered passage. Keeps sentences' hashes.

Some programs, tutorials of the frameworks included, retrieve passages in a way that no callback sees. Such passages
recur in prompts, in whole sentences (a template may put a word before them on the same line), but with other neighbours
and in another order. So every long paragraph becomes a passage by itself.
"""

import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.text_index import MIN_TEXT_CHARS, HashedText

MIN_PASSAGE_CHARS = 160  # some 40 tokens: a shorter passage takes longer to load than to compute
MAX_PASSAGE_CHARS = 12_000  # some 3,000 tokens; longer text becomes several passages, cut after a line
MAX_QUESTION_CHARS = 250  # a longer line is not taken for a question
MAX_SENTENCES = 1_500_000  # to remember: 30 MB, briefly twice that; then the older half is dropped
MAX_SENTENCES_PER_TEXT = 50_000  # only adversarial texts have more
_MAX_RECENT = 1 << 15  # sentences that are not yet in the sorted table
_END_MARKS, _WIDE_END_MARKS = (np.array([ord(mark) for mark in marks]) for marks in (".!?:;", "。！？"))
_QUESTION_MARKS = "?？؟"
_TEXT_END = np.uint64(0)  # separates two texts in the history
Span = tuple[int, int]


class RecurringText:
    """The sentences of the prompts of one collection. Safe for threads."""

    def __init__(self, sentences: int = MAX_SENTENCES) -> None:
        self._limit, self._lock = sentences, threading.Lock()
        self._history: NDArray[np.uint64] = np.zeros(1 << 12, dtype=np.uint64)
        self._count = 0
        self._recent: dict[int, int] = {}  # key of a recent sentence -> its last index in the history
        self._keys: NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)  # of older sentences, sorted
        self._last_index: NDArray[np.int32] = np.zeros(0, dtype=np.int32)

    def recall(self, texts: Sequence[str], ends_with_question: bool) -> list[list[Span]]:
        """For each text of a prompt, the (start, stop) of parts from an earlier prompt, in whole sentences.

        Disjoint and ascending, in characters: the paragraphs within the longest runs of repeated sentences.
        ends_with_question: the last text ends with the question, which is never a passage. The texts are remembered for
        the next prompt, so repetitions within one do not count.
        """
        split = [_sentences_of(text) for text in texts]
        hashed = [HashedText(text).keys(*sentences) for text, sentences in zip(texts, split, strict=True)]
        found: list[list[Span]] = []
        with self._lock:
            for number, (text, (starts, lengths), keys) in enumerate(zip(texts, split, hashed, strict=True)):
                runs = self._runs(keys, lengths >= MIN_TEXT_CHARS)
                if ends_with_question and number == len(texts) - 1:
                    runs = _before_question(text, starts, runs)
                found.append(list(_passages(text, starts, starts + lengths, runs)))
            for (_, lengths), keys in zip(split, hashed, strict=True):
                self._remember(keys, lengths >= MIN_TEXT_CHARS)
        return found

    def _runs(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> Iterator[Span]:
        """Runs [first, stop) of sentences that followed one another before; each begins with a long sentence."""
        indices = self._last_indices(keys, is_long)
        stop = 0
        for first in np.flatnonzero(indices >= 0).tolist():
            if first < stop:  # within the previous run
                continue
            before = self._history[indices[first] : min(indices[first] + len(keys) - first, self._count)]
            same = before == keys[first : first + len(before)]
            stop = first + (len(same) if same.all() else int(same.argmin()))
            yield first, stop

    def _last_indices(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Each sentence's last index in the history; -1 for a short or new one."""
        indices = np.full(len(keys), -1, dtype=np.int64)
        if len(self._keys):
            at = np.minimum(self._keys.searchsorted(keys), len(self._keys) - 1)
            indices = np.where(self._keys[at] == keys, self._last_index[at], indices)
        recent = [self._recent.get(key, -1) for key in keys.tolist()]
        return np.where(is_long, np.maximum(indices, recent), -1)

    def _remember(self, keys: NDArray[np.uint64], is_long: NDArray[np.bool_]) -> None:
        if self._count + len(keys) + 1 > self._limit:
            self._drop_older_half()
        while self._count + len(keys) + 1 > len(self._history):
            self._history = np.concatenate([self._history, np.zeros_like(self._history)])
        self._history[self._count : self._count + len(keys)] = keys
        self._history[self._count + len(keys)] = _TEXT_END
        # Backwards, so that the first of equal sentences counts.
        for number in np.flatnonzero(is_long)[::-1].tolist():
            self._recent[int(keys[number])] = self._count + number
        self._count += len(keys) + 1
        if len(self._recent) > _MAX_RECENT:
            recent = np.array(list(self._recent), dtype=np.uint64)
            self._merge(recent, np.array(list(self._recent.values()), dtype=np.int32))

    def _merge(self, keys: NDArray[np.uint64], at: NDArray[np.int32]) -> None:
        """Add keys with their indices to the sorted table; they replace older entries of the same key."""
        self._keys, first = np.unique(np.concatenate([keys, self._keys]), return_index=True)
        self._last_index = np.concatenate([at, self._last_index])[first]
        self._recent = {}

    def _drop_older_half(self) -> None:
        kept = self._history[self._count // 2 : self._count].copy()
        self._history, self._count = kept, len(kept)
        self._keys, self._last_index = self._keys[:0], self._last_index[:0]
        self._merge(kept[::-1], np.arange(len(kept) - 1, -1, -1, dtype=np.int32))


def _sentences_of(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and lengths of the text's first sentences, without their separators; a blank line is an empty one."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    after_end = np.zeros(len(codes), dtype=bool)
    after_end[1:] = np.isin(codes[:-1], _END_MARKS)
    separates = (codes == ord("\n")) | (codes == ord(" ")) & after_end
    ends = np.append(np.flatnonzero(separates | np.isin(codes, _WIDE_END_MARKS)), len(codes))
    ends = ends[:MAX_SENTENCES_PER_TEXT]
    starts = np.append(0, ends[:-1] + 1)
    inside = starts < len(codes)
    return starts[inside], (ends - starts)[inside]


def _before_question(text: str, starts: NDArray[np.int64], runs: Iterator[Span]) -> Iterator[Span]:
    """Remove the question from the runs: the last line, and the line before it if that may be the question.

    It may be if it has a question mark, or if everything to the end was repeated (the last line is "Answer:", say);
    otherwise the question is the text after it, which differs from the earlier prompt.
    """
    last_line = _last_line(text, len(text))
    line_before = _last_line(text, last_line)
    has_mark = any(mark in text[line_before:last_line] for mark in _QUESTION_MARKS)
    before, last = (int(starts.searchsorted(at)) for at in (line_before, last_line))
    for first, stop in runs:
        end = min(stop, before if has_mark or stop == len(starts) else last)
        if first < end:
            yield first, end


def _last_line(text: str, stop: int) -> int:
    """Start of the last non-empty line of text[:stop]; `stop` if the line is too long for a question."""
    before = text[:stop].rstrip()
    start = before.rfind("\n") + 1
    return start if len(before) - start <= MAX_QUESTION_CHARS else stop


def _passages(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64], runs: Iterator[Span]
) -> Iterator[Span]:
    """Passages within runs of sentences: long paragraphs, and short ones joined until they are long enough."""
    for first, last in runs:
        joined: Span | None = None
        for start, stop in _paragraphs(text, starts[first:last].tolist(), stops[first:last].tolist()):
            is_long = stop - start >= MIN_PASSAGE_CHARS
            joined = (start if is_long or joined is None else joined[0], stop)
            if joined[1] - joined[0] >= MIN_PASSAGE_CHARS:
                if stop - start <= MAX_PASSAGE_CHARS:
                    yield joined
                joined = None


def _paragraphs(text: str, starts: Sequence[int], stops: Sequence[int]) -> Iterator[Span]:
    """Text between blank lines, cut where it is too long for one passage.

    Each begins with a long sentence, because a label before it ("Source 2:") will be another one next time.
    """
    begin, end = 0, 0
    for start, stop in zip(starts, stops, strict=True):
        is_empty = not text[start:stop].strip()
        is_line = text[start - 1 : start] in ("", "\n") and text[stop : stop + 1] in ("", "\n")
        if end > begin and ((is_empty and is_line) or stop - begin > MAX_PASSAGE_CHARS // 2):
            yield begin, end
            begin = end = stop
        if (end > begin and not is_empty) or stop - start >= MIN_TEXT_CHARS:
            begin, end = begin if end > begin else start, start + len(text[start:stop].rstrip())
    if end > begin:
        yield begin, end
