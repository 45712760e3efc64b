"""Measures the store's bookkeeping per request when it has N chunks.

python -m benchmarks.store --overhead 100000

In a fresh process: opening both indices, looking up six chunks, and admitting six new ones, each of which evicts
another. Admission is measured without what is not bookkeeping: no KV is packed, checksummed or written, and no victim's
file is unlinked; the lock, the new row, use counts, choosing a victim, removing its row and the commit are included,
six times.
"""

import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.common import Row, run, spent
from ragblend.app.cli.bars import progress_bar
from ragblend.kvstore import store as kvstore_store
from ragblend.kvstore.blob import Blob, BlobHeader
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import VALUES_FOLDER, ValueFile
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.store import KVStore
from ragblend.measuring.memory import HostMeter

CHUNKS_A_REQUEST, REQUESTS, OPENINGS, TOKENS = 6, 500, 5, 512
# One small layer: a lookup reads the header, whose size depends on the token ids; the KV bytes do not matter.
SHAPE = Geometry(layers=1, kv_heads=1, key_size=8, value_size=8, dtype="float32")
SCOPE = Scope("bench", "ab" * 32)
NO_LIMIT = 1 << 60
BATCH = 1_000


def main(overhead: Annotated[int, typer.Option(min=100, help="So many chunks.")] = 100_000) -> None:
    """Make such a store in a temporary folder, measure it, and print milliseconds per request."""
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as home:
        make_large_home(Path(home), overhead)
        os.sync()  # else the kernel would write it back while the clock runs
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            print(json.dumps(other.submit(measure, Path(home), overhead).result(), indent=1))


def measure(home: Path, chunks: int) -> Row:
    """Milliseconds of each step: wall-clock median and 99th percentile, and median processor time."""
    with KVStore.open(home / "kv", NO_LIMIT) as store:  # pays for imports and other first uses
        budget_bytes = store.stats().bytes
    # Before any admission: admitted values have no files here, and opening the store would remove their rows.
    openings = _openings(lambda: KVStore.open(home / "kv", budget_bytes))
    node_openings = _openings(lambda: NodeIndex.open(home / "nodes.sqlite"))
    meter, seeded = HostMeter(), random.Random(1)
    store, nodes = KVStore.open(home / "kv", budget_bytes), NodeIndex.open(home / "nodes.sqlite")
    lookups, node_lookups, admissions = [], [], []
    for _ in range(REQUESTS):
        numbers = seeded.sample(range(chunks), CHUNKS_A_REQUEST)
        asked = [(key_of(number), token_ids_of(number)) for number in numbers]
        lookups.append(spent(partial(_look_up, store, asked)))
        node_lookups.append(spent(partial(_look_nodes_up, nodes, numbers)))
    for request in range(REQUESTS):
        first = chunks + CHUNKS_A_REQUEST * request
        new = list(map(_new_chunk, range(first, first + CHUNKS_A_REQUEST)))
        with _nothing_written(new):
            admissions.append(spent(partial(_admit, store, new)))
    index_bytes, stats = meter.peak_bytes(), store.stats()
    store.close()
    nodes.close()
    return {
        "chunks": chunks,
        "entries": stats.entries,
        "evicted": stats.evictions,
        "requests": REQUESTS,
        "lookup_ms": _summary(lookups),
        "node_lookup_ms": _summary(node_lookups),
        "admission_ms": _summary(admissions),
        "index_mb": None if index_bytes is None else round(index_bytes / 1e6, 1),
        "open_ms": _summary(openings),
        "open_nodes_ms": _summary(node_openings),
    }


def _look_up(store: KVStore, asked: Sequence[tuple[ChunkKey, tuple[int, ...]]]) -> None:
    for key, token_ids in asked:
        reader = store.open_chunk(key, token_ids)
        assert reader is not None, key
        reader.close()


def _look_nodes_up(nodes: NodeIndex, numbers: Sequence[int]) -> None:
    for number in numbers:
        assert nodes.get(SCOPE, f"node-{number}") is not None


