"""KV packed in fewer bytes: every number within half a step, damage seen, any codec read by any store."""

from dataclasses import replace

import pytest
import torch

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import CODECS, RAW
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import MemoryTier, PackedChunk, read_whole
from ragblend.kvstore.store import KVStore

INT8, INT4 = CODECS["int8"], CODECS["int4"]
PACKED = pytest.mark.parametrize("codec", [INT8, INT4], ids=lambda codec: codec.name)
SHAPE = Geometry(layers=2, kv_heads=3, key_size=16, value_size=24, dtype="bfloat16")


def make_chunk(seed=0, tokens=40, geometry=SHAPE, scale=1.0):
    """Numbers as KV has them: channels of very different size, tokens of very different size. Keys are not rotated."""
    random = torch.Generator().manual_seed(seed)

    def numbers(size):
        shape = (geometry.kv_heads, tokens, size)
        channels = torch.rand((geometry.kv_heads, 1, size), generator=random) * 20
        return (torch.randn(shape, generator=random) * channels * scale).to(geometry.torch_dtype)

    keys = [numbers(geometry.key_size) for _ in range(geometry.layers)]
    values = [numbers(geometry.value_size) for _ in range(geometry.layers)]
    return ChunkKV(tuple(range(tokens)), 7, geometry, keys, values, unrotated_keys=keys.__getitem__)


KEY = ChunkKey("ab" * 32)


def through(codec, chunk, layer=0):
    """One layer, packed and unpacked again."""
    packed = torch.cat(
        [t.reshape(-1).view(torch.uint8) for t in codec.pack(chunk.keys[layer], chunk.values[layer])]
    )
    assert packed.numel() == codec.layer_nbytes(chunk.geometry, len(chunk.token_ids))
    keys, values = torch.empty_like(chunk.keys[layer]), torch.empty_like(chunk.values[layer])
    codec.unpack(packed, chunk.geometry, keys, values)
    return keys, values


def half_step(tensor, dim, levels, group):
    """Of the group that each number is in."""
    groups = tensor.float().split(group, dim)
    spreads = [
        (each.amax(dim, keepdim=True) - each.amin(dim, keepdim=True)).expand_as(each) for each in groups
    ]
    return torch.cat(spreads, dim) / levels / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("tokens", "key_size", "value_size"),
    [(40, 16, 24), (64, 64, 64), (1, 64, 64), (33, 15, 37), (95, 80, 128)],
)
@pytest.mark.parametrize(("codec", "levels", "group"), [(INT8, 255, 1 << 20), (INT4, 15, 32)])
def test_unpacked_numbers_are_within_half_a_step(codec, levels, group, tokens, key_size, value_size, dtype):
    """A reference from KIVI's section 3: asymmetric, keys by channel, values by token. 5% for scales in float16."""
    chunk = make_chunk(tokens=tokens, geometry=Geometry(1, 3, key_size, value_size, dtype))
    keys, values = through(codec, chunk)
    rounding = 2**-8 if dtype == "bfloat16" else 2**-10
    for found, expected, dim in ((keys, chunk.keys[0], 1), (values, chunk.values[0], 2)):
        error, step = (found.float() - expected.float()).abs(), half_step(expected, dim, levels, group)
        assert (error <= 1.05 * step + rounding * expected.float().abs() + 1e-6).all()
    assert (values.float() != chunk.values[0].float()).any()


def test_int4_takes_a_third_of_the_bytes():
    shape = Geometry(1, 2, 64, 64, "bfloat16")
    assert INT4.layer_nbytes(shape, 512) == 0.3125 * RAW.layer_nbytes(shape, 512)


def test_int4_packs_unrotated_keys(root):
    chunk = make_chunk()
    turned = replace(chunk, keys=[-keys for keys in chunk.keys])
    with KVStore.open(root, 1 << 30) as store:
        store.put(KEY, turned, INT4)
        with store.open_chunk(KEY, chunk.token_ids) as reader:
            assert reader.unrotated and not reader.is_exact
            assert torch.equal(read_whole(reader).keys[0], through(INT4, chunk)[0])


def with_a_large_number(chunk):
    chunk.values[1][0, 0, 0] = 1e30
    return chunk


@pytest.mark.parametrize(
    ("codec", "changed"),
    [
        (INT8, with_a_large_number),
        (INT4, with_a_large_number),
        (INT4, lambda chunk: replace(chunk, unrotated_keys=None)),
    ],
    ids=["int8: a number beyond it", "int4: a number beyond it", "int4: no keys before rotation"],
)
def test_kv_that_the_codec_cannot_hold_is_stored_raw(root, same, codec, changed):
    chunk = changed(make_chunk())
    assert Blob.of(KEY, chunk, codec).header.codec is RAW
    with KVStore.open(root, 1 << 30) as store:
        store.put(KEY, chunk, codec)
        assert same(store.get(KEY, chunk.token_ids), chunk)


@PACKED
def test_any_store_reads_any_codec(root, same, codec):
    chunk, other = make_chunk(1), make_chunk(2)
    with KVStore.open(root, 1 << 30) as store:
        store.put(KEY, chunk, codec)
        store.put(ChunkKey("cd" * 32), other)
        packed = store.get(KEY, chunk.token_ids)
        assert same(store.get(ChunkKey("cd" * 32), other.token_ids), other)
        assert store.check() == []
    with KVStore.open(root, 1 << 30) as store:
        assert same(store.get(KEY, chunk.token_ids), packed)
    assert not same(packed, chunk)
    for layer in range(SHAPE.layers):
        keys, values = through(codec, chunk, layer)
        assert torch.equal(packed.keys[layer], keys) and torch.equal(packed.values[layer], values)


def test_a_codec_of_a_later_version_is_a_miss(root, monkeypatch):
    chunk = make_chunk()
    with KVStore.open(root, 1 << 30) as store:
        store.put(KEY, chunk, INT8)
        monkeypatch.setattr("ragblend.kvstore.blob.codec_numbered", lambda number: None)
        assert store.get(KEY, chunk.token_ids) is None


@PACKED
def test_a_memory_tier_holds_the_packed_bytes_and_reads_the_same(root, same, codec):
    chunk = make_chunk()
    tier = MemoryTier("memory", 1 << 20)
    with KVStore.open(root, 1 << 30, tiers=[tier]) as store:
        store.put(KEY, chunk, codec)
        from_disk = store.get(KEY, chunk.token_ids)
        store.promote(KEY, chunk.token_ids)
        assert isinstance(tier.peek(KEY, chunk.token_ids), PackedChunk)
        assert tier.stats().bytes == SHAPE.layers * codec.layer_nbytes(SHAPE, 40)
        assert same(store.get(KEY, chunk.token_ids), from_disk)
