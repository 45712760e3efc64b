"""Scenario: a child changes a store and is killed at a random moment; what it acknowledged must be there."""

import os
import random
import select
import signal
import time
from itertools import islice
from pathlib import Path
from typing import NoReturn

from fault_model import Model, operations
from fault_values import demand

from ragblend.kvstore.store import KVStore

_AT_MOST = 400  # operations a child could do before it is killed
_HANGS_S = 60.0


def _work(root: Path, budget_bytes: int, seed: int, acknowledge: int) -> NoReturn:
    try:
        store = KVStore.open(root, budget_bytes, policy="lru")
        os.write(acknowledge, b"open\n")
        for operation in islice(operations(seed), _AT_MOST):
            operation.on(store)
            os.write(acknowledge, b"done\n")
    except BaseException as error:
        os.write(acknowledge, f"failed {error!r}\n".encode())
    os._exit(0)


def _kill_one(root: Path, budget_bytes: int, seed: int) -> int:
    """One child's life; how many operations it acknowledged (-1: it was killed before it had opened)."""
    seeded, (reading, writing) = random.Random(seed), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _work(root, budget_bytes, seed, writing)
    os.close(writing)
    said, wanted = b"", seeded.randrange(8)
    while said.count(b"\n") < wanted:
        demand(select.select([reading], [], [], _HANGS_S)[0], "a child hangs after", said)
        said += os.read(reading, 4096)
    time.sleep(seeded.uniform(0, 0.02))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while more := os.read(reading, 4096):
        said += more
    os.close(reading)
    demand(b"failed" not in said, "a child failed:", said.decode())
    return said.count(b"\n") - 1


def kill(root: str, kills: int, seed: int) -> dict[str, int]:
    """`kills` children in a row on one store, verified after each."""
    model, totals = Model(capacity=6), {"killed": 0, "acknowledged": 0, "held": 0}
    for number in range(kills):
        own = seed * 100_000 + number
        acknowledged = _kill_one(Path(root), model.budget_bytes, own)
        sequence = operations(own)
        for operation in islice(sequence, max(0, acknowledged)):
            model.held = model.after(operation)
        model.verify(Path(root), next(sequence) if acknowledged >= 0 else None)
        totals["killed"] += 1
        totals["acknowledged"] += max(0, acknowledged)
        totals["held"] += len(model.held)
    return totals
