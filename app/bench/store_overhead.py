"""`bench store --overhead N`: what the store's bookkeeping costs a request when it knows N chunks.

Run in a process of its own, which has done nothing before: opening both indices, looking six chunks up, and admitting
six new ones, each of which evicts another. What is not bookkeeping is left out of admission: no KV is written, and no
victim's file is unlinked; the new row, the counts of uses and the choice and removal of the victim's row are in it.
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
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ragblend.app.bench.memory import HostMeter
from ragblend.app.bench.progress import progress_bar
from ragblend.kvstore.errors import RagBlendError

Row = dict[str, Any]
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

    Milliseconds are (median, 99th percentile); a request is six chunks. Raises RagBlendError.
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
    meter, seeded = HostMeter(), random.Random(1)
    store, nodes = KVStore.open(home / "kv", budget_bytes), NodeIndex.open(home / "nodes.sqlite")
    wanted = [seeded.sample(range(chunks), CHUNKS_A_REQUEST) for _ in range(REQUESTS)]
    lookups, node_lookups, admissions = [], [], []
    for numbers in wanted:
        asked = [(key_of(number), token_ids_of(number)) for number in numbers]
        lookups.append(_ms(partial(_look_up, store, asked)))
        node_lookups.append(_ms(partial(_look_nodes_up, nodes, numbers)))
    with _nothing_written():
        for request in range(REQUESTS):
            first = chunks + CHUNKS_A_REQUEST * request
            admissions.append(
                _ms(partial(_admit, store, list(map(_new_chunk, range(first, first + CHUNKS_A_REQUEST)))))
            )
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
        "open_ms": _summary(_openings(lambda: KVStore.open(home / "kv", budget_bytes))),
        "open_nodes_ms": _summary(_openings(lambda: NodeIndex.open(home / "nodes.sqlite"))),
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
def _nothing_written() -> Iterator[None]:
    """No KV is written and no file removed meanwhile."""
    from ragblend.kvstore import disk

    write, remove = vars(disk)["write_durably"], disk.BlobDisk.remove
    setattr(disk, "write_durably", lambda path, pieces, nbytes: None)  # noqa: B010
    setattr(disk.BlobDisk, "remove", lambda self, path: None)  # noqa: B010
    try:
        yield
    finally:
        setattr(disk, "write_durably", write)  # noqa: B010
        setattr(disk.BlobDisk, "remove", remove)  # noqa: B010


def _openings(open_one: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(OPENINGS):
        start = time.perf_counter()
        opened = open_one()
        times.append((time.perf_counter() - start) * 1e3)
        opened.close()
    return times


def _ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def _summary(times: list[float]) -> Row:
    ordered = sorted(times)
    last = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return {"median": round(statistics.median(times), 3), "p99": round(last, 3)}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
