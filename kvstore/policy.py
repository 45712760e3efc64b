"""Which values go when there is no room: eviction policies as table rows, all of them pure functions over entries.

An `Entry` is what is known of one value. A use, a computation and a ranking each give a new entry; nothing here
keeps state. `ledger.py` keeps the order of many entries up to date.

    used(entry, at)         one more retrieval, whether it was found (a hit) or not
    computed(entry, cost)   it had to be computed: the average cost per token takes this one in
    ranked(entry, policy)   its priority in a tier; the lowest is evicted first

Sources: RAGCache (arXiv 2404.12457) section 5.1 and Algorithm 1 for PGDSF; Cherkasova, "Improving WWW proxies
performance with Greedy-Dual-Size-Frequency" (HP Labs 1998) for GDSF; Cormode et al., "Forward decay" (ICDE 2009) for
the counts that fade.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from ragblend.kvstore.errors import UsageError

# A retrieval counts half after so many others (decision 5). Shorter follows changing interests, longer tells rarely
# used values apart better.
HALF_LIFE_USES = 4096.0


class Entry(NamedTuple):
    """What a policy may know of a value. A tuple: a use makes three of them.

    used_at counts uses (any number that never goes back would do; wall time can). frequency is the retrievals, as
    they counted at used_at. cost is the mean time per token to compute it, in ms, over `computations`.
    """

    digest: str
    nbytes: int
    used_at: float = 0.0
    tokens: int = 0
    frequency: float = 0.0
    cost: float = 0.0
    computations: int = 0
    priority: float = 0.0


@dataclass(frozen=True)
class EvictionPolicy:
    """One row of the table.

    priority(entry, clock): the lowest is evicted first; clock is the tier's.
    fades: retrievals lose half their weight in HALF_LIFE_USES, and count also while the value is not stored (RAGCache's
    frequency within a time window); else they are counted from when the value came in, all alike.
    """

    name: str
    priority: Callable[[Entry, float], float]
    fades: bool = False

    @property
    def half_life(self) -> float | None:
        """Of a retrieval, in uses; None if all count alike."""
        return HALF_LIFE_USES if self.fades else None


def used(entry: Entry, at: float, half_life: float | None = None) -> Entry:
    """The entry after a retrieval at `at`, which counts whether the value is stored or not.

    half_life None: earlier retrievals keep their weight. A time before the last use, from a clock that went back, is
    taken as the last use's.
    """
    at = max(at, entry.used_at)
    return joined(entry, entry._replace(used_at=at, frequency=1.0), half_life)


def joined(entry: Entry, later: Entry, half_life: float | None = None) -> Entry:
    """`entry` after the retrievals that were counted apart, in `later`: as `used` with each of them in turn."""
    at = max(entry.used_at, later.used_at)
    return entry._replace(used_at=at, frequency=_faded(entry, at, half_life) + _faded(later, at, half_life))


def _faded(entry: Entry, at: float, half_life: float | None) -> float:
    return (
        entry.frequency if half_life is None else entry.frequency * 2.0 ** ((entry.used_at - at) / half_life)
    )


def computed(entry: Entry, cost: float) -> Entry:
    """The entry after a computation at `cost` ms a token, averaged in (RAGCache, formula 3, and Algorithm 1).

    RAGCache's cost of a request that lacks the document is T(cached, new)/new, `PrefillProfile.ms_per_token`.
    """
    count = entry.computations + 1
    return entry._replace(cost=entry.cost + (cost - entry.cost) / count, computations=count)


def ranked(entry: Entry, policy: EvictionPolicy, clock: float) -> Entry:
    """The entry with its priority under that policy, in a tier whose clock stands at `clock`."""
    return entry._replace(priority=policy.priority(entry, clock))


def clock_after(clock: float, victims: Iterable[Entry]) -> float:
    """A tier's clock after an eviction: the largest evicted priority (RAGCache, formula 2); it never goes back."""
    return max([clock, *(victim.priority for victim in victims)])


