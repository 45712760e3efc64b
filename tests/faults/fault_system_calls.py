"""Scenarios: one operation is killed, or fails, at each of its system calls."""

import errno
import json
import os
import shutil
import traceback
from pathlib import Path
from typing import Any

from fault_model import Model, Operation
from fault_tracing import CHANGING, KILL, NAMES, NEEDS_ROOM, Decide, begin, end, trace
from fault_tracing import unavailable as unavailable
from fault_values import demand, put, version_read

from ragblend.kvstore.errors import StoreError
from ragblend.kvstore.store import KVStore

CAPACITY = 3
OPERATIONS = {
    "put": Operation("put", 7, 1),
    "replace": Operation("put", 1, 1),
    "delete": Operation("delete", 1),
    "gc": Operation("gc", keep=frozenset({0, 2})),
}
_ENDLESS = 1 << 30
# Locks are not the disk's: a local file system does not fail an unlock, and SQLite has no way back from one.
ANSWERS = set(NAMES.values()) - {"fcntl", "flock"}
NEW = 9  # stored by the same process after the fault


class Case:
    """A store of three values, copied for each run, and one operation on it."""

    def __init__(self, folder: Path, operation: Operation | None, spoil_index: bool = False) -> None:
        self.folder, self.operation = folder, operation
        self.template, self.root = folder / "template", folder / "kv"
        self.model, self.damaged = Model(CAPACITY), spoil_index
        with KVStore.open(self.template, self.model.budget_bytes, policy="lru") as store:
            for number in range(CAPACITY):
                put(store, number)
                self.model.held[number] = 0
        if spoil_index:
            os.truncate(self.template / "index/cache.db", 5000)

    def restore(self) -> Model:
        shutil.rmtree(self.root, ignore_errors=True)
        if self.template.exists():
            shutil.copytree(self.template, self.root)
        return Model(CAPACITY, dict(self.model.held))

    def operate(self) -> None:
        """In the traced child; without an operation, opening the store is what is watched."""
        if self.operation is None:
            begin()
            store = KVStore.open(self.root, self.model.budget_bytes, policy="lru")
        else:
            store = KVStore.open(self.root, self.model.budget_bytes, policy="lru")
            version_read(store, 2, {0})  # a use that waits to be written
            begin()
            self.operation.on(store)
        end()
        store.close()


def _prepare(folder: str, what: str) -> Case:
    Path(folder).mkdir(parents=True)
    if what == "first open":
        case = Case(Path(folder), None)
        shutil.rmtree(case.template)
        case.model.held.clear()
        return case
    return Case(Path(folder), OPERATIONS.get(what), spoil_index=what == "open a ruined index")


def kill_at_every_call(folder: str, what: str, every: bool, stride: int = 1) -> dict[str, int]:
    """Kill before call 0, 1, 2, ... until the child comes to its end; every=False: only calls that change."""
    case = _prepare(folder, what)
    for number in range(0, _ENDLESS, stride):
        model = case.restore()
        decide = _kill_before(number, every)
        traced = trace(case.operate, decide)
        demand(traced.killed or traced.status == 0, "the child failed:", traced)
        model.verify(case.root, case.operation, case.damaged)
        if not traced.killed:
            demand(model.held == case.model.after(case.operation or Operation("gc")), "undone", model.held)
            return {"killed": -(-number // stride), "calls": len(traced.calls)}
    raise AssertionError


def _kill_before(number: int, every: bool) -> Decide:
    seen = 0

    def decide(_: int, name: str) -> str | None:
        nonlocal seen
        if not (every or name in CHANGING.values()):
            return None
        seen += 1
        return KILL if seen == number + 1 else None

    return decide


def fail_at_every_call(
    folder: str, what: str, code: int, lasting: bool, all_calls: bool, stride: int = 1
) -> dict[str, int]:
    """Fail call 0, 1, 2, ... with `code` (lasting: and all after it); ordinary life must go on afterwards."""
    case, totals = _prepare(folder, what), {"failed": 0, "refused": 0}
    for number in range(0, _ENDLESS, stride):
        model, (reading, writing) = case.restore(), os.pipe()
        traced = trace(
            lambda to=writing: _live_through(case, to), _fail_from(number, code, lasting, all_calls)
        )
        os.close(writing)
        said = json.loads(os.read(reading, 1 << 16) or "{}")
        os.close(reading)
        where = f"{errno.errorcode[code]} at call {number} of {what} (lasting: {lasting}): {said}"
        demand(traced.status == 0 and "broken" not in said, where)
        demand(_is_as_promised(case, code, said), "not as promised:", where)
        model.held = {int(number): version for number, version in said["held"].items()}
        model.held = model.after(Operation("put", NEW))
        model.verify(case.root, damaged=case.damaged)
        if not traced.changed:
            return totals
        totals["failed"] += 1
        totals["refused"] += said["refused"] is not None
    raise AssertionError


def _fail_from(number: int, code: int, lasting: bool, all_calls: bool) -> Decide:
    seen, subject = 0, NEEDS_ROOM if code == errno.ENOSPC else set(CHANGING.values())

    def decide(_: int, name: str) -> int | None:
        nonlocal seen
        if not (name in subject or (all_calls and code != errno.ENOSPC and name in ANSWERS)):
            return None
        seen += 1
        return code if seen == number + 1 or (lasting and seen > number) else None

    return decide


def _live_through(case: Case, to: int) -> None:
    """The child: the operation under the fault, then ordinary work without it; tells what it saw."""
    said: dict[str, Any] = {"refused": None}
    try:
        store = (
            None if case.operation is None else KVStore.open(case.root, case.model.budget_bytes, policy="lru")
        )
        if store is not None:
            version_read(store, 2, {0})
        begin()
        try:
            if store is None:
                store = KVStore.open(case.root, case.model.budget_bytes, policy="lru")
            else:
                case.operation.on(store)
        except StoreError as error:
            said["refused"] = f"{type(error).__name__}: {error}"
        finally:
            end()
        store = store or KVStore.open(case.root, case.model.budget_bytes, policy="lru")
        said |= _afterwards(store, case)
        store.close()
    except BaseException:
        said["broken"] = traceback.format_exc()
    os.write(to, json.dumps(said).encode())


def _afterwards(store: KVStore, case: Case) -> dict[str, Any]:
    """What is held after the fault, read in the order of use, and what check() says; then a put must work."""
    before, held = case.model.held, {}
    after = case.model.after(case.operation) if case.operation else before
    for number in {**before, **after}:
        either = {before.get(number), after.get(number)}
        version = version_read(store, number, either)
        if version is not None:
            held[number] = version
    kinds = sorted(problem.kind for problem in store.check())
    put(store, NEW)
    version_read(store, NEW, {0})
    return {"held": held, "check": kinds}


def _is_as_promised(case: Case, code: int, said: dict[str, Any]) -> bool:
    """Done is done; a refused put changed nothing. Only a disk that cannot unlink may keep leftovers."""
    operation, held = case.operation, {int(number): version for number, version in said["held"].items()}
    leftovers = {"orphan-file", "temporary-file"} if code == errno.EIO else set()
    if not set(said["check"]) <= leftovers:
        return False
    if operation is None or operation.kind == "gc":
        return True
    own, refused = held.get(operation.number), said["refused"]
    # SQLite calls a full disk an input/output error, unless it was write() that said so.
    full = code == errno.ENOSPC and operation.kind == "put" and refused
    if full and not refused.startswith(("StoreFullError", "StoreError: using")):
        return False
    if refused is None:
        return own == case.model.after(operation).get(operation.number)
    return operation.kind != "put" or own == case.model.held.get(operation.number)
