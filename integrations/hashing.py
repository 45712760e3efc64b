"""Hashes of all substrings of a string, and sets of such hashes; numpy throughout, nothing here keeps text."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Lengths = NDArray[np.int64]
_PRIME = (1 << 31) - 1  # products of two residues, and sums of 2**32 of them, fit in 64 bits
_BASES = (1_254_311_693, 1_897_660_021)
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # spreads the length over the key
_SMALLEST_TABLE = 1 << 16
_MERGE_AT = 4096


class Hashed:
    """A string, hashed so that any substring's key costs the same.

    Polynomial hashes over code points modulo a prime, in two bases, and the length: 62 bits. Modulo 2**64, which numpy
    would give for nothing, the Thue-Morse word collides with its own complement. Two texts with the same key must
    still be expected: whoever uses a key compares what it stands for.
    """

    def __init__(self, text: str) -> None:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
        self.size = len(codes)
        digits = codes.astype(np.uint64) + np.uint64(1)  # no digit is 0, so a text is not its own beginning
        self._sums, self._inverse = [], []
        for base in _BASES:
            sums = np.zeros(self.size + 1, dtype=np.uint64)
            np.cumsum(digits * _table(base, self.size) % np.uint64(_PRIME), out=sums[1:])
            self._sums.append(sums)
            self._inverse.append(_table(pow(base, -1, _PRIME), self.size))

    def keys(self, starts: Lengths, lengths: Lengths) -> Keys:
        """The keys of the substrings at `starts` of `lengths` characters; the two are broadcast."""
        prime, stops = np.uint64(_PRIME), starts + lengths
        first, second = (
            (sums[stops] - sums[starts]) % prime * inverse[starts] % prime
            for sums, inverse in zip(self._sums, self._inverse, strict=True)
        )
        keys: Keys = (first << np.uint64(32) | second) + lengths.astype(np.uint64) * _STRIDE
        return keys


def _table(base: int, count: int) -> Keys:
    """The powers of `base`, at least `count` of them, cut to `count`."""
    return _powers(base, max(_SMALLEST_TABLE, 1 << count.bit_length()))[:count]


@lru_cache(maxsize=8)
def _powers(base: int, count: int) -> Keys:
    powers = np.ones(1, dtype=np.uint64)
    while len(powers) < count:
        step = np.uint64(pow(base, len(powers), _PRIME))
        powers = np.concatenate([powers, powers * step % np.uint64(_PRIME)])
    powers.flags.writeable = False
    return powers


class KeySet:
    """A set of keys, 8 bytes each: a large sorted array, and a small one that takes what is new."""

    def __init__(self) -> None:
        self._main: Keys = np.zeros(0, dtype=np.uint64)
        self._new: Keys = self._main

    def __len__(self) -> int:
        return len(self._main) + len(self._new)

    def all(self) -> Keys:
        return np.concatenate([self._main, self._new])

    def add(self, keys: Keys) -> None:
        self._new = _ordered(np.concatenate([self._new, keys[~_in(self._main, keys)]]))
        if len(self._new) > _MERGE_AT + len(self._main) // 8:
            self._main, self._new = _ordered(self.all()), self._new[:0]

    def discard(self, key: int) -> None:
        wanted = np.uint64(key)
        self._main = self._main[self._main != wanted]
        self._new = self._new[self._new != wanted]

    def holds(self, keys: Keys) -> NDArray[np.bool_]:
        """Which of `keys` are in the set."""
        return _in(self._main, keys) | _in(self._new, keys)


def _ordered(keys: Keys) -> Keys:
    """Sorted and without repeats; `np.unique` does it by hashing, which takes five times as long on these."""
    keys = np.sort(keys)
    new = np.ones(len(keys), dtype=bool)
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    return keys[new]


def _in(ordered: Keys, keys: Keys) -> NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(keys.shape, dtype=bool)
    at = np.minimum(ordered.searchsorted(keys), len(ordered) - 1)
    found: NDArray[np.bool_] = ordered[at] == keys
    return found