def _tokens(entry: Entry) -> int:
    """RAGCache's size is in tokens; bytes, which are proportional to them, where tokens are not known."""
    return max(entry.tokens or entry.nbytes, 1)


POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", lambda entry, clock: entry.used_at),
        # Cost 1 a document: Cherkasova's GDSF(1), made for the share of documents found.
        EvictionPolicy("gdsf", lambda entry, clock: clock + entry.frequency / _tokens(entry)),
        # Cost / Size is the mean over computations of T(cached, new)/new: per token already, so no division here.
        # Before anything was measured all tokens cost the same.
        EvictionPolicy(
            "pgdsf", lambda entry, clock: clock + entry.frequency * (entry.cost or 1.0), fades=True
        ),
    )
}
DEFAULT_POLICY = "pgdsf"


def policy_named(name: str) -> EvictionPolicy:
    """The row of that name. Raises UsageError."""
    if name not in POLICIES:
        raise UsageError(f"the eviction policy {name!r} is unknown; there are {', '.join(POLICIES)}")
    return POLICIES[name]


@dataclass(frozen=True)
class PrefillProfile:
    """prefill_ms[i][j]: milliseconds to compute new_tokens[j] behind cached_tokens[i]; `about` says where measured.

    RAGCache (arXiv 2404.12457) section 5.1: profiled once, then T(cached, new) is found by bilinear interpolation.
    Raises UsageError for a grid that is none.
    """

    about: str
    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prefill_ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.cached_tokens, self.new_tokens):
            whole = all(type(count) is int and count >= 0 for count in axis)
            if not whole or len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
                raise UsageError(
                    f"a prefill profile's tokens are two or more whole numbers that rise, not {axis}"
                )
        if [len(row) for row in self.prefill_ms] != [len(self.new_tokens)] * len(self.cached_tokens):
            raise UsageError(
                "a prefill profile has a row for each of cached_tokens, a number for each of new_tokens"
            )
        for ms in chain.from_iterable(self.prefill_ms):
            if type(ms) not in (int, float) or not 0 <= ms < math.inf:
                raise UsageError(f"a prefill profile holds {ms!r} where milliseconds are due")

    @classmethod
    def of(
        cls, about: str, cached: Sequence[int], new: Sequence[int], ms: Callable[[int, int], float]
    ) -> "PrefillProfile":
        """The grid of a function that measures, or computes, ms(cached, new)."""
        return cls(about, tuple(cached), tuple(new), tuple(tuple(ms(c, n) for n in new) for c in cached))

    def ms(self, cached: float, new: float) -> float:
        """Milliseconds to compute `new` tokens behind `cached` ones.

        Beyond the grid its outermost cells go on in a straight line: clamped, a token would cost less and less.
        """
        row, down = _cell(self.cached_tokens, cached)
        column, right = _cell(self.new_tokens, new)
        near, far = self.prefill_ms[row], self.prefill_ms[row + 1]
        at_near = near[column] + right * (near[column + 1] - near[column])
        at_far = far[column] + right * (far[column + 1] - far[column])
        return max(0.0, at_near + down * (at_far - at_near))

    def ms_per_token(self, cached: int, new: int) -> float:
        """T(cached, new) / new: what RAGCache's Algorithm 1 charges each token that a request had to compute."""
        return self.ms(cached, new) / max(new, 1)

    @classmethod
    def from_json(cls, value: Any) -> "PrefillProfile":
        """Raises UsageError for anything but what `asdict` gives."""
        try:
            axes = {name: tuple(value[name]) for name in ("cached_tokens", "new_tokens")}
            return cls(**value | axes | {"prefill_ms": tuple(map(tuple, value["prefill_ms"]))})
        except (KeyError, TypeError) as error:
            raise UsageError(f"a prefill profile has {', '.join(cls.__dataclass_fields__)}") from error


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The cell of the axis for that value, and how far into it the value lies: 0 to 1 inside the grid."""
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])
