"""Tiny seeded chunks, and stores in a temporary folder."""

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import fault_values
import pytest
import torch
from shared_servers import redis_server, s3_port, shared_of  # noqa: F401

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.sqlite import connect
from ragblend.kvstore.store import KVStore

Sample = tuple[ChunkKey, ChunkKV]
TINY = Geometry(layers=3, kv_heads=2, key_size=4, value_size=6, dtype="bfloat16")


class Samples:
    """sample(seed): a chunk of random bits (NaNs among them) and its key; the same seed gives the same."""

    def __call__(self, seed: int, tokens: int = 5, geometry: Geometry = TINY) -> Sample:
        random = torch.Generator().manual_seed(seed)
        g = geometry

        def bits(size: int) -> torch.Tensor:
            raw = torch.randint(0, 256, (g.kv_heads, tokens, size * g.torch_dtype.itemsize), generator=random)
            return raw.to(torch.uint8).view(g.torch_dtype)

        token_ids = tuple(torch.randint(0, 49152, (tokens,), generator=random).tolist())
        keys = [bits(g.key_size) for _ in range(g.layers)]
        values = [bits(g.value_size) for _ in range(g.layers)]
        model = ModelFingerprint("aa" * 32, "bb" * 32, g, "{}")
        return chunk_key(model, (1, 2), "", token_ids), ChunkKV(token_ids, 2, g, keys, values)

    def put(self, store: KVStore, seed: int, *shape: Any, **named: Any) -> Sample:
        """The same, put into that store."""
        key, chunk = self(seed, *shape, **named)
        store.put(key, chunk)
        return key, chunk

    def put_many(self, store: KVStore, *seeds: int) -> list[Sample]:
        """seeds: as of `range`."""
        return [self.put(store, seed) for seed in range(*seeds)]


@pytest.fixture
def sample() -> Samples:
    return Samples()


@pytest.fixture
def same() -> Callable[[ChunkKV | None, ChunkKV], bool]:
    return fault_values.same


def _execute(path: Path, statement: str, *values: object) -> list[tuple]:
    with closing(connect(path)) as sql:
        return sql.execute(statement, values).fetchall()


@pytest.fixture
def rows(root: Path) -> Callable[..., list[tuple]]:
    """rows(statement, *values): what it gives on the store's index, through a connection of its own."""
    return partial(_execute, root / "index/cache.db")


@pytest.fixture
def held_anywhere(root: Path) -> Callable[[str], list[Path]]:
    """The files that hold this digest, as text or as bytes."""

    def find(digest: str) -> list[Path]:
        needles = digest.encode(), bytes.fromhex(digest)
        return [p for p in root.rglob("*") if p.is_file() and any(n in p.read_bytes() for n in needles)]

    return find


@pytest.fixture
def open_store(root: Path) -> Iterator[Callable[..., KVStore]]:
    """Open the store at `root` as often as wanted; all are closed in the end."""
    opened: list[KVStore] = []

    def open_one(budget_bytes: int = 1 << 30) -> KVStore:
        opened.append(KVStore.open(root, budget_bytes))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store: Callable[..., KVStore]) -> KVStore:
    return open_store()


@pytest.fixture
def value_path(root: Path) -> Callable[[ChunkKey], Path]:
    """The one value file of a key."""

    def find(key: ChunkKey) -> Path:
        (path,) = (root / "values").glob(f"*/{key.digest}-*.kv")
        return path

    return find
