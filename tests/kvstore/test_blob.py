"""The file format: bit-exact round trips, small headers, and no damage that goes unseen."""

import subprocess
import sys
import zlib

import numpy as np
import pytest

from ragblend.kvstore.blob import Blob, BlobDamage, open_verified
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.errors import CorruptBlobError, UsageError
from ragblend.kvstore.memory import layers_of

SMALL = Geometry(2, 1, 2, 3, "float16")


def written(blob: Blob) -> bytes:
    return b"".join(blob.pieces())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_round_trip_is_bit_exact(store, sample, same, dtype, tokens):
    key, chunk = sample(1, tokens, Geometry(3, 2, 4, 6, dtype))
    store.put(key, chunk)
    assert same(store.get(key, chunk.token_ids), chunk)


def test_tensors_that_are_not_contiguous_are_stored_as_they_look(store, sample, same):
    key, chunk = sample(2)
    turned = [k.transpose(0, 1).contiguous().transpose(0, 1) for k in chunk.keys]
    assert not turned[0].is_contiguous()
    store.put(key, ChunkKV(chunk.token_ids, chunk.start, chunk.geometry, turned, chunk.values))
    assert same(store.get(key, chunk.token_ids), chunk)


def test_overhead_is_below_two_percent_for_64_tokens_of_smollm2(sample):
    key, chunk = sample(3, 64, Geometry(30, 3, 64, 64, "bfloat16"))
    blob = Blob.of(key, chunk)
    assert len(written(blob)) == blob.nbytes
    assert chunk.nbytes < blob.nbytes < 1.02 * chunk.nbytes


def test_an_empty_chunk_is_refused(store, sample):
    with pytest.raises(UsageError):
        store.put(*sample(1, tokens=0))


@pytest.mark.parametrize("size", [0, 1, 63, 4096, 100_003])
def test_checksums_are_those_of_zlib(size):
    numbers = np.random.default_rng(size).integers(0, 256, (size + 3,), dtype=np.uint8)[3:]
    for start in (0, 0xFFFFFFFF):
        assert crc32(numbers, start) == crc32(numbers.tobytes(), start) == zlib.crc32(numbers, start)


@pytest.mark.parametrize("writes_without", [True, False])
def test_a_store_is_read_where_isal_is_missing_and_by_who_has_it(tmp_path, writes_without):
    code = """
import sys
if sys.argv[2] == "without":
    sys.modules["isal"] = None
from pathlib import Path
import torch
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore
key, numbers = ChunkKey("ab" * 32), [torch.arange(12.0).view(1, 3, 4)]
with KVStore.open(Path(sys.argv[1]), 1 << 30) as store:
    if sys.argv[3] == "write":
        store.put(key, ChunkKV((1, 2, 3), 0, Geometry(1, 1, 4, 4, "float32"), numbers, numbers))
    found = store.get(key, (1, 2, 3))
print(crc32.__module__, found is not None and found.keys[0].equal(numbers[0]))
"""
    for does, without in (("write", writes_without), ("read", not writes_without)):
        told = "without" if without else "with"
        command = [sys.executable, "-c", code, str(tmp_path / "kv"), told, does]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["zlib" if without else "isal.isal_zlib", "True"]


def test_every_byte_of_a_file_is_guarded(tmp_path, sample):
    """Flip one bit in each byte in turn: header or payload, some check must see it."""
    key, chunk = sample(5, 3, SMALL)
    good = written(Blob.of(key, chunk))
    path = tmp_path / "value"
    unseen = []
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1 << (position % 8)
        path.write_bytes(bad)
        try:
            with open_verified(path, key, chunk.token_ids, lambda what: None) as reader:
                list(layers_of(reader))
            unseen.append(position)
        except CorruptBlobError:
            continue
    assert unseen == []


def test_every_truncation_and_every_extension_is_seen(tmp_path, sample):
    key, chunk = sample(6, 3, SMALL)
    good = written(Blob.of(key, chunk))
    path = tmp_path / "value"
    seen = {}
    for length in [*range(len(good)), len(good) + 1, len(good) + 64, 2 * len(good)]:
        path.write_bytes((good + good)[:length])
        try:
            open_verified(path, key, chunk.token_ids, lambda what: None).close()
        except BlobDamage as damage:
            seen[length] = damage.kind
    assert set(seen.values()) == {"bad-length"}
    assert len(seen) == len(good) + 3
