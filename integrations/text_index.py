"""Finds known texts inside a prompt by hashes: of their first characters, then of the whole text. No text is kept.

Longest texts first; numpy throughout.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

MIN_TEXT_CHARS = 16  # shorter texts would be found everywhere, and are not worth reusing
Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]
_PRIME = (1 << 31) - 1  # products of two residues, and sums of 2**32 of them, fit in 64 bits
_BASES = (1_254_311_693, 1_897_660_021)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # spreads the length over the key
_SMALLEST_TABLE = 1 << 16
_BATCH = 1 << 18  # characters or candidates that are hashed together
_MAX_CANDIDATES = 1 << 23  # per prompt, which takes about a second: only adversarial texts have more
T = TypeVar("T")


class TextHashes(NamedTuple):
    """A text's keys: of its first MIN_TEXT_CHARS characters (head) and of all `length` of them (whole)."""

    head: int
    length: int
    whole: int


class HashedText:
    """A string, hashed so that the key of any substring takes the same time.

    Polynomial hashes over code points modulo a prime, in two bases, and the length: 62 bits. Modulo 2**64, which numpy
    computes for free, the Thue-Morse word collides with its own complement. Two texts may still have the same key, so
    users of a key compare the texts.
    """

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        self.size = len(codes)
        digits = codes.astype(np.uint64) + np.uint64(1)  # no digit is 0, so a text differs from its prefixes
        self._sums, self._inverse = [], []
        for base in _BASES:
            sums = np.zeros(self.size + 1, dtype=np.uint64)
            np.cumsum(digits * _powers(base, self.size) % np.uint64(_PRIME), out=sums[1:])
            self._sums.append(sums)
            self._inverse.append(_powers(pow(base, -1, _PRIME), self.size))

    def keys(self, starts: Numbers, lengths: Numbers) -> Keys:
        """The keys of the substrings at `starts` of `lengths` characters; the two are broadcast."""
        prime, stops = np.uint64(_PRIME), starts + lengths
        first, second = (
            (sums[stops] - sums[starts]) % prime * inverse[starts] % prime
            for sums, inverse in zip(self._sums, self._inverse, strict=True)
        )
        keys: Keys = (first << np.uint64(32) | second) + lengths.astype(np.uint64) * _STRIDE
        return keys


def _powers(base: int, count: int) -> Keys:
    """The first `count` powers of `base`."""
    return _power_table(base, max(_SMALLEST_TABLE, 1 << count.bit_length()))[:count]


@lru_cache(maxsize=8)
def _power_table(base: int, count: int) -> Keys:
    powers = np.ones(1, dtype=np.uint64)
    while len(powers) < count:
        step = np.uint64(pow(base, len(powers), _PRIME))
        powers = np.concatenate([powers, powers * step % np.uint64(_PRIME)])
    powers.flags.writeable = False
    return powers


