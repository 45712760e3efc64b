"""`bench store --overhead N`: what the store's bookkeeping costs a request when it knows N chunks.

Run in a process of its own, which has done nothing before: opening both indices, looking six chunks up, and admitting
six new ones, each of which evicts another. What is not bookkeeping is left out of admission: no KV is packed, summed
up or written, and no victim's file is unlinked; the lock, the new row, the counts of uses, the choice of a victim, the
removal of its row and the commit are in it, six times.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ragblend.app.bench.memory import HostMeter
from ragblend.app.bench.progress import progress_bar
from ragblend.kvstore.errors import RagBlendError

Row = dict[str, Any]
Spent = tuple[float, float]  # ms by the clock, and of processor time
CHUNKS_A_REQUEST = 6
REQUESTS = 500
OPENINGS = 5
TARGETS = {
    "lookup_ms": 1.0,
    "node_lookup_ms": 1.0,
    "admission_ms": 1.0,
    "index_mb": 100.0,
    "open_ms": 1000.0,
    "open_nodes_ms": 1000.0,
}


def report_overhead(chunks: int, folder: Path | None = None) -> Row:
    """Make a store of `chunks` chunks in a temporary folder, below `folder` if given, and measure it.

    Milliseconds: median and 99th percentile by the clock, and the median of processor time, which says more on a busy
    machine; a request is six chunks. Raises RagBlendError.
    """
    from ragblend.app.bench.store_large import make_large_home

    with tempfile.TemporaryDirectory(prefix="ragblend-bench-", dir=folder) as home:
        with progress_bar("making chunks") as progress:
            make_large_home(Path(home), chunks, progress)
        os.sync()  # what was just written would else be written back while the clock runs
        command = [sys.executable, "-m", "ragblend.app.bench.store_overhead", home, str(chunks)]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RagBlendError(f"measuring a store of {chunks} chunks: the child process failed: {last}")
        row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(home: Path, chunks: int) -> Row:
    """All of it, in this process."""
    from ragblend.app.bench.store_large import key_of, token_ids_of
    from ragblend.kvstore.nodes import NodeIndex
    from ragblend.kvstore.store import KVStore

    budget_bytes = _bytes_of(home / "kv")
    KVStore.open(home / "kv", budget_bytes).close()  # whatever is imported or computed at first use
    # Before any admission: what is admitted here has no files, and an opening would stop to remove the rows.
    openings = _openings(lambda: KVStore.open(home / "kv", budget_bytes))
    node_openings = _openings(lambda: NodeIndex.open(home / "nodes.sqlite"))
    meter, seeded = HostMeter(), random.Random(1)
    store, nodes = KVStore.open(home / "kv", budget_bytes), NodeIndex.open(home / "nodes.sqlite")
    wanted = [seeded.sample(range(chunks), CHUNKS_A_REQUEST) for _ in range(REQUESTS)]
    lookups, node_lookups, admissions = [], [], []
    for numbers in wanted:
        asked = [(key_of(number), token_ids_of(number)) for number in numbers]
        lookups.append(_timed(partial(_look_up, store, asked)))
        node_lookups.append(_timed(partial(_look_nodes_up, nodes, numbers)))
    for request in range(REQUESTS):
        first = chunks + CHUNKS_A_REQUEST * request
        new = list(map(_new_chunk, range(first, first + CHUNKS_A_REQUEST)))
        with _nothing_written(new):
            admissions.append(_timed(partial(_admit, store, new)))
    index_bytes, entries, evicted = meter.peak_bytes(), store.stats().entries, store.stats().evictions
    store.close()
    nodes.close()
    return {
        "chunks": chunks,
        "entries": entries,
        "evicted": evicted,
        "requests": REQUESTS,
        "lookup_ms": _summary(lookups),
        "node_lookup_ms": _summary(node_lookups),
        "admission_ms": _summary(admissions),
        "index_mb": None if index_bytes is None else round(index_bytes / 1e6, 1),
        "open_ms": _summary(openings),
        "open_nodes_ms": _summary(node_openings),
    }


def _bytes_of(root: Path) -> int:
    from ragblend.kvstore.store import KVStore

    with KVStore.open(root, 1 << 60) as store:
        return store.stats().bytes


def _look_up(store: Any, asked: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
    for key, token_ids in asked:
        store.open_chunk(key, token_ids).close()


def _look_nodes_up(nodes: Any, numbers: Sequence[int]) -> None:
    from ragblend.app.bench.store_large import SCOPE

    for number in numbers:
        assert nodes.get(SCOPE, f"node-{number}") is not None


def _admit(store: Any, new: Sequence[tuple[Any, Any]]) -> None:
    for key, chunk in new:
        store.put(key, chunk)


def _new_chunk(number: int) -> tuple[Any, Any]:
    import torch

    from ragblend.app.bench.store_large import SHAPE, TOKENS, key_of, token_ids_of
    from ragblend.kvstore.chunks import ChunkKV

    tensor = torch.zeros(SHAPE.kv_heads, TOKENS, SHAPE.key_size)
    return key_of(number), ChunkKV(token_ids_of(number), 32, SHAPE, [tensor], [tensor])


@contextmanager
def _nothing_written(new: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """No KV is packed or written and no file removed meanwhile; (key, chunk) of `new` are packed beforehand."""
    from ragblend.kvstore.blob import Blob
    from ragblend.kvstore.disk import VALUES_FOLDER, BlobDisk

    packed = {key: Blob.of(key, chunk) for key, chunk in new}
    names = {key: f"{VALUES_FOLDER}/{key.digest[:2]}/{key.digest}-{0:016x}.kv" for key in packed}

    def store(self: object, blob: Blob, *args: object, **kwargs: object) -> tuple[object, object, str]:
        return None, None, names[blob.header.key]

    with ExitStack() as patched:
        for owner, name, instead in (
            (Blob, "of", staticmethod(lambda key, chunk, codec: packed[key])),
            (BlobDisk, "store", store),
            (BlobDisk, "remove", lambda self, path: None),
        ):
            patched.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, instead)
        yield


def _openings(open_one: Callable[[], Any]) -> list[Spent]:
    times = []
    for _ in range(OPENINGS):
        opened: list[Any] = []
        times.append(_timed(lambda into=opened: into.append(open_one())))  # type: ignore[misc]
        opened[0].close()
    return times


def _timed(work: Callable[[], object]) -> Spent:
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - processor) * 1e3


def _summary(times: list[Spent]) -> Row:
    wall, processor = (sorted(column) for column in zip(*times, strict=True))
    last = wall[min(len(wall) - 1, round(0.99 * len(wall)))]
    found = {"median": statistics.median(wall), "p99": last, "processor": statistics.median(processor)}
    return {name: round(value, 3) for name, value in found.items()}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
