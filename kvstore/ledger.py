"""Ledger: access counts, cost and priority of each value, and hit statistics of all processes.

policy.py has the arithmetic. The ledger lives in memory, is loaded when the store is opened, and saved from time to
time as one packed array in the index. Saving merges: another process's counts are added, and values that either process
deleted stay deleted. A kill loses unsaved counts, which affects only the order of eviction. Time is counted in uses, so
a clock that jumps does no harm. The index, not the ledger, knows what is stored and how large it is.
"""

import heapq
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field

import numpy as np

from ragblend.kvstore.counters import Counters, Counts
from ragblend.kvstore.index import Row
from ragblend.kvstore.policy import (
    DEFAULT_POLICY,
    POLICIES,
    Entry,
    EvictionPolicy,
    clock_after,
    computed,
    joined,
    ranked,
    used,
)

log = logging.getLogger(__name__)
REMEMBERED = 20_000  # limit of evicted values whose counts are kept; about 5 MB
SAVED_EVERY = 64  # changes before a save; more for a large ledger, which is written as a whole
SAVED_PART = 32
_PACKED = np.dtype(
    [
        ("digest", "u1", 32),
        ("parent", "u1", 32),  # zeros: none
        ("nbytes", "<i8"),  # 0: not stored
        ("used_at", "<f8"),
        ("frequency", "<f8"),
        ("cost", "<f8"),
        ("computations", "<i8"),
        ("priority", "<f8"),
    ]
)
_NUMBERS = ("nbytes", "used_at", "frequency", "cost", "computations", "priority")
_LARGEST = 1e15
_NO_PARENT = bytes(32)


@dataclass
class _Saved:
    """The content of a save. serial: number of the save; uses: count of all uses; clock: the policy's."""

    serial: int = 0
    policy: str = ""
    uses: float = 0.0
    clock: float = 0.0
    totals: dict[str, Counts] = field(default_factory=dict)
    entries: dict[str, Entry] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)

    def pack(self) -> bytes:
        head = {"serial": self.serial, "policy": self.policy, "uses": self.uses, "clock": self.clock}
        head["totals"] = {tier: astuple(counts) for tier, counts in self.totals.items()}
        table = np.zeros(len(self.entries), dtype=_PACKED)
        digests, parents = list(self.entries), self.parents
        table["digest"] = _bytes_of(digests)
        table["parent"] = _bytes_of([parents.get(digest, "") or "00" * 32 for digest in digests])
        for name in _NUMBERS:
            table[name] = [getattr(entry, name) for entry in self.entries.values()]
        return json.dumps(head).encode() + b"\n" + table.tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> "_Saved":
        """Parse a save; empty or unreadable input gives an empty ledger."""
        if not packed:
            return cls()
        try:
            head, _, table = packed.partition(b"\n")
            known = json.loads(head)
            del known["totals"]
            totals, rows = _totals(packed), np.frombuffer(table, dtype=_PACKED)
            if not all((np.abs(rows[name]) <= _LARGEST).all() for name in _NUMBERS):
                raise ValueError("it holds impossible numbers")
            digests, parents = _hex_of(rows["digest"]), _hex_of(rows["parent"])
            numbers = [rows[name].tolist() for name in _NUMBERS]
            entries = {
                digest: Entry(digest, nbytes, used_at, 0, frequency, cost, computations, priority)
                for digest, nbytes, used_at, frequency, cost, computations, priority in zip(
                    digests, *numbers, strict=True
                )
            }
            none = _NO_PARENT.hex()
            behind = {
                digest: parent for digest, parent in zip(digests, parents, strict=True) if parent != none
            }
            return cls(**known, totals=totals, entries=entries, parents=behind)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the ledger of uses cannot be read (%s): uses are counted from zero", error)
            return cls()


