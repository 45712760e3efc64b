"""Which values go when there is no room: eviction policies as table rows, all of them pure functions over entries.

An `Entry` is what is known of one value. A use, a computation and a ranking each give a new entry; nothing here
keeps state. `uses.py` keeps the order of many entries up to date.

    used(entry, at)         one more retrieval, whether it was found (a hit) or not
    computed(entry, cost)   it had to be computed: the average cost per token takes this one in
    ranked(entry, policy)   its priority in a tier; the lowest goes first

Sources: RAGCache (arXiv 2404.12457) section 5.1 and Algorithm 1 for PGDSF; Cherkasova, "Improving WWW proxies
performance with Greedy-Dual-Size-Frequency" (HP Labs 1998) for GDSF; Cormode et al., "Forward decay" (ICDE 2009) for
the counts that fade.
"""

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ragblend.kvstore.errors import UsageError

# A retrieval counts half after so many others. Shorter follows changing interests, longer tells rarely used values
# apart better: docs/decisions.md has the measurements.
HALF_LIFE_USES = 4096.0
LARGEST = 2.0**52  # one more is still another number


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


def without(entry: Entry, earlier: Entry, half_life: float | None = None) -> Entry:
    """`entry` less the retrievals in `earlier`, which it holds: the inverse of `joined`."""
    return entry._replace(frequency=max(0.0, entry.frequency - _faded(earlier, entry.used_at, half_life)))


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


def _gdsf(entry: Entry, clock: float, half_life: float) -> float:
    return clock + entry.frequency / _size(entry)


def _pgdsf(entry: Entry, clock: float, half_life: float) -> float:
    return clock + entry.frequency * _cost(entry)


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
        # Cost 1 a document: Cherkasova's GDSF(1), made for the share of documents found.
        Policy("gdsf", _gdsf),
        # Cost / Size is the mean over computations of T(cached, new)/new: per token already, so no division here.
        Policy("pgdsf", _pgdsf, fades=True),
    )
}
DEFAULT_POLICY = "pgdsf"


def policy_named(name: str) -> Policy:
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
        for name in ("cached_tokens", "new_tokens"):
            _check_axis(name, getattr(self, name))
        rows, columns = len(self.cached_tokens), len(self.new_tokens)
        if len(self.prefill_ms) != rows or any(len(row) != columns for row in self.prefill_ms):
            raise UsageError(
                f"a prefill profile of {rows} cached_tokens and {columns} new_tokens needs {rows} rows of {columns} "
                "prefill_ms; measure it again"
            )
        for value in (value for row in self.prefill_ms for value in row):
            if not (_is_number(value) and math.isfinite(value) and value >= 0):
                raise UsageError(
                    f"a prefill profile holds {value!r} where milliseconds are due; measure it again"
                )

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> "PrefillProfile":
        """Raises UsageError for anything but what to_json() gives."""
        if not isinstance(value, dict) or set(value) != set(cls.__dataclass_fields__):
            raise UsageError(f"a prefill profile is an object of {', '.join(cls.__dataclass_fields__)}")
        rows = value["prefill_ms"]
        if not isinstance(rows, list | tuple) or not all(isinstance(row, list | tuple) for row in rows):
            raise UsageError("a prefill profile's prefill_ms is a list of rows of milliseconds")
        cached, new = (_axis(name, value[name]) for name in ("cached_tokens", "new_tokens"))
        return cls(str(value["about"]), cached, new, tuple(tuple(row) for row in rows))

    @classmethod
    def read(cls, path: Path) -> "PrefillProfile":
        """From a file of to_json()'s object, or one that has it as `prefill`, as a device's profile does.

        Raises UsageError.
        """
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            return cls.from_json(value.get("prefill", value) if isinstance(value, dict) else value)
        except OSError as error:
            raise UsageError(f"reading the prefill profile {path}: {error.strerror}; name another") from error
        except (ValueError, RecursionError) as error:  # UsageError, and what json raises
            raise UsageError(f"reading the prefill profile {path}: {error}") from error


def _cell(axis: Sequence[int], value: float) -> tuple[int, float]:
    """The cell of the axis for that value, and how far into it the value lies: 0 to 1 inside the grid."""
    cell = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return cell, (value - axis[cell]) / (axis[cell + 1] - axis[cell])


def _axis(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple):
        raise UsageError(f"a prefill profile's {name} is a list of token counts")
    return tuple(value)


def _check_axis(name: str, axis: tuple[int, ...]) -> None:
    whole = all(isinstance(count, int) and not isinstance(count, bool) and count >= 0 for count in axis)
    if not whole or len(axis) < 2 or any(low >= high for low, high in pairwise(axis)):
        raise UsageError(
            f"a prefill profile's {name} must be two or more whole numbers that rise; found {list(axis)}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