def hash_texts(texts: Iterable[str]) -> list[TextHashes]:
    """The hashes of each text, for `TextIndex.add`; each must have at least MIN_TEXT_CHARS characters."""
    found: list[TextHashes] = []
    for batch in _batches(texts):
        lengths = np.array([len(text) for text in batch])
        assert lengths.min() >= MIN_TEXT_CHARS
        starts, hashed = np.cumsum(lengths) - lengths, HashedText("".join(batch))
        heads, wholes = hashed.keys(starts, np.array(MIN_TEXT_CHARS)), hashed.keys(starts, lengths)
        found += map(TextHashes, heads.tolist(), lengths.tolist(), wholes.tolist())
    return found


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class TextIndex:
    """The hashes of many texts, at most 24 bytes a text. Not safe for threads."""

    def __init__(self) -> None:
        # Sorted; one entry for each pair of a head and a length. `_wholes` is sorted by itself.
        self._heads: Keys = np.zeros(0, dtype=np.uint64)
        self._lengths: Numbers = np.zeros(0, dtype=np.int64)
        self._wholes: Keys = self._heads

    def add(self, texts: Sequence[TextHashes]) -> None:
        if not texts:
            return
        heads, wholes = (np.array(column, dtype=np.uint64) for column in list(zip(*texts, strict=True))[::2])
        heads = np.concatenate([self._heads, heads])
        lengths = np.concatenate([self._lengths, np.array([text.length for text in texts])])
        order = np.lexsort((lengths, heads))
        heads, lengths = heads[order], lengths[order]
        new = np.ones(len(heads), dtype=bool)
        new[1:] = (heads[1:] != heads[:-1]) | (lengths[1:] != lengths[:-1])
        self._heads, self._lengths = heads[new], lengths[new]
        self._wholes = np.sort(np.concatenate([self._wholes, wholes]))

    def find(self, text: str, confirm: Callable[[int, int, int], T | None]) -> list[tuple[int, int, T]]:
        """Disjoint (start, stop, result of `confirm`) of known texts in `text`, ascending.

        The longest is chosen first, of equally long ones the earliest. `confirm(whole, start, stop)` decides whether
        text[start:stop] is the text with that hash; once it returns None, that hash is not tried again.
        """
        if len(text) < MIN_TEXT_CHARS or not len(self._heads):
            return []
        prompt, free = HashedText(text), np.ones(len(text), dtype=bool)
        taken: list[tuple[int, int, T]] = []
        refused: set[int] = set()
        for starts, lengths in self._candidates(prompt, free):
            keys = prompt.keys(starts, lengths)
            hit = np.flatnonzero(_is_in(keys, self._wholes))
            hit = hit[np.lexsort((starts[hit], -lengths[hit]))]
            for start, length, key in zip(
                *(column[hit].tolist() for column in (starts, lengths, keys)), strict=True
            ):
                stop = start + length
                # Spans taken before are at least as long, so none can lie between these two.
                if key in refused or not (free[start] and free[stop - 1]):
                    continue
                if (confirmed := confirm(key, start, stop)) is None:
                    refused.add(key)
                    continue
                taken.append((start, stop, confirmed))
                free[start:stop] = False
        return sorted(taken, key=lambda each: each[0])

    def _candidates(self, prompt: HashedText, free: NDArray[np.bool_]) -> Iterator[tuple[Numbers, Numbers]]:
        """Candidates with a known head and length, as (starts, lengths), the longest first, in batches."""
        heads = prompt.keys(np.arange(prompt.size - MIN_TEXT_CHARS + 1), np.array(MIN_TEXT_CHARS))
        starts = np.flatnonzero(_is_in(heads, self._heads))
        starts = starts[np.argsort(heads[starts], kind="stable")]  # places with a known head, by head
        entries = np.flatnonzero(_is_in(self._heads, heads[starts]))
        entries = entries[
            np.argsort(-self._lengths[entries], kind="stable")
        ]  # those with such a head, longest first
        lengths = self._lengths[entries]
        # The places of each entry's head are starts[first : first + count].
        first = heads[starts].searchsorted(self._heads[entries])
        counts = heads[starts].searchsorted(self._heads[entries], side="right") - first
        # Batches of entries end between two lengths, so that a batch has only shorter candidates than the one before.
        before = np.cumsum(counts) - counts
        new_length = np.flatnonzero(np.diff(lengths, prepend=-1))
        batch = before[new_length] // _BATCH
        edges = [*new_length[np.flatnonzero(np.diff(batch, prepend=-1))].tolist(), len(entries)]
        for low, high in pairwise(edges):
            if before[low] > _MAX_CANDIDATES:
                return
            count = counts[low:high]
            at = np.repeat(first[low:high] - (np.cumsum(count) - count), count) + np.arange(count.sum())
            begins, sizes = starts[at], np.repeat(lengths[low:high], count)
            fits = begins + sizes <= prompt.size
            begins, sizes = begins[fits], sizes[fits]
            is_free = free[begins] & free[begins + sizes - 1]
            yield begins[is_free], sizes[is_free]


def _is_in(keys: Keys, ordered: Keys) -> NDArray[np.bool_]:
    """Which keys are in the sorted array."""
    if not len(ordered):
        return np.zeros(keys.shape, dtype=bool)
    at = np.minimum(ordered.searchsorted(keys), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == keys
    return found
