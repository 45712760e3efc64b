"""Which values go when there is no room: eviction policies as table rows, all of them pure functions over entries.

An `Entry` is what is known of one value. A use, a computation and a ranking each give a new entry; nothing here
keeps state. `ranking.py` keeps the order of many entries up to date.

    used(entry, at)         one more retrieval, whether it was found (a hit) or not
    computed(entry, cost)   it had to be computed: the average cost per token takes this one in
    ranked(entry, policy)   its priority in a tier; the lowest goes first

Sources: RAGCache (arXiv 2404.12457) section 5.1 and Algorithm 1 for PGDSF; Cherkasova, "Improving WWW proxies
performance with Greedy-Dual-Size-Frequency" (HP Labs 1998) for GDSF; Lee et al., "LRFU" (IEEE ToC 2001), and Cormode
et al., "Forward decay" (ICDE 2009) for the counts that fade.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from ragblend.kvstore.errors import UsageError

# A retrieval counts half after so many others. Shorter follows changing interests, longer tells rarely used values
# apart better: docs/decisions.md has the measurements.
HALF_LIFE_USES = 4096.0
LARGEST = 2.0**52  # one more is still another number
LEAST_FREQUENCY = 1e-9  # of a value put without ever being asked for; a logarithm is taken of it


class Entry(NamedTuple):
    """What a policy may know of a value. A tuple, because a use makes three of them and a store opens with 100,000.

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
class Policy:
    """One row of the table.

    priority(entry, clock, half_life): the lowest goes first; clock is the tier's, half_life of a retrieval in uses.
    fades: retrievals lose half their weight in half_life, and count also while the value is not stored (RAGCache's
    frequency within a time window); else they are counted from when the value came in, all alike.
    """

    name: str
    priority: Callable[[Entry, float, float], float]
    fades: bool = False


def used(entry: Entry, at: float, half_life: float | None = None) -> Entry:
    """The entry after a retrieval at `at`, which counts whether the value is stored or not.

    half_life None: earlier retrievals keep their weight. A time before the last use, from a clock that went back, is
    taken as the last use's.
    """
    at = max(at, entry.used_at)
    frequency = entry.frequency
    if half_life is not None and frequency:
        frequency *= 2.0 ** ((entry.used_at - at) / half_life)
    digest, nbytes, _, tokens, _, cost, computations, priority = entry
    return Entry(digest, nbytes, at, tokens, frequency + 1.0, cost, computations, priority)


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
    digest, nbytes, used_at, tokens, frequency, mean, count, priority = entry
    count += 1
    mean += (cost - mean) / count
    return Entry(digest, nbytes, used_at, tokens, frequency, mean, count, priority)


def ranked(entry: Entry, policy: Policy, clock: float, half_life: float = HALF_LIFE_USES) -> Entry:
    """The entry with its priority under that policy, in a tier whose clock stands at `clock`."""
    return Entry(*entry[:7], policy.priority(entry, clock, half_life))


def sound(entry: Entry) -> Entry:
    """An entry read from a row that may be damaged: itself, or, if its numbers are impossible, as if never used."""
    # By hand, not by `is_count` for each: a put reads two entries, and this takes a third of the time.
    _, nbytes, used_at, tokens, frequency, cost, computations, priority = entry
    with suppress(TypeError):  # text compares with no number
        if (
            0 <= nbytes < LARGEST
            and 0 <= used_at < LARGEST
            and 0 <= tokens < LARGEST
            and 0 <= frequency < LARGEST
            and 0 <= cost < LARGEST
            and 0 <= computations < LARGEST
            and abs(priority) < LARGEST
        ):
            return entry
    return Entry(entry.digest, entry.nbytes if is_count(entry.nbytes) else 0)


def is_count(value: object) -> bool:
    """Whether it can be a number of ours that is never below 0; a damaged row may hold anything, text too."""
    return isinstance(value, int | float) and 0 <= value < LARGEST


def clock_after(clock: float, victims: Iterable[Entry]) -> float:
    """A tier's clock after an eviction: the largest evicted priority (RAGCache, formula 2); it never goes back."""
    return max([clock, *(victim.priority for victim in victims)])


def _recency(entry: Entry, clock: float, half_life: float) -> float:
    return entry.used_at


def _frequency(entry: Entry, clock: float, half_life: float) -> float:
    return entry.frequency


def _gdsf(entry: Entry, clock: float, half_life: float) -> float:
    return clock + entry.frequency / _size(entry)


def _gdsf_size(entry: Entry, clock: float, half_life: float) -> float:
    return clock + entry.frequency


def _pgdsf(entry: Entry, clock: float, half_life: float) -> float:
    return clock + entry.frequency * _cost(entry)


def _fading_time(entry: Entry, clock: float, half_life: float) -> float:
    return _forward(entry, half_life) + math.log2(_cost(entry))


def _fading_hits(entry: Entry, clock: float, half_life: float) -> float:
    return _forward(entry, half_life) - math.log2(_size(entry))


def _forward(entry: Entry, half_life: float) -> float:
    # Everyone's count fades at the same pace, so the order of two untouched values never changes: their counts as they
    # will stand at one far moment compare today, and no entry has to be visited because time has passed.
    return math.log2(max(entry.frequency, LEAST_FREQUENCY)) + entry.used_at / half_life


def _size(entry: Entry) -> int:
    """RAGCache's size is in tokens; bytes, which are proportional to them, where tokens are not known."""
    return max(entry.tokens or entry.nbytes, 1)


def _cost(entry: Entry) -> float:
    """Before anything was measured all tokens cost the same."""
    return entry.cost if entry.cost > 0 else 1.0


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("lru", _recency),
        Policy("lfu", _frequency),
        # Cost 1 a document: Cherkasova's GDSF(1), made for the share of documents found.
        Policy("gdsf", _gdsf),
        # Cost equal to the size, RAGCache's example of GDSF's costs; that is LFU with dynamic aging.
        Policy("gdsf-size", _gdsf_size),
        # Cost / Size is the mean over computations of T(cached, new)/new: per token already, so no division here.
        Policy("pgdsf", _pgdsf, fades=True),
        # Ours: PGDSF's frequency and cost, aged by the fading alone instead of the clock.
        Policy("fading", _fading_time, fades=True),
        # The same for the share of documents found instead of the time saved.
        Policy("fading-hits", _fading_hits, fades=True),
    )
}
DEFAULT_POLICY = "pgdsf"


def policy_named(name: str) -> Policy:
    """The row of that name. Raises UsageError."""
    if name not in POLICIES:
        raise UsageError(f"the eviction policy {name!r} is unknown; there are {', '.join(POLICIES)}")
    return POLICIES[name]
