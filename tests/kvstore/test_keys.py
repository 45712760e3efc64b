"""Every field of a key counts, and no two inputs share canonical bytes."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from ragblend.kvstore import fingerprint
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.fingerprint import ModelFingerprint, chunk_key
from ragblend.kvstore.keys import pack_tokens, unpack_tokens

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
