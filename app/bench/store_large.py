"""A home whose store and node index know very many chunks, for `bench store --overhead`.

Rows are made directly and in bulk, and so are the value files: each has a whole, checked header, as every lookup reads
it, and a hole where its KV would be. Nobody could tell the difference without reading a layer. The node index is filled
through its own interface.
"""

import os
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path

from ragblend.app.bench.progress import Progress
from ragblend.kvstore.blob import BlobHeader
from ragblend.kvstore.chunks import ChunkKey, Geometry
from ragblend.kvstore.disk import INDEX_NAME
from ragblend.kvstore.layout import ValueFile
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.store import KVStore

TOKENS = 512
# One small layer: a lookup reads the header, whose size is that of the token ids; the bytes behind it do not matter.
SHAPE = Geometry(layers=1, kv_heads=1, key_size=8, value_size=8, dtype="float32")
SCOPE = Scope("bench", "ab" * 32)
NO_LIMIT = 1 << 60
_BATCH = 1_000


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
    with KVStore.open(home / "kv", NO_LIMIT) as store:
        files = _value_files(store.root, chunks, progress)
        store._index.insert(files)
    _use(home / "kv" / INDEX_NAME, chunks)
    with NodeIndex.open(home / "nodes.sqlite") as nodes:
        for first in range(0, chunks, _BATCH):
            progress(chunks + first, 2 * chunks)
            numbers = range(first, min(first + _BATCH, chunks))
            nodes.put_many(
                SCOPE, [(f"node-{number}", token_ids_of(number), key_of(number)) for number in numbers]
            )


def _value_files(root: Path, chunks: int, progress: Progress) -> Iterator[ValueFile]:
    for number in range(chunks):
        if number % _BATCH == 0:
            progress(number, 2 * chunks)
        header = header_of(number)
        digest = header.key.digest
        filename = f"values/{digest[:2]}/{digest}-{number:016x}.kv"
        path = root / filename
        path.parent.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        os.write(fd, header.pack())
        os.ftruncate(fd, header.file_nbytes)
        os.close(fd)
        yield ValueFile(filename, digest, header.file_nbytes, 0o600)


def _use(index: Path, chunks: int) -> None:
    """Counts as after some life: seeded, each value another one, so that eviction has an order to keep."""
    seeded = random.Random(0)
    rows = []
    for number in range(chunks):
        frequency = seeded.paretovariate(1.0)
        rows.append((frequency, seeded.uniform(0, chunks), frequency, 1.0, 1, key_of(number).digest))
    insert = "INSERT OR REPLACE INTO Uses SELECT rowid, ?, ?, ?, ?, ? FROM Cache WHERE key = ?"
    with closing(sqlite3.connect(index)) as sql, sql:
        sql.executemany(insert, rows)
