"""KV packed in fewer bytes: every number within half a step, damage seen, any codec read by any store."""

from dataclasses import replace

import pytest
import torch

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import CODECS, RAW, codec_named
from ragblend.kvstore.errors import UsageError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.memory import HeldChunk, MemoryTier, PackedChunk, held_copy, held_nbytes, whole
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
            assert torch.equal(whole(reader).keys[0], through(INT4, chunk)[0])


def test_kv_without_unrotated_keys_is_stored_raw(root, same):
    chunk = replace(make_chunk(), unrotated_keys=None)
    with KVStore.open(root, 1 << 30) as store:
        store.put(KEY, chunk, INT4)
        assert same(store.get(KEY, chunk.token_ids), chunk)


def test_a_scale_per_channel_keeps_small_channels():
    """One scale a token for keys as well would round a channel of small numbers to nothing."""
    chunk = make_chunk()
    chunk.keys[0][:, :, 0] = torch.linspace(0.001, 0.002, 40).to(torch.bfloat16)
    keys, _ = through(INT8, chunk)
    assert torch.allclose(keys[:, :, 0].float(), chunk.keys[0][:, :, 0].float(), rtol=0.01)


@PACKED
def test_numbers_beyond_the_codec_are_stored_raw(root, same, codec):
    chunk = make_chunk()
    chunk.values[1][0, 0, 0] = 1e30
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


def test_copies_between_memory_tiers_are_identical():
    first = held_copy(HeldChunk.of(make_chunk()), "memory", torch.device("cpu"), pinned=False)
    again = held_copy(first, "device", torch.device("cpu"), pinned=False)
    assert held_nbytes(first) == held_nbytes(again) == len(first.token_ids) * SHAPE.token_bytes
    assert all(torch.equal(a, b) for a, b in zip(first.layers, again.layers, strict=True))
    packed, expected = (torch.empty(RAW.layer_nbytes(SHAPE, 40), dtype=torch.uint8) for _ in range(2))
    again.read_packed(1, packed)
    HeldChunk.of(make_chunk()).read_packed(1, expected)
    assert torch.equal(packed, expected)


def test_an_unknown_codec_is_refused():
    with pytest.raises(UsageError, match="int3"):
        codec_named("int3")
