"""`benchmarks.store --overhead N`: what the store's bookkeeping costs a request when it knows N chunks.

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
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from ragblend.app.bench import table
from ragblend.app.bench.memory import HostMeter
from ragblend.app.bench.quality import Progress
from ragblend.app.cli_progress import progress_bar
from ragblend.kvstore import store as kvstore_store
from ragblend.kvstore.blob import Blob, BlobHeader
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.errors import RagBlendError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import LEDGER_NAME, VALUES_FOLDER, ValueFile
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.sqlite import connect, transaction
from ragblend.kvstore.store import KVStore

Row = dict[str, Any]
Spent = tuple[float, float]  # ms by the clock, and of processor time
CHUNKS_A_REQUEST = 6
REQUESTS = 500
OPENINGS = 5
TOKENS = 512
# One small layer: a lookup reads the header, whose size is that of the token ids; the bytes behind it do not matter.
SHAPE = Geometry(layers=1, kv_heads=1, key_size=8, value_size=8, dtype="float32")
SCOPE = Scope("bench", "ab" * 32)
NO_LIMIT = 1 << 60
_BATCH = 1_000
TARGETS = dict.fromkeys(("lookup_ms", "node_lookup_ms", "admission_ms"), 1.0)
TARGETS |= dict.fromkeys(("open_ms", "open_nodes_ms"), 1000.0)


def report_overhead(chunks: int) -> Row:
    """Make a store of `chunks` chunks in a temporary folder, and measure it.

    Milliseconds: median and 99th percentile by the clock, and the median of processor time, which says more on a busy
    machine; a request is six chunks. Raises RagBlendError.
    """
    with tempfile.TemporaryDirectory(prefix="ragblend-bench-") as home:
        with progress_bar("making chunks") as progress:
            make_large_home(Path(home), chunks, progress)
        os.sync()  # what was just written would else be written back while the clock runs
        command = [sys.executable, "-m", "benchmarks.store_overhead", home, str(chunks)]
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise RagBlendError(f"measuring a store of {chunks} chunks: the child process failed: {last}")
        row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(home: Path, chunks: int) -> Row:
    """All of it, in this process."""
    with KVStore.open(home / "kv", NO_LIMIT) as store:  # and whatever is imported or computed at first use
        budget_bytes = store.stats().bytes
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


def _new_chunk(number: int) -> tuple[Any, Any]:
    import torch

    tensor = torch.zeros(SHAPE.kv_heads, TOKENS, SHAPE.key_size)
    return key_of(number), ChunkKV(token_ids_of(number), 32, SHAPE, [tensor], [tensor])


@contextmanager
def _nothing_written(new: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """No KV is packed or written and no file removed meanwhile; (key, chunk) of `new` are packed beforehand."""
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


def _openings(open_one: Callable[[], Any]) -> list[Spent]:
    times, opened = [], []
    for _ in range(OPENINGS):
        times.append(_timed(lambda: opened.append(open_one())))
        opened.pop().close()
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


def overhead_table(row: Row) -> table.Table:
    """The figures beside their targets."""
    found = [{"what": name, "target": target, **row[name]} for name, target in TARGETS.items()]
    figures = [(name, table.number(name, 3)) for name in ("median", "p99", "processor", "target")]
    title = f"{row['chunks']:,} chunks, {row['requests']} requests of 6; milliseconds"
    note = f"memory: {row['index_mb']} MB of 100"
    return table.table_of(title, [("what", table.text("what")), *figures], found, note)


# --- a home whose store and node index know very many chunks. Rows are made directly and in bulk, and so are the value
# files: each has a whole, checked header, as every lookup reads it, and a hole where its KV would be.


def key_of(number: int) -> ChunkKey:
    """The key of chunk `number`."""
    return ChunkKey(sha256(f"chunk {number}".encode()).hexdigest())


def token_ids_of(number: int) -> tuple[int, ...]:
    """Its token ids."""
    seeded = random.Random(number)
    return tuple(seeded.choices(range(49_152), k=TOKENS))


def header_of(number: int) -> BlobHeader:
    return BlobHeader(key_of(number), token_ids_of(number), 32, SHAPE, (0,) * SHAPE.layers)


def make_large_home(home: Path, chunks: int, progress: Progress) -> None:
    """Fill `home`/kv and `home`/nodes.sqlite with `chunks` chunks."""
    KVStore.open(home / "kv", NO_LIMIT).close()
    _make_value_files(home / "kv", chunks, progress)
    KVStore.open(home / "kv", NO_LIMIT).close()  # enters them into its index, which is empty
    _use(home / "kv" / LEDGER_NAME, chunks)
    with NodeIndex.open(home / "nodes.sqlite") as nodes:
        for first in range(0, chunks, _BATCH):
            progress(chunks + first, 2 * chunks)
            numbers = range(first, min(first + _BATCH, chunks))
            nodes.put_many(SCOPE, [(f"node-{each}", token_ids_of(each), key_of(each)) for each in numbers])


def _make_value_files(root: Path, chunks: int, progress: Progress) -> None:
    for number in range(chunks):
        if number % _BATCH == 0:
            progress(number, 2 * chunks)
        header = header_of(number)
        path = root / _filename(header.key.digest, number)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(fd, header.pack())
        os.ftruncate(fd, header.file_nbytes)
        os.close(fd)


def _filename(digest: str, number: int) -> str:
    return f"{VALUES_FOLDER}/{digest[:2]}/{digest}-{number:016x}.kv"


def _use(ledger: Path, chunks: int) -> None:
    """Counts as after some life: seeded, each value another one, so that eviction has an order to keep."""
    seeded = random.Random(0)
    rows = []
    for number in range(chunks):
        frequency = seeded.paretovariate(1.0)
        rows.append((seeded.uniform(0, chunks), frequency, frequency, key_of(number).digest))
    update = "UPDATE Uses SET used_at = ?, frequency = ?, priority = ?, cost = 1.0, computations = 1 WHERE digest = ?"
    with closing(connect(ledger)) as sql, transaction(sql):
        sql.executemany(update, rows)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
