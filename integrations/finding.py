"""Finding known texts inside a prompt by hashes alone: exactly, the longest first, in time linear in the prompt.

A known text is entered under the hashes of a few of its beginnings, its *marks*: those whose length is the text's
own with low binary digits cleared (1500 characters: 1024, 1280, 1408, 1472, 1488, 1496, 1500). From any position of
a prompt a binary search over lengths then follows the marks of the longest text that might stand there: one step
a binary digit, however many texts share a header or a footer, and whatever the text is. (Waldvogel et al., "Scalable
high speed IP routing lookups", 1997, who look up addresses that way.)
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heappop, heappush
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragblend.integrations.hashing import Hashed, Keys, KeySet, Lengths

MINIMUM = 16  # characters: what is shorter would be found everywhere, and is nothing to reuse
_BATCH = 1 << 18  # characters hashed together
_ROUNDS, _FEW = 4, 8  # when to stop following long chains of marks step by step
T = TypeVar("T")


@cache
def mark_lengths(length: int) -> tuple[int, ...]:
    """MINIMUM, then the lengths of a text's marks, its own last."""
    marks = [length]
    while length & (length - 1):
        length &= length - 1
        marks.append(length)
    return (MINIMUM, *reversed(marks))


def fingerprints(texts: Iterable[str]) -> list[Keys]:
    """For each text of at least MINIMUM characters, the hashes that `TextIndex.add` wants; the last is the whole's."""
    found: list[Keys] = []
    for batch in _batches(texts):
        marks = [mark_lengths(len(text)) for text in batch]
        counts = np.array([len(lengths) for lengths in marks])
        offsets = np.cumsum([0, *(len(text) for text in batch)])[:-1]
        lengths = np.array([length for each in marks for length in each])
        keys = Hashed("".join(batch)).keys(np.repeat(offsets, counts), lengths)
        found.extend(np.split(keys, np.cumsum(counts)[:-1]))
    return found


