"""Seeded values for the fault suite, each with versions, and the oracle's error class."""

import os
import random
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path

import torch

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore

FULL = os.environ.get("FAULTS") == "full"
SHAPE = Geometry(layers=2, kv_heads=2, key_size=4, value_size=6, dtype="bfloat16")
TOKENS = 20
MODEL = ModelFingerprint("aa" * 32, "bb" * 32, SHAPE, "{}")


class OracleError(AssertionError):
    """A wrong value served, an acknowledged one lost, or a store that is not as it should be."""


def demand(holds: object, *what: object) -> None:
    """Raise OracleError unless `holds`; not an assert, so that who catches it knows that the oracle spoke."""
    if not holds:
        raise OracleError(" ".join(map(str, what)))


def token_ids(number: int) -> tuple[int, ...]:
    seeded = random.Random(number)
    return tuple(seeded.randrange(49152) for _ in range(TOKENS))


@lru_cache(4096)
def key_of(number: int) -> ChunkKey:
    return chunk_key(MODEL, (1, 2), "", token_ids(number))


@lru_cache(4096)
def value(number: int, version: int = 0, geometry: Geometry = SHAPE) -> ChunkKV:
    """Random bits (NaNs among them) under the key of `number`: each version other bits."""
    seeded, g = random.Random(f"{number}/{version}"), geometry

    def bits(size: int) -> torch.Tensor:
        shape = (g.kv_heads, TOKENS, size)
        raw = bytearray(seeded.randbytes(g.kv_heads * TOKENS * size * g.torch_dtype.itemsize))
        return torch.frombuffer(raw, dtype=g.torch_dtype).view(shape)

    keys = [bits(g.key_size) for _ in range(g.layers)]
    return ChunkKV(token_ids(number), 2, g, keys, [bits(g.value_size) for _ in range(g.layers)])


VALUE_BYTES = Blob.of(key_of(0), value(0)).nbytes


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def same(found: ChunkKV | None, expected: ChunkKV) -> bool:
    """Bit for bit: NaN is equal to itself and -0.0 is not 0.0."""
    if found is None or (found.token_ids, found.start, found.geometry) != (
        expected.token_ids,
        expected.start,
        expected.geometry,
    ):
        return False
    pairs = zip([*found.keys, *found.values], [*expected.keys, *expected.values], strict=True)
    return all(raw(a) == raw(b) for a, b in pairs)


def put(store: KVStore, number: int, version: int = 0) -> None:
    store.put(key_of(number), value(number, version))


def version_read(store: KVStore, number: int, permitted: Collection[int | None]) -> int | None:
    """Which version `store` serves, None for a miss; OracleError unless it is among those permitted."""
    found = store.get(key_of(number), token_ids(number))
    if found is None:
        demand(None in permitted, f"acknowledged value {number} is lost; permitted: {permitted}")
        return None
    versions = [version for version in permitted if version is not None]
    served = [version for version in versions if same(found, value(number, version))]
    demand(served, f"a wrong value was served for {number}; permitted: {permitted}")
    return served[0]


def flip(path: Path, at: int, bit: int = 2) -> None:
    """Flip one bit of the byte `at`, which counts from the end where it is negative."""
    with path.open("r+b") as file:
        place = file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
