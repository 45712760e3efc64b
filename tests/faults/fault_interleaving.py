"""Scenario: readers in the middle of a read while the writer evicts, deletes and replaces, with seeded switches.

One thread runs at a time. At each scheduling point (a call of os, the writer's lock) the running thread hands over to
one that the seed chooses, so a round is one interleaving, the same each time.
"""

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_mutations import broken
from fault_values import VALUE_BYTES, demand, key_of, put, same, token_ids, value

from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.store import KVStore

POINTS = (
    "open",
    "preadv",
    "fstat",
    "write",
    "replace",
    "unlink",
    "fsync",
    "close",
    "posix_fallocate",
)
CAPACITY, NUMBERS = 3, 4
_HANGS_S = 60.0


class Schedule:
    """Who runs: exactly one of the threads that take part, chosen anew at each point."""

    def __init__(self) -> None:
        self.random = random.Random()
        self.switches = 0
        self._turn = threading.Condition()
        self._live: list[int] = []
        self._running: int | None = None
        self._holder: int | None = None  # who has the writer's lock
        self._waiting: set[int] = set()  # for the lock

    def run(self, seed: int, works: list[Callable[[], None]]) -> None:
        """All of `works` to their ends, in one interleaving; OracleError if that takes for ever."""
        self.random.seed(seed)
        failures: list[BaseException] = []
        threads = [
            threading.Thread(target=self._take_part, args=(work, failures), daemon=True) for work in works
        ]
        with self._turn:
            for thread in threads:
                thread.start()
            demand(
                self._turn.wait_for(lambda: len(self._live) == len(works), _HANGS_S), "threads do not start"
            )
            self._live.sort(key=[thread.ident for thread in threads].index)
            self._choose()
        for thread in threads:
            thread.join(_HANGS_S)
            demand(not thread.is_alive(), "a deadlock in interleaving", seed)
        if failures:
            raise failures[0]

    def _take_part(self, work: Callable[[], None], failures: list[BaseException]) -> None:
        me = threading.get_ident()
        with self._turn:
            self._live.append(me)
            self._turn.notify_all()
            self._turn.wait_for(lambda: self._running == me)
        try:
            work()
        except BaseException as error:
            failures.append(error)
        with self._turn:
            self._live.remove(me)
            self._choose()

    def _choose(self) -> None:
        able = [one for one in self._live if one not in self._waiting or self._holder in (None, one)]
        self._running = self.random.choice(able) if able else None
        self._turn.notify_all()

    def point(self) -> None:
        """Hand over; returns when it is this thread's turn again."""
        me = threading.get_ident()
        with self._turn:
            if me in self._live:
                self.switches += 1
                self._choose()
                self._turn.wait_for(lambda: self._running == me)

    @contextmanager
    def holding(self, hold: Any) -> Iterator[None]:
        """The writer's lock, which only one thread wants at a time that may run."""
        me = threading.get_ident()
        if me not in self._live or self._holder == me:
            with hold:
                yield
            return
        with self._turn:
            self._waiting.add(me)
        self.point()
        with self._turn:
            self._waiting.remove(me)
            self._holder = me
        try:
            with hold:
                yield
        finally:
            with self._turn:
                self._holder = None
            self.point()


@contextmanager
def scheduled(schedule: Schedule) -> Iterator[None]:
    """A scheduling point before each call in POINTS and around the writer's lock."""
    before = {name: getattr(os, name) for name in POINTS}
    hold = WriterLock.hold

    def announced(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            schedule.point()
            return None if name == "fsync" else before[name](*arguments, **named)

        return call

    try:
        for name in POINTS:
            setattr(os, name, announced(name))
        WriterLock.hold = lambda lock, timeout_s=None: schedule.holding(hold(lock, timeout_s))
        yield
    finally:
        WriterLock.hold = hold
        for name, function in before.items():
            setattr(os, name, function)


class Round:
    """One interleaving, and what may be there under each number at this moment, None for absent."""

    def __init__(self, store: KVStore, held: dict[int, int], number: int) -> None:
        self.store, self.held, self.number = store, held, number
        self.random = random.Random(number)
        self.now: dict[int, set[int | None]] = {one: {held.get(one)} for one in range(NUMBERS)}
        self.reads: list[tuple[int, set[int | None]]] = []  # under way: what was there at some moment of them

    def _may_be(self, number: int, *states: int | None) -> None:
        self.now[number] = set(states)
        for reading, seen in self.reads:
            if reading == number:
                seen.update(states)

    def write(self) -> None:
        """Three changes; what each may leave is noted before it begins, evictions too."""
        for step in range(3):
            number, version = self.random.randrange(NUMBERS), self.number * 3 + step + 1
            if self.random.random() < 0.2:
                self._may_be(number, self.held.pop(number, None), None)
                self.store.delete([key_of(number)])
            else:
                self._put(number, version)
            for one in range(NUMBERS):
                self._may_be(one, self.held.get(one))

    def _put(self, number: int, version: int) -> None:
        after = {one: old for one, old in self.held.items() if one != number} | {number: version}
        for one in after:
            # Which one is evicted depends on what the readers have used.
            gone = [None] if len(after) > CAPACITY and one != number else []
            self._may_be(one, self.held.get(one), after[one], *gone)
        put(self.store, number, version)
        present = {key.digest for key in list(self.store.keys())}
        self.held.clear()
        self.held.update({one: old for one, old in after.items() if key_of(one).digest in present})

    def read(self) -> None:
        for number in self.random.sample(range(NUMBERS), 2):
            seen = set(self.now[number])
            self.reads.append((number, seen))
            found = self.store.get(key_of(number), token_ids(number))
            if found is None:
                demand(None in seen, "acknowledged value", number, "is lost; permitted:", seen)
            else:
                served = any(one is not None and same(found, value(number, one)) for one in seen)
                demand(served, "a wrong value was served for", number, "permitted:", seen)


def interleave(folder: str, rounds: int, seed: int, mutation: str | None = None) -> dict[str, int]:
    """Two readers and a writer, `rounds` times, each another interleaving."""
    schedule, held = Schedule(), {}
    budget = CAPACITY * VALUE_BYTES
    with KVStore.open(Path(folder), budget) as store, broken(mutation), scheduled(schedule):
        for number in range(seed * 1_000_000, seed * 1_000_000 + rounds):
            one = Round(store, held, number)
            schedule.run(number, [one.write, one.read, one.read])
        stats = store.stats()
        demand(stats.quarantined == 0, "nothing here is damaged:", stats)
        demand(stats.bytes <= budget, "over the budget:", stats)
        problems = store.check()
        demand(problems == [], "check():", problems)
    counts = {"hits": stats.hits, "misses": stats.misses, "evicted": stats.evictions}
    return counts | {"switches": schedule.switches}
