"""Scenarios: eight processes at once, of which some are killed; and many that open a new store together."""

import json
import os
import random
import select
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import NoReturn

from fault_model import no_leftovers
from fault_values import VALUE_BYTES, demand, key_of, put, version_read

from ragblend.kvstore.store import KVStore

UNLIMITED, TIGHT = 1 << 30, 6 * VALUE_BYTES
SHARED = range(100, 116)  # in the tight store; put by everyone, always the same bits
OWN = 6  # numbers of each worker in the roomy store
_HANGS_S = 120.0
_LINE_BYTES = 64


def _worker(folder: Path, name: int, life: int, to: int) -> NoReturn:
    """Own values in the roomy store, each change announced and acknowledged; everybody's in the tight one."""
    seeded, said = random.Random(f"{name}/{life}"), ""
    try:
        roomy, tight = KVStore.open(folder / "roomy", UNLIMITED), KVStore.open(folder / "tight", TIGHT)
        for step in count(1):
            number = name * OWN + seeded.randrange(OWN)
            version = life * 1_000_000 + step if seeded.random() < 0.7 else None
            os.write(to, json.dumps(["begin", number, version]).encode().ljust(_LINE_BYTES))
            if version is None:
                roomy.delete([key_of(number)])
            else:
                put(roomy, number, version)
            os.write(to, json.dumps(["done", number, version]).encode().ljust(_LINE_BYTES))
            version_read(roomy, number, {version})
            _share(tight, seeded)
    except BaseException as error:
        said = repr(error)
    os.write(to, json.dumps(["failed", said[:40], 0]).encode().ljust(_LINE_BYTES))
    os._exit(1)


def _share(tight: KVStore, seeded: random.Random) -> None:
    number = seeded.choice(SHARED)
    if seeded.random() < 0.3:
        put(tight, number)
    elif seeded.random() < 0.1:
        tight.delete([key_of(number)])
    version_read(tight, number, {0, None})


class Worker:
    """One of the eight; `held` is what it has acknowledged, `pending` what it had begun."""

    def __init__(self, folder: Path, name: int) -> None:
        self.folder, self.name, self.life, self.done = folder, name, 0, 0
        self.held: dict[int, int | None] = dict.fromkeys(range(name * OWN, (name + 1) * OWN))
        self.pending: tuple[int, int | None] | None = None
        self.start()

    def start(self) -> None:
        self.life += 1
        self.reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _worker(self.folder, self.name, self.life, writing)
        os.close(writing)
        self.heard_at = time.monotonic()

    def listen(self) -> None:
        """One message, or the end."""
        line = os.read(self.reading, _LINE_BYTES)
        if not line:
            return
        self.heard_at = time.monotonic()
        what, number, version = json.loads(line)
        demand(what != "failed", "a worker failed:", number)
        self.pending = (number, version) if what == "begin" else None
        if what == "done":
            self.held[number] = version
            self.done += 1

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        while select.select([self.reading], [], [], 0)[0]:
            before = self.heard_at
            self.listen()
            if self.heard_at == before:
                break
        os.close(self.reading)

    def verify(self, store: KVStore) -> int:
        """What it acknowledged is there; what it had begun may be. How many values are there."""
        for number, version in self.held.items():
            permitted = {version} | (
                {self.pending[1]} if self.pending and self.pending[0] == number else set()
            )
            self.held[number] = version_read(store, number, permitted)
        self.pending = None
        return sum(version is not None for version in self.held.values())


def run_and_kill(folder: str, seconds: float, every_s: float, workers: int, seed: int) -> dict[str, int]:
    """`workers` for so long, one killed each `every_s` and started again; all verified in the end."""
    here, seeded, kills = Path(folder), random.Random(seed), 0
    here.mkdir(parents=True)
    crew = [Worker(here, name) for name in range(workers)]
    began = time.monotonic()
    try:
        while time.monotonic() - began < seconds:
            due = time.monotonic() + every_s
            while time.monotonic() < due:
                _listen_to(crew)
            victim = seeded.choice(crew)
            victim.kill()
            kills += 1
            with KVStore.open(here / "roomy", UNLIMITED) as store:
                victim.verify(store)
            victim.start()
    finally:
        for each in crew:
            each.kill()
    return {"killed": kills, "acknowledged": sum(each.done for each in crew), "held": _verify(here, crew)}


def _listen_to(crew: list[Worker]) -> None:
    ready = select.select([each.reading for each in crew], [], [], 0.1)[0]
    for each in crew:
        if each.reading in ready:
            each.listen()
        demand(time.monotonic() - each.heard_at < _HANGS_S, "a worker hangs:", each.name)


def _verify(here: Path, crew: list[Worker]) -> int:
    """A delete that was killed between the file and the row leaves a row to refuse, which is counted."""
    deleting = sum(each.pending is not None and each.pending[1] is None for each in crew)
    with KVStore.open(here / "roomy", UNLIMITED) as store:
        held = sum(each.verify(store) for each in crew)
        _sound(store, held, deleting)
    with KVStore.open(here / "tight", TIGHT) as store:
        found = sum(version_read(store, number, {0, None}) is not None for number in SHARED)
        demand(store.stats().bytes <= TIGHT + VALUE_BYTES, "over the budget:", store.stats())
        _sound(store, found, len(crew))
    return held


def _sound(store: KVStore, values: int, refused: int = 0) -> None:
    problems = store.check()
    demand(problems == [], "check() after reopening:", problems)
    demand(store.stats().quarantined <= refused, "a kill is not damage:", store.stats())
    store.gc()
    no_leftovers(store.root, values)


def open_together(folder: str, races: int, processes: int, seed: int) -> dict[str, int]:
    """Many processes open a store that is not there yet, and put one value each; all of them can."""
    seeded = random.Random(seed)
    for race in range(races):
        root = Path(folder) / str(race) / "home" / "kv"
        delays = [seeded.choice([0.0, seeded.uniform(0, 0.03)]) for _ in range(processes)]
        start = time.monotonic() + 0.02
        pids = [
            _fork(lambda at=start + delay, n=number, here=root: _open_at(here, at, n))
            for number, delay in enumerate(delays)
        ]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        demand(set(statuses) == {0}, "processes that could not open a new store:", statuses)
        with KVStore.open(root, UNLIMITED) as store:
            for number in range(processes):
                version_read(store, number, {0})
            _sound(store, processes)
    return {"races": races}


def _open_at(root: Path, at: float, number: int) -> None:
    time.sleep(max(0.0, at - time.monotonic()))
    with KVStore.open(root, UNLIMITED) as store:
        put(store, number)
        version_read(store, number, {0})


def _fork(child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        except BaseException as error:
            os.write(2, f"{error!r}\n".encode())
        finally:
            os._exit(status)
    return pid