class Ledger:
    """Thread-safe. policy: the eviction policy.

    counters: of this process, by tier name; remembered: how many values that are not stored keep their counts.
    """

    def __init__(
        self,
        counters: Mapping[str, Counters],
        policy: EvictionPolicy | None = None,
        remembered: int = REMEMBERED,
    ) -> None:
        self._counters, self._wanted, self._remembered = counters, policy, remembered
        self.policy = policy or POLICIES[DEFAULT_POLICY]
        self._lock = threading.RLock()
        self._known = _Saved()  # the last save, and this process's changes since
        # Requested but never stored: not saved, because it may have been deleted.
        self._unknown: dict[str, Entry] = {}
        self._children: dict[str, set[str]] = defaultdict(set)  # by parent, stored or remembered
        # A heap of (priority, used_at, digest); some are outdated.
        self._order: list[tuple[float, float, str]] = []
        # Since the last save: retrievals, values that were computed, and values that were deleted.
        self._uses_since: dict[str, Entry] = {}
        self._computed, self._deleted = set[str](), set[str]()
        self._changes = 0

    # --- reading

    def request_counts(self) -> dict[str, float]:
        """Request counts of values that are not stored, by digest."""
        with self._lock:
            gone = {
                digest: entry.frequency for digest, entry in self._known.entries.items() if not entry.nbytes
            }
            return gone | {digest: entry.frequency for digest, entry in self._unknown.items()}

    def entry(self, digest: str) -> Entry:
        """The entry of a value."""
        with self._lock:
            return self._known.entries.get(digest) or self._unknown.get(digest) or Entry(digest, 0)

    def totals(self, packed: bytes) -> dict[str, Counts]:
        """Counts of all processes by tier name: the saved ones plus this process's unsaved ones."""
        found, own = _totals(packed), {tier: each.unsaved for tier, each in self._counters.items()}
        return {tier: found.get(tier, Counts()) + own.get(tier, Counts()) for tier in {**own, **found}}

    def below(self, digests: Iterable[str]) -> list[str]:
        """These values and all their descendants in the tree, stored or only remembered."""
        with self._lock:
            found, waiting = dict[str, None](), list(digests)
            while waiting:
                digest = waiting.pop()
                if digest not in found:
                    found[digest] = None
                    waiting += self._children.get(digest, ())
            return list(found)

    def orphans(self) -> list[str]:
        """Nodes whose parent is not stored, and their descendants: no path reaches them."""
        with self._lock:
            lost = [digest for digest, parent in self._known.parents.items() if not self._is_stored(parent)]
            return list(filter(self._is_stored, self.below(lost)))

    def _is_stored(self, digest: str) -> bool:
        entry = self._known.entries.get(digest)
        return entry is not None and entry.nbytes > 0

    def victims(
        self, excess_bytes: int, at_most_extra: int, needed_bytes: int = 0, spare: Collection[str] = ()
    ) -> list[Entry]:
        """Values to evict to free excess_bytes, lowest priority first, no node before its children.

        At most at_most_extra values beyond those that free needed_bytes; never `spare`.
        """
        chosen, freed, extra, taken = dict[str, Entry](), 0, 0, []
        with self._lock:
            entries, parents = self._known.entries, self._known.parents
            while self._order and freed < excess_bytes and extra < at_most_extra:
                item = heapq.heappop(self._order)
                digest = item[2]
                entry = entries.get(digest)
                if entry is None or not entry.nbytes or (entry.priority, entry.used_at) != item[:2]:
                    continue  # outdated
                taken.append(item)
                behind = filter(self._is_stored, self._children.get(digest, ()))
                if digest in spare or digest in chosen or not chosen.keys() >= set(behind):
                    continue
                chosen[digest] = entry
                extra += freed >= needed_bytes
                freed += entry.nbytes
                if parent := parents.get(digest):
                    self._push(parent)  # now a leaf, so it may be next
            for item in taken:
                heapq.heappush(self._order, item)
        return list(chosen.values())

    # --- changing, in memory

    def used(self, digest: str) -> None:
        """Count a retrieval, hit or miss."""
        with self._lock:
            half_life, known = self.policy.half_life, self._known
            known.uses += 1.0
            since = used(self._uses_since.pop(digest, Entry(digest, 0)), known.uses, half_life)
            if digest in known.entries:
                self._write(used(known.entries[digest], known.uses, half_life))
                self._uses_since[digest] = since
            else:
                entry = used(self._unknown.pop(digest, Entry(digest, 0)), known.uses, half_life)
                self._unknown[digest] = entry
                while len(self._unknown) > self._remembered:
                    del self._unknown[next(iter(self._unknown))]
            self._changes += 1

    def arrive(self, digest: str, nbytes: int, cost: float, parent: str | None = None) -> None:
        """Record that a value was computed, at `cost` per token, and stored.

        A value that was never requested counts as used once; otherwise new documents would be evicted before any value
        that was requested once, however long ago.
        """
        with self._lock:
            found = self._known.entries.get(digest)
            if found is None:
                asked = self._unknown.pop(digest, Entry(digest, 0))
                found = asked if self.policy.fades else Entry(digest, 0)
            entry = computed(found._replace(nbytes=nbytes), cost)
            self._enter(entry if entry.frequency else self._used_once(entry), parent)
            self._computed.add(digest)
            self._deleted.discard(digest)
            self._changes += 1

    def evict(self, victims: Collection[Entry]) -> None:
        """Record an eviction: the clock advances, and the counts are kept if the policy uses them."""
        with self._lock:
            for victim in victims:
                if self.policy.fades:
                    self._write(victim._replace(nbytes=0))
                else:
                    self._forget(victim.digest)
            self._known.clock = clock_after(self._known.clock, victims)
            self._changes += len(victims)

    def forget(self, digests: Iterable[str]) -> None:
        """Record a deletion: the counts are deleted too."""
        with self._lock:
            for digest in digests:
                self._forget(digest)
                self._unknown.pop(digest, None)
                self._uses_since.pop(digest, None)
                self._computed.discard(digest)
                self._deleted.add(digest)
                self._changes += 1

    def keep_only(self, wanted: Collection[str]) -> None:
        """Forget every other value."""
        with self._lock:
            self.forget([digest for digest in (*self._known.entries, *self._unknown) if digest not in wanted])

    # --- synchronising with the index

    def load(self, packed: bytes, rows: Mapping[str, Row]) -> bool:
        """Load a save, restricted to stored values; returns whether they had to be ranked by another policy."""
        with self._lock:
            self._known = _Saved.unpack(packed)
            before = self._known.policy
            self.policy = self._wanted or POLICIES.get(before, self.policy)
            if self.policy.name != before:
                self._rank_anew()
            self._sync(rows)
            return bool(before) and self.policy.name != before

    @property
    def serial(self) -> int:
        """The number of the last save that this ledger includes."""
        return self._known.serial

    def refresh(self, packed: bytes, rows: Mapping[str, Row]) -> None:
        """Merge other processes' changes. packed: a newer save, empty if there is none; rows: the stored values."""
        with self._lock:
            if packed:
                self._merge(_Saved.unpack(packed), rows)
            else:
                self._sync(rows)

    def _sync(self, rows: Mapping[str, Row]) -> None:
        entries = self._known.entries
        for digest in [digest for digest, entry in entries.items() if entry.nbytes and digest not in rows]:
            # A deletion saves the ledger in the same transaction, so a saved value without a row was evicted. A value
            # that was never saved may have been deleted, so it must not be remembered.
            if self.policy.fades and digest not in self._computed:
                entries[digest] = entries[digest]._replace(nbytes=0)
            else:
                self._forget(digest)
        for digest, row in rows.items():
            entry = entries.get(digest)
            if entry is None or not entry.nbytes:
                asked = self._unknown.pop(digest, None) if self.policy.fades else None
                entry = entry or asked or self._used_once(Entry(digest, 0))
            if entry.nbytes != row.nbytes:
                entry = ranked(entry._replace(nbytes=row.nbytes), self.policy, self._known.clock)
            entries[digest] = entry
            if row.parent is not None:
                self._known.parents[digest] = row.parent
        self._children.clear()
        for digest, parent in self._known.parents.items():
            self._children[parent].add(digest)
        self._sort()

    # --- saving

    @property
    def has_changed(self) -> bool:
        """Whether there are unsaved changes."""
        return self._changes > 0 or any(each.unsaved != Counts() for each in self._counters.values())

    @property
    def is_due(self) -> bool:
        """Whether enough has changed for a save."""
        return self._changes >= max(SAVED_EVERY, len(self._known.entries) // SAVED_PART)

    def merged(
        self, packed: bytes, rows: Callable[[], Mapping[str, Row]]
    ) -> tuple[bytes, Callable[[], None]]:
        """The bytes to save, and a function to call after saving.

        packed: another process's newer save, empty if there is none; rows: reads the stored values, called only then.
        """
        with self._lock:
            if packed:
                self._merge(_Saved.unpack(packed), rows())
            self._trim()
            counted = {tier: each.unsaved for tier, each in self._counters.items()}
            known, totals = self._known, dict(self._known.totals)
            for tier, counts in counted.items():
                if counts != Counts():
                    totals[tier] = totals.get(tier, Counts()) + counts
            serial = known.serial + 1
            saved = _Saved(
                serial, self.policy.name, known.uses, known.clock, totals, known.entries, known.parents
            )
            changes, done = self._changes, dict(self._uses_since)

            def is_saved() -> None:
                with self._lock:
                    known.serial, known.totals = serial, totals
                    for tier, counts in counted.items():
                        self._counters[tier].saved(counts)
                    self._uses_since = {k: v for k, v in self._uses_since.items() if done.get(k) is not v}
                    self._computed.clear()
                    self._deleted.clear()
                    self._changes -= changes

            return saved.pack(), is_saved

    def _merge(self, theirs: _Saved, rows: Mapping[str, Row]) -> None:
        """Merge another process's save with this process's changes since its last save."""
        mine, before = self._known, self.policy.name
        self.policy = POLICIES.get(theirs.policy, self.policy)
        half_life = self.policy.half_life
        for digest in self._unknown.keys() & theirs.entries.keys():
            self._uses_since[digest] = self._unknown.pop(digest)
        for digest in self._deleted - rows.keys():
            theirs.entries.pop(digest, None)
            theirs.parents.pop(digest, None)
        for digest, since in self._uses_since.items():
            if digest in theirs.entries:
                entry = joined(theirs.entries[digest], since, half_life)
                theirs.entries[digest] = ranked(entry, self.policy, theirs.clock)
        theirs.uses = max(mine.uses, theirs.uses)
        if self.policy.name == before:
            theirs.clock = max(mine.clock, theirs.clock)
        for digest in self._computed & mine.entries.keys():
            entry, known = mine.entries[digest], theirs.entries.get(digest)
            if known is None and digest not in rows:
                continue  # evicted here, and deleted by another process
            if known is not None:  # with its uses
                entry = known._replace(nbytes=entry.nbytes, cost=entry.cost, computations=entry.computations)
            theirs.entries[digest] = ranked(entry, self.policy, theirs.clock)
            if digest in mine.parents:
                theirs.parents[digest] = mine.parents[digest]
        for digest, entry in mine.entries.items():
            if not entry.nbytes and digest in theirs.entries and digest not in rows:  # evicted here
                theirs.entries[digest] = theirs.entries[digest]._replace(nbytes=0)
        self._known = theirs
        self._sync(rows)

    def _trim(self) -> None:
        """Forget the least recently used of the values that are not stored."""
        gone = [entry for entry in self._known.entries.values() if not entry.nbytes]
        if len(gone) > self._remembered:
            gone.sort(key=lambda entry: (entry.used_at, entry.digest))
            for entry in gone[: len(gone) - self._remembered]:
                self._forget(entry.digest)

    # --- inside

    def _rank_anew(self) -> None:
        """Rank all values by the current policy, in the order of use."""
        known = self._known
        known.clock = 0.0
        if not self.policy.fades:
            for digest in [digest for digest, entry in known.entries.items() if not entry.nbytes]:
                self._forget(digest)
        for entry in sorted(known.entries.values(), key=lambda entry: (entry.used_at, entry.digest)):
            known.entries[entry.digest] = ranked(entry, self.policy, known.clock)
            known.uses = max(known.uses, entry.used_at)

    def _used_once(self, entry: Entry) -> Entry:
        self._known.uses += 1.0
        return entry._replace(used_at=self._known.uses, frequency=1.0)

    def _enter(self, entry: Entry, parent: str | None) -> None:
        if parent is not None:
            self._known.parents[entry.digest] = parent
            self._children[parent].add(entry.digest)
        self._write(entry)

    def _write(self, entry: Entry) -> None:
        self._known.entries[entry.digest] = ranked(entry, self.policy, self._known.clock)
        self._push(entry.digest)

    def _push(self, digest: str) -> None:
        if self._is_stored(digest):
            entry = self._known.entries[digest]
            heapq.heappush(self._order, (entry.priority, entry.used_at, digest))
        if len(self._order) > 2 * len(self._known.entries) + SAVED_EVERY:
            self._sort()

    def _sort(self) -> None:
        """Rebuild the heap without outdated items."""
        stored = (entry for entry in self._known.entries.values() if entry.nbytes)
        self._order = [(entry.priority, entry.used_at, entry.digest) for entry in stored]
        heapq.heapify(self._order)

    def _forget(self, digest: str) -> None:
        self._known.entries.pop(digest, None)
        if parent := self._known.parents.pop(digest, None):
            self._children[parent].discard(digest)
            if not self._children[parent]:
                del self._children[parent]


def _totals(packed: bytes) -> dict[str, Counts]:
    try:
        totals = json.loads(packed.partition(b"\n")[0])["totals"]
        return {tier: Counts(*counts) for tier, counts in totals.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}


def _bytes_of(digests: list[str]) -> np.ndarray:
    return np.frombuffer(bytes.fromhex("".join(digests)), dtype="u1").reshape(-1, 32)


def _hex_of(digests: np.ndarray) -> list[str]:
    text = digests.tobytes().hex()
    return [text[start : start + 64] for start in range(0, len(text), 64)]