def _admit(store: KVStore, new: Sequence[tuple[ChunkKey, ChunkKV]]) -> None:
    for key, chunk in new:
        store.put(key, chunk)


def _new_chunk(number: int) -> tuple[ChunkKey, ChunkKV]:
    tensor = torch.zeros(SHAPE.kv_heads, TOKENS, SHAPE.key_size)
    return key_of(number), ChunkKV(token_ids_of(number), 32, SHAPE, [tensor], [tensor])


@contextmanager
def _nothing_written(new: Sequence[tuple[ChunkKey, ChunkKV]]) -> Iterator[None]:
    """Within the block no KV is packed or written and no file removed; (key, chunk) of `new` are packed beforehand."""
    packed = {key: Blob.of(key, chunk) for key, chunk in new}

    def named(root: Path, blob: Blob) -> ValueFile:
        return ValueFile(_filename(blob.header.key.digest, 0), blob.header.key.digest, blob.nbytes, 0o600)

    with ExitStack() as patched:
        for owner, name, instead in (
            (Blob, "of", staticmethod(lambda key, chunk, codec: packed[key])),
            (kvstore_store, "write_value", named),
            (kvstore_store, "remove_values", lambda root, filenames: None),
        ):
            patched.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, instead)
        yield


def _openings(open_one: Callable[[], Any]) -> list[tuple[float, float]]:
    times, opened = [], []
    for _ in range(OPENINGS):
        times.append(spent(lambda: opened.append(open_one())))
        opened.pop().close()
    return times


def _summary(times: list[tuple[float, float]]) -> Row:
    wall, processor = (sorted(1e3 * each for each in column) for column in zip(*times, strict=True))
    last = wall[min(len(wall) - 1, round(0.99 * len(wall)))]
    found = {"median": statistics.median(wall), "p99": last, "processor": statistics.median(processor)}
    return {name: round(value, 3) for name, value in found.items()}


# --- a home whose store and node index have very many chunks. Rows and value files are made directly and in bulk: each
# file has a valid header, which every lookup reads, and a hole instead of its KV.


def key_of(number: int) -> ChunkKey:
    return ChunkKey(sha256(f"chunk {number}".encode()).hexdigest())


def token_ids_of(number: int) -> tuple[int, ...]:
    return tuple(random.Random(number).choices(range(49_152), k=TOKENS))


def make_large_home(home: Path, chunks: int) -> None:
    """Fill `home`/kv and `home`/nodes.sqlite with `chunks` chunks."""
    KVStore.open(home / "kv", NO_LIMIT).close()
    with progress_bar("making chunks") as progress, NodeIndex.open(home / "nodes.sqlite") as nodes:
        for first in range(0, chunks, BATCH):
            progress(first, chunks)
            numbers = range(first, min(first + BATCH, chunks))
            for number in numbers:
                _make_value_file(home / "kv", number)
            nodes.put_many(SCOPE, [(f"node-{each}", token_ids_of(each), key_of(each)) for each in numbers])
    KVStore.open(home / "kv", NO_LIMIT).close()  # enters them into its index, which is empty
    _use(home / "kv", chunks)


def _make_value_file(root: Path, number: int) -> None:
    header = BlobHeader(key_of(number), token_ids_of(number), 32, SHAPE, (0,) * SHAPE.layers)
    path = root / _filename(header.key.digest, number)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, header.pack())
    os.ftruncate(fd, header.file_nbytes)
    os.close(fd)


def _filename(digest: str, number: int) -> str:
    return f"{VALUES_FOLDER}/{digest[:2]}/{digest}-{number:016x}.kv"


def _use(root: Path, chunks: int) -> None:
    """Counts as after some life: seeded, each value another one, so that eviction has an order to keep."""
    seeded = random.Random(0)
    with KVStore.open(root, NO_LIMIT) as store:
        for _ in range(2 * chunks):
            number = min(int(seeded.paretovariate(0.2)), chunks) - 1
            store._ledger.used(key_of(number).digest)


if __name__ == "__main__":
    run(main, __doc__)
