"""Eviction policies, as pure functions over the entries of values.

An `Entry` holds one value's counts and priority. These functions return a new entry; there is no state here. The
ledger (`ledger.py`) holds the entries of all values.

    used(entry, at)         count a retrieval, hit or miss
    computed(entry, cost)   add a computation to the average cost per token
    ranked(entry, policy)   set its priority in a tier; the lowest is evicted first

Sources: RAGCache (arXiv 2404.12457) section 5.1 and Algorithm 1 for PGDSF; Cherkasova, "Improving WWW proxies
performance with Greedy-Dual-Size-Frequency" (HP Labs 1998) for GDSF; Cormode et al., "Forward decay" (ICDE 2009) for
decaying counts.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple

from ragblend.kvstore.errors import UsageError

# After this many later retrievals, one counts half (decision 5). A shorter half-life follows changing interests, a
# longer one distinguishes rarely used values better.
HALF_LIFE_USES = 4096.0


class Entry(NamedTuple):
    """The input of a policy for one value. A tuple, because each use creates three of them.

    used_at: time of the last use, counted in uses, because wall time may go back. frequency: retrievals, weighted as
    of used_at. tokens: 0 if unknown. cost: mean time per token to compute it, in ms, over `computations`.
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
    """An entry of EVICTION_POLICIES.

    priority(entry, clock): the value with the lowest is evicted first; clock is the tier's.
    decays: retrievals lose half their weight in HALF_LIFE_USES, and count also while the value is not stored
    (RAGCache's frequency within a time window); if not, they are counted from the insertion on, with full weight.
    """

    name: str
    priority: Callable[[Entry, float], float]
    decays: bool = False

    @property
    def half_life(self) -> float | None:
        """Half-life of a retrieval, in uses; None without decay."""
        return HALF_LIFE_USES if self.decays else None


def used(entry: Entry, at: float, half_life: float | None = None) -> Entry:
    """The entry after a retrieval at time `at`, whether the value is stored or not.

    half_life None: earlier retrievals keep their weight. If `at` is before the last use, the last use's time counts.
    """
    at = max(at, entry.used_at)
    return joined(entry, entry._replace(used_at=at, frequency=1.0), half_life)


def joined(entry: Entry, later: Entry, half_life: float | None = None) -> Entry:
    """Add the retrievals counted in `later` to `entry`, as if `used` had been applied for each of them."""
    at = max(entry.used_at, later.used_at)
    return entry._replace(
        used_at=at, frequency=_decayed(entry, at, half_life) + _decayed(later, at, half_life)
    )


def _decayed(entry: Entry, at: float, half_life: float | None) -> float:
    """The weighted retrievals as of time `at`."""
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
    """The entry with its priority under that policy, in a tier with this clock."""
    return entry._replace(priority=policy.priority(entry, clock))


def clock_after(clock: float, victims: Iterable[Entry]) -> float:
    """A tier's clock after an eviction: the largest evicted priority (RAGCache, formula 2); it never decreases."""
    return max([clock, *(victim.priority for victim in victims)])


def _tokens(entry: Entry) -> int:
    """The size in tokens, as in RAGCache; if they are unknown, in bytes, which are proportional."""
    return max(entry.tokens or entry.nbytes, 1)


EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy
    for policy in (
        EvictionPolicy("lru", lambda entry, clock: entry.used_at),
        # Cost 1 per document: Cherkasova's GDSF(1), which maximises the hit rate.
        EvictionPolicy("gdsf", lambda entry, clock: clock + entry.frequency / _tokens(entry)),
        # Cost / Size is the mean over computations of T(cached, new)/new: per token already, so no division here.
        # Without measurements all tokens cost the same.
        EvictionPolicy(
            "pgdsf", lambda entry, clock: clock + entry.frequency * (entry.cost or 1.0), decays=True
        ),
    )
}
DEFAULT_POLICY = "pgdsf"


def eviction_policy_named(name: str) -> EvictionPolicy:
    """The policy of that name. Raises UsageError."""
    if name not in EVICTION_POLICIES:
        raise UsageError(f"the eviction policy {name!r} is unknown; there are {', '.join(EVICTION_POLICIES)}")
    return EVICTION_POLICIES[name]


@dataclass(frozen=True)
class PrefillProfile:
    """prefill_ms[i][j]: milliseconds to compute new_tokens[j] after cached_tokens[i]; `about`: where it was measured.

    RAGCache (arXiv 2404.12457) section 5.1: profiled once, then T(cached, new) is found by bilinear interpolation.
    Raises UsageError for an invalid grid.
    """

    about: str
    cached_tokens: tuple[int, ...]
    new_tokens: tuple[int, ...]
    prefill_ms: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        for axis in (self.cached_tokens, self.new_tokens):
            are_counts = all(type(count) is int and count >= 0 for count in axis)
            if not are_counts or len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
                raise UsageError(
                    f"a prefill profile's token counts must be two or more ascending whole numbers, not {axis}"
                )
        if [len(row) for row in self.prefill_ms] != [len(self.new_tokens)] * len(self.cached_tokens):
            raise UsageError(
                "a prefill profile must have a row for each of cached_tokens, and in it a number for each of new_tokens"
            )
        for ms in chain.from_iterable(self.prefill_ms):
            if type(ms) not in (int, float) or not 0 <= ms < math.inf:
                raise UsageError(f"a prefill profile must hold milliseconds, not {ms!r}")

    @classmethod
    def of(
        cls, about: str, cached: Sequence[int], new: Sequence[int], ms: Callable[[int, int], float]
    ) -> "PrefillProfile":
        """The grid of a function ms(cached, new), which measures or computes."""
        return cls(about, tuple(cached), tuple(new), tuple(tuple(ms(c, n) for n in new) for c in cached))

    def ms(self, cached: float, new: float) -> float:
        """Milliseconds to compute `new` tokens after `cached` ones.

        Beyond the grid its outermost cells are extrapolated linearly; clamping would make further tokens free.
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
        """Parse the output of `asdict`. Raises UsageError for anything else."""
        try:
            axes = {name: tuple(value[name]) for name in ("cached_tokens", "new_tokens")}
            return cls(**value | axes | {"prefill_ms": tuple(map(tuple, value["prefill_ms"]))})
        except (KeyError, TypeError) as error:
            fields = ", ".join(cls.__dataclass_fields__)
            raise UsageError(f"a prefill profile must have the fields {fields}") from error


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The cell of the axis for that value, and how far into it the value lies: 0 to 1 inside the grid."""
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])
