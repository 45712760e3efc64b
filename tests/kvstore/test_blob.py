"""The file format: bit-exact round trips, small headers, and no damage that goes unseen."""

import importlib
import sys
import zlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from ragblend.kvstore import fingerprint
from ragblend.kvstore.blob import Blob, BlobDamage, open_verified
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.errors import CorruptBlobError, UsageError
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key
from ragblend.kvstore.keys import pack_tokens, unpack_tokens
from ragblend.kvstore.memory import layers_of

SMALL = Geometry(2, 1, 2, 3, "float16")


def written(blob: Blob) -> bytes:
    return b"".join(blob.pieces())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 5, 64])
def test_round_trip_is_bit_exact(store, sample, same, dtype, tokens):
    key, chunk = sample.put(store, 1, tokens, Geometry(3, 2, 4, 6, dtype))
    assert same(store.get(key, chunk.token_ids), chunk)


def test_tensors_need_not_be_contiguous(store, sample, same):
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


def test_without_isal_checksums_come_from_zlib(monkeypatch):
    for name in ("isal", "isal.isal_zlib"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "ragblend.kvstore.checksum")
    assert importlib.import_module("ragblend.kvstore.checksum").crc32 is zlib.crc32


def test_a_flipped_bit_in_any_byte_is_detected(tmp_path, sample):
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


def test_every_wrong_length_is_detected(tmp_path, sample):
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


# --- keys: every field counts, and no two inputs share canonical bytes


GEOMETRY = Geometry(3, 2, 4, 6, "bfloat16")
MODEL = ModelFingerprint("ab", "cd", GEOMETRY, '{"rope_theta":10000.0}')


def test_every_field_changes_the_key():
    models = [
        MODEL,
        replace(MODEL, weights="ac"),
        replace(MODEL, tokenizer="ce"),
        replace(MODEL, weights="abc", tokenizer="d"),  # the same letters, joined
        replace(MODEL, rope='{"rope_theta":10000}'),
        *(replace(MODEL, geometry=replace(GEOMETRY, **{name: 8})) for name in ("layers", "kv_heads")),
        *(replace(MODEL, geometry=replace(GEOMETRY, **{name: 8})) for name in ("key_size", "value_size")),
        replace(MODEL, geometry=replace(GEOMETRY, key_size=6, value_size=4)),
        replace(MODEL, geometry=replace(GEOMETRY, dtype="float16")),
    ]
    inputs = [(model, (1, 2), "salt", (3, 4)) for model in models]
    inputs += [
        (MODEL, (1, 2, 3), "salt", (4,)),
        (MODEL, (), "salt", (1, 2, 3, 4)),
        (MODEL, (1, 2), "", (3, 4)),
    ]
    inputs += [
        (MODEL, (1, 2), "salt", (4, 3)),
        (MODEL, (1, 2), "salt", (3, 4, 0)),
        (MODEL, (12,), "salt", (3, 4)),
    ]
    digests = [chunk_key(*each).digest for each in inputs]
    for (a, first), (b, second) in combinations(zip(digests, inputs, strict=True), 2):
        assert a != b, (first, second)


def test_format_version_changes_the_key(monkeypatch):
    before = chunk_key(MODEL, (1,), "", (2,))
    monkeypatch.setattr(fingerprint, "FORMAT_VERSION", fingerprint.FORMAT_VERSION + 1)
    assert chunk_key(MODEL, (1,), "", (2,)) != before
    assert ModelFingerprint("ab", "cd", GEOMETRY, MODEL.rope).digest != MODEL.digest


def test_keys_are_the_same_for_all_sequence_types_and_processes():
    key = chunk_key(MODEL, [1], "s", [2, 3])
    assert key == chunk_key(MODEL, (1,), "s", np.array([2, 3]))
    # Pinned: a change of the canonical bytes without a new FORMAT_VERSION would lose every store in the field.
    assert key.digest == "3ea136e07509a3334dde5d69fd2f3dbf1cf4ab5e160223fe650ffbcba28b9113"


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**70], ["x"], [[1, 2]]])
def test_impossible_token_ids_are_refused(bad):
    with pytest.raises(UsageError):
        chunk_key(MODEL, (), "", bad)


def test_packed_tokens_are_unpacked_unchanged():
    for token_ids in ((), (0,), (1, 2**32 - 1, 7)):
        assert unpack_tokens(pack_tokens(token_ids)) == token_ids