def _batches(texts: Iterable[str]) -> Iterable[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        assert len(text) >= MINIMUM
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class TextIndex:
    """The hashes of many texts: about 70 bytes a text, and no text. Not safe for threads."""

    def __init__(self) -> None:
        self.heads, self.marks, self.wholes = KeySet(), KeySet(), KeySet()
        self._seen = np.zeros(
            1 << 16, dtype=bool
        )  # of each head, a few bits: says no for most positions at once

    def add(self, prints: Sequence[Keys]) -> None:
        """Enter texts by their `fingerprints`."""
        if not prints:
            return
        counts = np.array([len(keys) for keys in prints])
        last = np.cumsum(counts) - 1
        first, keys = last - counts + 1, np.concatenate(prints)
        self.heads.add(keys[first])
        self.marks.add(np.delete(keys, first))
        self.wholes.add(keys[last])
        self._see(keys[first])

    def discard(self, whole: int) -> None:
        """Forget a text by the hash of its whole. Its marks stay: they cost a search some steps, and find nothing."""
        self.wholes.discard(whole)

    def find(self, text: str, confirm: Callable[[int, int, int], T | None]) -> list[tuple[int, int, T]]:
        """Disjoint (start, stop, what `confirm` said) of known texts in `text`, ascending.

        The longest comes first, of equally long ones the earliest. `confirm(whole, start, stop)` has the last word on
        whether text[start:stop] is the text with that hash; after None for one place none with that hash is found.
        """
        if len(text) < MINIMUM or not len(self.wholes):
            return []
        return _Search(self, Hashed(text), confirm).run()

    def starts(self, prompt: Hashed) -> Lengths:
        """The positions at which the first MINIMUM characters of some text stand."""
        starts = np.arange(prompt.size - MINIMUM + 1)
        keys = prompt.keys(starts, np.array(MINIMUM))
        near = np.flatnonzero(self._seen[self._slots(keys)])
        return near[self.heads.holds(keys[near])]

    def _see(self, heads: Keys) -> None:
        if len(self.heads) * 32 > len(self._seen):
            self._seen = np.zeros(1 << (len(self.heads) * 64).bit_length(), dtype=bool)
            heads = self.heads.all()
        self._seen[self._slots(heads)] = True

    def _slots(self, keys: Keys) -> NDArray[np.int64]:
        slots: NDArray[np.int64] = ((keys >> np.uint64(20)) % np.uint64(len(self._seen))).astype(np.int64)
        return slots


class _Search(Generic[T]):
    """One prompt's search: the longest text at each position, and the choice among them."""

    def __init__(
        self, index: TextIndex, prompt: Hashed, confirm: Callable[[int, int, int], T | None]
    ) -> None:
        self.index, self.prompt, self.confirm = index, prompt, confirm
        self.longest = np.zeros(prompt.size, dtype=np.int64)  # known text at a position; 0 for none
        self.room = prompt.size - np.arange(prompt.size)  # how long it may be there
        self.waiting: dict[int, list[Lengths]] = {}  # positions by the length of their longest text
        self.lengths: list[int] = []  # a heap of those lengths, negated
        self.refused: set[int] = set()
        self.within: dict[int, int] = {}  # of a mark that is no text: its longest beginning that is one
        self.taken: list[tuple[int, int, T]] = []

    def run(self) -> list[tuple[int, int, T]]:
        self._look_up(self.index.starts(self.prompt))
        while self.lengths:
            length = -heappop(self.lengths)
            at = np.concatenate(self.waiting.pop(length))
            at = at[self.longest[at] == length]
            if at.size:
                self._take(length, np.unique(at))
        return sorted(self.taken, key=lambda each: each[0])

    def _look_up(self, starts: Lengths) -> None:
        """Find the longest text at each start that has room there, and file the start under its length."""
        if not starts.size:
            return
        lengths = self._longest_at(starts, self.room[starts])
        self.longest[starts] = lengths
        order = np.argsort(lengths, kind="stable")
        values, edges = np.unique(lengths[order], return_index=True)
        for length, group in zip(values.tolist(), np.split(starts[order], edges[1:]), strict=True):
            if length and length not in self.waiting:
                heappush(self.lengths, -length)
            if length:
                self.waiting.setdefault(length, []).append(group)

    def _take(self, length: int, at: Lengths) -> None:
        """Take what is confirmed of the equally long texts at `at`, from left to right, and look again beside them.

        Each text taken touches as many positions as it is long, and they are disjoint: that is linear in the prompt.
        """
        keys = self.prompt.keys(at, np.array(length)).tolist()
        again: list[Lengths] = []
        i = 0
        while i < len(at):
            start = int(at[i])
            said = None if keys[i] in self.refused else self.confirm(keys[i], start, start + length)
            if said is None:
                self.refused.add(keys[i])
                self.room[start] = min(self.room[start], length - 1)
                again.append(at[i : i + 1])
                i += 1
            else:
                self.taken.append((start, start + length, said))
                again.append(self._shut(start, length))
                i = int(at.searchsorted(start + length))
        self._look_up(np.unique(np.concatenate(again)) if again else at[:0])

    def _shut(self, start: int, length: int) -> Lengths:
        """Nothing may reach into a taken text any more. Returns the positions whose longest text did."""
        self.longest[start : start + length] = 0
        before = np.arange(max(0, start - length + 1), start)
        self.room[before] = np.minimum(self.room[before], start - before)
        return before[self.longest[before] > self.room[before]]

    def _longest_at(self, starts: Lengths, room: Lengths) -> Lengths:
        """For each start the length of the longest text there of at most `room` characters; 0 for none."""
        ends, keys = self._follow(starts, room)
        lengths = np.where(self.index.wholes.holds(keys), ends, 0)
        other = np.flatnonzero((lengths == 0) & (ends > 0))
        if other.size:
            self._look_within(starts[other], ends[other], keys[other])
            lengths[other] = [self.within[key] for key in keys[other].tolist()]
        return lengths

    def _follow(self, starts: Lengths, room: Lengths) -> tuple[Lengths, Keys]:
        """Follow the marks from each start as far as they go: (lengths, hashes), 0 where there are none.

        Every text that stands there is a beginning of the mark so reached, for its own marks lead on from any other.
        """
        ends, keys = np.zeros_like(starts), np.zeros(len(starts), dtype=np.uint64)
        for bit in range(int(room.max(initial=0)).bit_length() - 1, -1, -1):
            further = ends + (1 << bit)
            fits = np.flatnonzero(further <= room)
            tried = self.prompt.keys(starts[fits], further[fits])
            hit = self.index.marks.holds(tried)
            ends[fits[hit]], keys[fits[hit]] = further[fits[hit]], tried[hit]
        return ends, keys

    def _look_within(self, starts: Lengths, ends: Lengths, keys: Keys) -> None:
        """Enter in `within` the marks at (starts, ends) that are no text: the marks of longer texts led past theirs.

        Each distinct mark is looked at once a search, wherever it stands.
        """
        links: list[tuple[int, int, int]] = []
        asked: set[int] = set()
        rounds = 0
        while (open_ := self._unknown(keys, asked)).size:
            starts, ends, keys = starts[open_], ends[open_], keys[open_]
            if rounds >= _ROUNDS and len(keys) <= _FEW:
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    self._scan(start, end)
                break
            shorter, found = self._follow(starts, ends - 1)
            whole = self.index.wholes.holds(found) | (shorter == 0)
            self.within.update(zip(keys[whole].tolist(), shorter[whole].tolist(), strict=True))
            links.extend(
                zip(ends[~whole].tolist(), keys[~whole].tolist(), found[~whole].tolist(), strict=True)
            )
            starts, ends, keys = starts[~whole], shorter[~whole], found[~whole]
            rounds += 1
        for _, key, shorter_key in sorted(links):  # a link leads to a shorter mark, which is known by then
            self.within[key] = self.within[shorter_key]

    def _unknown(self, keys: Keys, asked: set[int]) -> NDArray[np.int64]:
        """Where the keys stand that are neither in `within` nor `asked`, one place each; they are `asked` now."""
        new, first = np.unique(keys, return_index=True)
        places = [
            at
            for key, at in zip(new.tolist(), first.tolist(), strict=True)
            if key not in self.within and key not in asked
        ]
        asked.update(keys[places].tolist())
        return np.array(places, dtype=np.int64)

    def _scan(self, start: int, end: int) -> None:
        """Enter in `within` every mark at one start, up to `end`: thousands may lie within each other there."""
        lengths = np.arange(MINIMUM, end + 1)
        keys = self.prompt.keys(np.array(start), lengths)
        longest = np.maximum.accumulate(np.where(self.index.wholes.holds(keys), lengths, 0))
        marks = np.flatnonzero(self.index.marks.holds(keys))
        self.within.update(zip(keys[marks].tolist(), longest[marks].tolist(), strict=True))
