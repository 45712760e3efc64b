"""Run by test_processes.py: forks children that put or read, so that torch is imported once for all of them.

`put ROOT BUDGET SEED STEP`: puts twelve values. STEP 0: until it is done or killed from outside; STEP n: it kills
itself at its n-th system call of those that change the disk. Says `pid N`, `ack NUMBER`..., `done`.
`read ROOT STOP`: reads eight values round and round until the file STOP is there. Says `open`, then
`HITS WRONG QUARANTINED`. After either comes `dead`.
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from conftest import make_sample, same_kv

from ragblend.kvstore.store import KVStore


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def die_at(step: int) -> None:
    """Before and after each call are steps of their own."""
    taken = 0

    def count() -> None:
        nonlocal taken
        taken += 1
        if taken == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(name):
        real = getattr(os, name)

        def call(*args, **more):
            count()
            result = real(*args, **more)
            count()
            return result

        setattr(os, name, call)

    for name in ("open", "posix_fallocate", "write", "fsync", "rename", "unlink"):
        wrap(name)


def put(root: str, budget: str, seed: str, step: str) -> None:
    write = os.write
    say("pid", os.getpid())
    store = KVStore.open(Path(root), int(budget))
    die_at(int(step))
    for number in range(int(seed), int(seed) + 12):
        key, chunk = make_sample(number % 16, 30)
        store.put(key, chunk)
        write(1, f"ack {number % 16}\n".encode())
    store.close()
    write(1, b"done\n")


def read(root: str, stop: str) -> None:
    hits = wrong = 0
    samples = [make_sample(seed, 20) for seed in range(8)]
    with KVStore.open(Path(root), 1 << 30) as store:
        say("open")
        while not Path(stop).exists() and Path(root).exists():  # whoever asked may have been killed
            for key, chunk in samples:
                found = store.get(key, chunk.token_ids)
                hits += found is not None
                wrong += found is not None and not same_kv(found, chunk)
        say(hits, wrong, store.stats().quarantined)


for line in sys.stdin:
    what, *arguments = line.split()
    pid = os.fork()
    if pid == 0:
        try:
            {"put": put, "read": read}[what](*arguments)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    say("dead")
