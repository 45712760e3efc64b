"""Ledger: access counts, cost and priority of each value, and hit statistics of all processes.

policy.py has the arithmetic. The ledger is held in memory, loaded when the store is opened, and saved from time to time
as one packed array in the index. Saving merges: another process's counts are added, and values that either process
deleted stay deleted. A kill loses unsaved counts, which affects only the order of eviction. Time is counted in uses
(requests for any value, hit or miss), so a clock that jumps does no harm. The index, not the ledger, knows what is
stored and how large it is. A value that was evicted keeps its entry, with nbytes 0, if the policy's counts decay.
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
    EVICTION_POLICIES,
    Entry,
    EvictionPolicy,
    clock_after,
    computed,
    joined,
    ranked,
    used,
)

log = logging.getLogger(__name__)
MAX_REMEMBERED = 20_000  # values that are not stored whose counts are kept; about 5 MB
# A save is due after this many changes, or as many as a 32nd of the entries if that is more, because the ledger is
# written as a whole.
SAVED_EVERY, SAVED_PART = 64, 32
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
_MAX_NUMBER = 1e15  # in a save; larger numbers mean damage
_NO_PARENT = "00" * 32


@dataclass
class _State:
    """The content of a save. serial: number of the save; uses: count of all uses; clock: the policy's; totals: by tier.

    entries: by digest; parents: the digest of a tree node's parent, by the node's.
    """

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
        table["parent"] = _bytes_of([parents.get(digest, _NO_PARENT) for digest in digests])
        for name in _NUMBERS:
            table[name] = [getattr(entry, name) for entry in self.entries.values()]
        return json.dumps(head).encode() + b"\n" + table.tobytes()

    @classmethod
    def unpack(cls, packed: bytes) -> "_State":
        """Parse a save; empty or unreadable input gives an empty ledger."""
        if not packed:
            return cls()
        try:
            head, _, table = packed.partition(b"\n")
            fields = json.loads(head)
            del fields["totals"]
            totals, rows = _totals(packed), np.frombuffer(table, dtype=_PACKED)
            if not all((np.abs(rows[name]) <= _MAX_NUMBER).all() for name in _NUMBERS):
                raise ValueError("it holds impossible numbers")
            digests, parents = _hex_of(rows["digest"]), _hex_of(rows["parent"])
            numbers = [rows[name].tolist() for name in _NUMBERS]
            entries = {
                digest: Entry(digest, nbytes, used_at, 0, frequency, cost, computations, priority)
                for digest, nbytes, used_at, frequency, cost, computations, priority in zip(
                    digests, *numbers, strict=True
                )
            }
            parent_of = {
                digest: parent
                for digest, parent in zip(digests, parents, strict=True)
                if parent != _NO_PARENT
            }
            return cls(**fields, totals=totals, entries=entries, parents=parent_of)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("the ledger of uses cannot be read (%s): uses are counted from zero", error)
            return cls()


class Ledger:
    """Access counts, priorities and statistics of one store, in memory. Thread-safe. Values are named by their digests.

    counters: of this process, by tier name; policy: None for that of the last save; max_remembered: how many values
    that are not stored keep their counts.
    """

    def __init__(
        self,
        counters: Mapping[str, Counters],
        policy: EvictionPolicy | None = None,
        max_remembered: int = MAX_REMEMBERED,
    ) -> None:
        self._counters, self._requested_policy, self._max_remembered = counters, policy, max_remembered
        self.policy = policy or EVICTION_POLICIES[DEFAULT_POLICY]
        self._lock = threading.RLock()
        self._state = _State()  # the last save, and this process's changes since
        # Values that were requested and have no entry in `_state`. Not saved, lest a deleted value be remembered again.
        self._never_stored: dict[str, Entry] = {}
        self._children: dict[str, set[str]] = defaultdict(set)  # of tree nodes, stored or remembered
        # (priority, used_at, digest) of stored values; some items are outdated.
        self._heap: list[tuple[float, float, str]] = []
        # Since the last save: uses (entries by digest that count only these), digests added and deleted, and the
        # number of changes.
        self._uses_since: dict[str, Entry] = {}
        self._added, self._deleted = set[str](), set[str]()
        self._changes = 0

    # --- reading

    def unstored_request_counts(self) -> dict[str, float]:
        """Request counts of values that are not stored, by digest."""
        with self._lock:
            evicted = [entry for entry in self._state.entries.values() if not entry.nbytes]
            return {entry.digest: entry.frequency for entry in (*evicted, *self._never_stored.values())}

    def most_requested(self, count: int) -> list[str]:
        """At most `count` of the stored values, the most often requested first."""
        with self._lock:
            stored = (entry for entry in self._state.entries.values() if entry.nbytes)
            return [
                entry.digest for entry in heapq.nlargest(count, stored, key=lambda entry: entry.frequency)
            ]

    def entry(self, digest: str) -> Entry:
        """The entry of a value; one without counts for an unknown value."""
        with self._lock:
            return self._state.entries.get(digest) or self._never_stored.get(digest) or Entry(digest, 0)

    def totals(self, packed: bytes) -> dict[str, Counts]:
        """Counts of all processes by tier name: those in the save `packed`, plus this process's unsaved ones."""
        saved, own = _totals(packed), {tier: each.unsaved for tier, each in self._counters.items()}
        return {tier: saved.get(tier, Counts()) + own.get(tier, Counts()) for tier in {**own, **saved}}

    def with_descendants(self, digests: Iterable[str]) -> list[str]:
        """These values and all their descendants in the tree, stored or only remembered."""
        with self._lock:
            found, pending = dict[str, None](), list(digests)
            while pending:
                digest = pending.pop()
                if digest not in found:
                    found[digest] = None
                    pending += self._children.get(digest, ())
            return list(found)

    def orphans(self) -> list[str]:
        """Stored tree nodes whose parent is not stored, and their stored descendants: no path can use them."""
        with self._lock:
            cut_off = [
                digest for digest, parent in self._state.parents.items() if not self._is_stored(parent)
            ]
            return list(filter(self._is_stored, self.with_descendants(cut_off)))

    def _is_stored(self, digest: str) -> bool:
        entry = self._state.entries.get(digest)
        return entry is not None and entry.nbytes > 0

    def victims(
        self, excess_bytes: int, at_most_extra: int, needed_bytes: int = 0, protected: Collection[str] = ()
    ) -> list[Entry]:
        """Values to evict to free excess_bytes, lowest priority first, no tree node before its children.

        At most at_most_extra values beyond those that free needed_bytes; never those in `protected`.
        """
        chosen, freed, extra = dict[str, Entry](), 0, 0
        popped = list[tuple[float, float, str]]()  # from the heap, and pushed back at the end
        with self._lock:
            entries, parents = self._state.entries, self._state.parents
            while self._heap and freed < excess_bytes and extra < at_most_extra:
                item = heapq.heappop(self._heap)
                digest = item[2]
                entry = entries.get(digest)
                if entry is None or not entry.nbytes or (entry.priority, entry.used_at) != item[:2]:
                    continue  # outdated
                popped.append(item)
                children = filter(self._is_stored, self._children.get(digest, ()))
                if digest in protected or digest in chosen or not chosen.keys() >= set(children):
                    continue
                chosen[digest] = entry
                extra += freed >= needed_bytes
                freed += entry.nbytes
                if parent := parents.get(digest):
                    self._push(parent)  # now a leaf, so it may be next
            for item in popped:
                heapq.heappush(self._heap, item)
        return list(chosen.values())

    # --- changing, in memory

    def used(self, digest: str) -> None:
        """Count a request for a value, hit or miss."""
        with self._lock:
            half_life, state = self.policy.half_life, self._state
            state.uses += 1.0
            since = used(self._uses_since.pop(digest, Entry(digest, 0)), state.uses, half_life)
            if digest in state.entries:
                self._set(used(state.entries[digest], state.uses, half_life))
                self._uses_since[digest] = since
            else:
                entry = used(self._never_stored.pop(digest, Entry(digest, 0)), state.uses, half_life)
                self._never_stored[digest] = entry
                while len(self._never_stored) > self._max_remembered:
                    del self._never_stored[next(iter(self._never_stored))]
            self._changes += 1

    def add(self, digest: str, nbytes: int, cost: float, parent: str | None = None) -> None:
        """Add a value that was computed, at `cost` per token, and stored. parent: of a tree node.

        A value that was never requested counts as used once; otherwise new documents would be evicted before any value
        that was requested once, however long ago.
        """
        with self._lock:
            found = self._state.entries.get(digest)
            if found is None:
                requested = self._never_stored.pop(digest, Entry(digest, 0))
                found = requested if self.policy.decays else Entry(digest, 0)
            entry = computed(found._replace(nbytes=nbytes), cost)
            self._insert(entry if entry.frequency else self._used_once(entry), parent)
            self._added.add(digest)
            self._deleted.discard(digest)
            self._changes += 1

    def evict(self, victims: Collection[Entry]) -> None:
        """Record an eviction: the clock advances, and the counts are kept if they decay."""
        with self._lock:
            for victim in victims:
                if self.policy.decays:
                    self._set(victim._replace(nbytes=0))
                else:
                    self._forget(victim.digest)
            self._state.clock = clock_after(self._state.clock, victims)
            self._changes += len(victims)

    def forget(self, digests: Iterable[str]) -> None:
        """Record a deletion: the counts are deleted too."""
        with self._lock:
            for digest in digests:
                self._forget(digest)
                self._never_stored.pop(digest, None)
                self._uses_since.pop(digest, None)
                self._added.discard(digest)
                self._deleted.add(digest)
                self._changes += 1

    def keep_only(self, wanted: Collection[str]) -> None:
        """Forget all values except these."""
        with self._lock:
            self.forget(
                [digest for digest in (*self._state.entries, *self._never_stored) if digest not in wanted]
            )

    # --- synchronising with the index

    def load(self, packed: bytes, rows: Mapping[str, Row]) -> bool:
        """Load a save. rows: the stored values. Returns whether it was saved with another policy."""
        with self._lock:
            self._state = _State.unpack(packed)
            saved_policy = self._state.policy
            self.policy = self._requested_policy or EVICTION_POLICIES.get(saved_policy, self.policy)
            if self.policy.name != saved_policy:
                self._rank_all()
            self._sync(rows)
            return bool(saved_policy) and self.policy.name != saved_policy

    @property
    def serial(self) -> int:
        """The number of the last save that this ledger includes."""
        return self._state.serial

    def refresh(self, packed: bytes, rows: Mapping[str, Row]) -> None:
        """Include other processes' changes.

        packed: a save by another process that is newer than the last one that this ledger includes, empty if there is
        none; rows: the stored values.
        """
        with self._lock:
            if packed:
                self._merge(_State.unpack(packed), rows)
            else:
                self._sync(rows)

    def _sync(self, rows: Mapping[str, Row]) -> None:
        """Make the entries match the stored values, and rebuild children and heap. Evicted values may keep entries."""
        entries = self._state.entries
        for digest in [digest for digest, entry in entries.items() if entry.nbytes and digest not in rows]:
            # Deleting saves the ledger in the same transaction, so a value that is in the last save and has no row was
            # evicted. One that was added since then may have been deleted, so it must not be remembered.
            if self.policy.decays and digest not in self._added:
                entries[digest] = entries[digest]._replace(nbytes=0)
            else:
                self._forget(digest)
        for digest, row in rows.items():
            entry = entries.get(digest)
            if entry is None or not entry.nbytes:
                requested = self._never_stored.pop(digest, None) if self.policy.decays else None
                entry = entry or requested or self._used_once(Entry(digest, 0))
            if entry.nbytes != row.nbytes:
                entry = ranked(entry._replace(nbytes=row.nbytes), self.policy, self._state.clock)
            entries[digest] = entry
            if row.parent is not None:
                self._state.parents[digest] = row.parent
        self._children.clear()
        for digest, parent in self._state.parents.items():
            self._children[parent].add(digest)
        self._build_heap()

    # --- saving

    @property
    def has_changed(self) -> bool:
        """Whether there are unsaved changes."""
        return self._changes > 0 or any(each.unsaved != Counts() for each in self._counters.values())

    @property
    def is_due(self) -> bool:
        """Whether enough has changed for a save."""
        return self._changes >= max(SAVED_EVERY, len(self._state.entries) // SAVED_PART)

    def prepare_save(
        self, packed: bytes, rows: Callable[[], Mapping[str, Row]]
    ) -> tuple[bytes, Callable[[], None]]:
        """The bytes to save, merged with other processes' changes, and a function to call once they are saved.

        packed: as in `refresh`; rows: reads the stored values, called only if there is such a save.
        """
        with self._lock:
            if packed:
                self._merge(_State.unpack(packed), rows())
            self._trim()
            counted = {tier: each.unsaved for tier, each in self._counters.items()}
            state, totals = self._state, dict(self._state.totals)
            for tier, counts in counted.items():
                if counts != Counts():
                    totals[tier] = totals.get(tier, Counts()) + counts
            serial = state.serial + 1
            saved = _State(
                serial, self.policy.name, state.uses, state.clock, totals, state.entries, state.parents
            )
            changes, saved_uses = self._changes, dict(self._uses_since)

            def mark_saved() -> None:
                with self._lock:
                    state.serial, state.totals = serial, totals
                    for tier, counts in counted.items():
                        self._counters[tier].mark_saved(counts)
                    self._uses_since = {
                        digest: uses
                        for digest, uses in self._uses_since.items()
                        if saved_uses.get(digest) is not uses
                    }
                    self._added.clear()
                    self._deleted.clear()
                    self._changes -= changes

            return saved.pack(), mark_saved

    def _merge(self, theirs: _State, rows: Mapping[str, Row]) -> None:
        """Make another process's save the state, and apply this process's changes since the last save to it."""
        mine, old_policy = self._state, self.policy.name
        self.policy = EVICTION_POLICIES.get(theirs.policy, self.policy)
        half_life = self.policy.half_life
        for digest in self._never_stored.keys() & theirs.entries.keys():
            self._uses_since[digest] = self._never_stored.pop(digest)
        for digest in self._deleted - rows.keys():
            theirs.entries.pop(digest, None)
            theirs.parents.pop(digest, None)
        for digest, since in self._uses_since.items():
            if digest in theirs.entries:
                entry = joined(theirs.entries[digest], since, half_life)
                theirs.entries[digest] = ranked(entry, self.policy, theirs.clock)
        theirs.uses = max(mine.uses, theirs.uses)
        if self.policy.name == old_policy:
            theirs.clock = max(mine.clock, theirs.clock)
        for digest in self._added & mine.entries.keys():
            entry, their_entry = mine.entries[digest], theirs.entries.get(digest)
            if their_entry is None and digest not in rows:
                continue  # evicted here, and deleted by another process
            if their_entry is not None:  # it now has the uses of both
                entry = their_entry._replace(
                    nbytes=entry.nbytes, cost=entry.cost, computations=entry.computations
                )
            theirs.entries[digest] = ranked(entry, self.policy, theirs.clock)
            if digest in mine.parents:
                theirs.parents[digest] = mine.parents[digest]
        for digest, entry in mine.entries.items():
            if not entry.nbytes and digest in theirs.entries and digest not in rows:  # evicted here
                theirs.entries[digest] = theirs.entries[digest]._replace(nbytes=0)
        self._state = theirs
        self._sync(rows)

    def _trim(self) -> None:
        """Forget the least recently used values that are not stored, above the limit."""
        evicted = [entry for entry in self._state.entries.values() if not entry.nbytes]
        if len(evicted) > self._max_remembered:
            evicted.sort(key=lambda entry: (entry.used_at, entry.digest))
            for entry in evicted[: len(evicted) - self._max_remembered]:
                self._forget(entry.digest)

    # --- internals

    def _rank_all(self) -> None:
        """Rank all values by the current policy, in the order of use, from clock 0."""
        state = self._state
        state.clock = 0.0
        if not self.policy.decays:
            for digest in [digest for digest, entry in state.entries.items() if not entry.nbytes]:
                self._forget(digest)
        for entry in sorted(state.entries.values(), key=lambda entry: (entry.used_at, entry.digest)):
            state.entries[entry.digest] = ranked(entry, self.policy, state.clock)
            state.uses = max(state.uses, entry.used_at)

    def _used_once(self, entry: Entry) -> Entry:
        self._state.uses += 1.0
        return entry._replace(used_at=self._state.uses, frequency=1.0)

    def _insert(self, entry: Entry, parent: str | None) -> None:
        if parent is not None:
            self._state.parents[entry.digest] = parent
            self._children[parent].add(entry.digest)
        self._set(entry)

    def _set(self, entry: Entry) -> None:
        self._state.entries[entry.digest] = ranked(entry, self.policy, self._state.clock)
        self._push(entry.digest)

    def _push(self, digest: str) -> None:
        if self._is_stored(digest):
            entry = self._state.entries[digest]
            heapq.heappush(self._heap, (entry.priority, entry.used_at, digest))
        if len(self._heap) > 2 * len(self._state.entries) + SAVED_EVERY:
            self._build_heap()

    def _build_heap(self) -> None:
        """Build the heap from the stored entries, without outdated items."""
        stored = (entry for entry in self._state.entries.values() if entry.nbytes)
        self._heap = [(entry.priority, entry.used_at, entry.digest) for entry in stored]
        heapq.heapify(self._heap)

    def _forget(self, digest: str) -> None:
        self._state.entries.pop(digest, None)
        if parent := self._state.parents.pop(digest, None):
            self._children[parent].discard(digest)
            if not self._children[parent]:
                del self._children[parent]


def _totals(packed: bytes) -> dict[str, Counts]:
    """The counts in a save by tier name; none if it is empty or unreadable."""
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
