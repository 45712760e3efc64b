"""What a store must hold after a sequence of operations, exactly: the oracle of everything that is killed.

Stores are opened with the policy whose order is plain, by last use; tests/kvstore/test_ledger.py has the others.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fault_values import VALUE_BYTES, demand, key_of, put, version_read

from ragblend.kvstore.store import KVStore

NUMBERS = 10


@dataclass(frozen=True)
class Operation:
    """One change: put (number, version), delete (number), or gc (keep: the numbers, None for all)."""

    kind: str
    number: int = 0
    version: int = 0
    keep: frozenset[int] | None = None

    def on(self, store: KVStore) -> None:
        if self.kind == "put":
            put(store, self.number, self.version)
        elif self.kind == "delete":
            store.delete([key_of(self.number)])
        else:
            store.gc(None if self.keep is None else [key_of(number) for number in self.keep])


def operations(seed: int) -> Iterator[Operation]:
    """An endless seeded sequence; no version occurs twice in sequences of different seeds."""
    seeded, version = random.Random(seed), seed * 10_000
    while True:
        version += 1
        dice, number = seeded.random(), seeded.randrange(NUMBERS)
        if dice < 0.65:
            yield Operation("put", number, version)
        elif dice < 0.82:
            yield Operation("delete", number)
        elif dice < 0.92:
            yield Operation("gc", keep=frozenset(seeded.sample(range(NUMBERS), 8)))
        else:
            yield Operation("gc")


@dataclass
class Model:
    """Values by number, the longest unused first, and how many of them the budget holds."""

    capacity: int
    held: dict[int, int] = field(default_factory=dict)

    @property
    def budget_bytes(self) -> int:
        return self.capacity * VALUE_BYTES + VALUE_BYTES // 2

    def after(self, operation: Operation) -> dict[int, int]:
        """What is held once `operation` is done."""
        held = dict(self.held)
        if operation.kind == "put":
            held[operation.number] = operation.version  # replaced it keeps its place: nobody has asked for it
            others = [number for number in held if number != operation.number]
            for oldest in others[: max(0, len(held) - self.capacity)]:
                del held[oldest]
        elif operation.kind == "delete":
            held.pop(operation.number, None)
        elif operation.keep is not None:
            held = {number: version for number, version in held.items() if number in operation.keep}
        return held

    def verify(self, root: Path, pending: Operation | None = None, damaged: bool = False) -> None:
        """Reopen; each value is as before or as after `pending`, nothing is wrong or left over. Adopts it."""
        after = self.held if pending is None else self.after(pending)
        with KVStore.open(root, self.budget_bytes, policy="lru") as store:
            problems = store.check()
            demand(problems == [], "check() after reopening:", problems)
            found = self._found(store, after)
            stats = store.stats()
            removing = damaged or (pending is not None and pending.kind != "put")
            demand(removing or stats.quarantined == 0, "a kill is not damage:", stats)
            demand(stats.entries == len(found), "rows that no value answers for:", stats, found)
            demand(stats.bytes <= self.budget_bytes + VALUE_BYTES, "over the budget:", stats)
            store.gc()
            no_leftovers(root, len(found))
        self.held = found

    def _found(self, store: KVStore, after: dict[int, int]) -> dict[int, int]:
        """Reading is use: oldest first, so that the order stays as it is."""
        order = [number for number in self.held if after.get(number) == self.held[number]]
        changed = [number for number in self.held if number not in order]
        new = [number for number in after if number not in order and number not in changed]
        found = {}
        for number in [*changed, *order, *new]:
            version = version_read(store, number, {self.held.get(number), after.get(number)})
            if version is not None:
                found[number] = version
        for number in set(range(NUMBERS)) - set(self.held) - set(after):
            version_read(store, number, {None})
        return found


def no_leftovers(root: Path, values: int) -> None:
    """After gc: one file a value, no temporary ones, an empty quarantine."""
    files = sorted(path.name for path in (root / "values").glob("*/*"))
    demand(len(files) == values, f"{values} values, but the files", files)
    demand(not any(name.endswith(".tmp") for name in files), "temporary files:", files)
    demand(not list((root / "quarantine").iterdir()), "the quarantine is not empty after gc")
