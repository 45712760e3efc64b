"""Layers go straight into the caller's tensors: strided, in parts, in parallel, and after the file is gone."""

import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from waiting import SOON_S

from ragblend.kvstore import system
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import CODECS, Part
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.store import KVStore


def fused_buffers(geometry, tokens, fill=0x5A):
    """One layer's K and V of a longer sequence, every byte `fill`."""
    shape = (geometry.kv_heads, tokens)
    sizes = (geometry.key_size, geometry.value_size)
    both = [torch.empty((*shape, size), dtype=geometry.torch_dtype) for size in sizes]
    for tensor in both:
        tensor.view(torch.uint8).fill_(fill)
    return both


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def test_short_reads_are_continued(store, sample, same, monkeypatch):
    """preadv may stop anywhere: here after 7 bytes, in the middle of a head and of a number."""
    key, chunk = sample.put(store, 2)
    whole = os.preadv

    def short(fd, buffers, offset):
        return whole(fd, [memoryview(buffers[0])[:7]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert same(store.get(key, chunk.token_ids), chunk)


def test_more_buffers_than_one_preadv_takes(store, sample, same, monkeypatch):
    key, chunk = sample.put(store, 3, 2, Geometry(2, 9, 4, 4, "bfloat16"))
    lengths = []
    whole = os.preadv

    def counted(fd, buffers, offset):
        lengths.append(len(buffers))
        return whole(fd, buffers, offset)

    monkeypatch.setattr(system, "_IOV_MAX", 4)
    monkeypatch.setattr(os, "preadv", counted)
    assert same(store.get(key, chunk.token_ids), chunk)
    assert max(lengths) == 4


def test_threads_read_different_layers_at_once(store, sample):
    key, chunk = sample.put(store, 5, 40, Geometry(12, 2, 8, 8, "bfloat16"))
    buffers = [fused_buffers(chunk.geometry, 40) for _ in range(12)]
    with store.open_chunk(key, chunk.token_ids) as reader, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda layer: reader.read_layer(layer, *buffers[layer]), list(range(12)) * 3))
    for layer, (keys, values) in enumerate(buffers):
        assert torch.equal(bits(keys), bits(chunk.keys[layer]))
        assert torch.equal(bits(values), bits(chunk.values[layer]))


def test_damage_of_a_later_layer_is_counted_once_and_becomes_a_miss(store, sample, value_path):
    key, chunk = sample.put(store, 9)
    with store.open_chunk(key, chunk.token_ids) as reader:
        with value_path(key).open("r+b") as file:
            file.seek(reader.header.layer_offset(1))
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        keys, values = fused_buffers(chunk.geometry, 5)
        reader.read_layer(0, keys, values)
        for _ in range(2):
            with pytest.raises(CorruptBlobError, match="layer 1"):
                reader.read_layer(1, keys, values)
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.quarantined, stats.entries) == (0, 1, 1, 0)
    assert store.open_chunk(key, chunk.token_ids) is None


def test_a_file_truncated_under_an_open_reader_is_damage(store, sample, value_path):
    key, chunk = sample.put(store, 10)
    with store.open_chunk(key, chunk.token_ids) as reader:
        os.truncate(value_path(key), reader.header.layer_offset(2) + 3)
        with pytest.raises(CorruptBlobError, match="ends after 3 of"):
            reader.read_layer(2, *fused_buffers(chunk.geometry, 5))


def test_io_errors_are_damage(store, sample, monkeypatch):
    key, chunk = sample.put(store, 11)

    read = os.preadv

    def broken(fd, buffers, offset):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".kv"):
            raise OSError(5, "Input/output error")
        return read(fd, buffers, offset)

    with store.open_chunk(key, chunk.token_ids) as reader:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CorruptBlobError, match="Input/output"):
            reader.read_layer(0, *fused_buffers(chunk.geometry, 5))
    assert store.stats().quarantined == 1


def test_close_waits_for_running_reads(store, sample, monkeypatch):
    """Else the descriptor's number could be another file's while preadv still uses it."""
    key, chunk = sample.put(store, 12)
    reader = store.open_chunk(key, chunk.token_ids)
    inside, go_on, whole = threading.Event(), threading.Event(), os.preadv

    def slow(fd, buffers, offset):
        inside.set()
        assert go_on.wait(SOON_S)
        return whole(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    keys, values = fused_buffers(chunk.geometry, 5)
    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(reader.read_layer, 0, keys, values)
        assert inside.wait(SOON_S)
        closing = pool.submit(reader.close)
        assert not closing.done()
        go_on.set()
        reading.result(SOON_S)
        closing.result(SOON_S)
    assert torch.equal(bits(keys), bits(chunk.keys[0]))
    with pytest.raises(StoreError, match="closed"):
        reader.read_layer(0, keys, values)


def open_values(root):
    """How many value files this process has open; a deleted one's name goes on with " (deleted)"."""
    held = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
    return sum(str(root / "values") in os.readlink(each) for each in held if each.is_symlink())


def test_readers_close_their_files(store, root, sample):
    key, chunk = sample.put(store, 13)
    with store.open_chunk(key, chunk.token_ids):
        assert open_values(root) == 1
    for _ in range(5):
        store.get(key, chunk.token_ids)
        store.open_chunk(key, chunk.token_ids)  # dropped without close
        assert store.open_chunk(key, (1, 2)) is None
        store.put(key, chunk)
    gc.collect()
    assert open_values(root) == 0


def test_will_need_reads_ahead_only_that_file(store, sample, value_path, monkeypatch):
    asked = []
    for seed in (1, 2):
        key, _ = sample.put(store, seed)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *rest: asked.append((os.readlink(f"/proc/self/fd/{fd}"), *rest))
    )
    store.read_ahead(key)
    store.read_ahead(sample(3)[0])  # never stored: no error
    assert asked == [(str(value_path(key).resolve()), 0, 0, os.POSIX_FADV_WILLNEED)]


# --- some tokens of a stored value


PART_SHAPE = Geometry(2, 3, 8, 8, "float32")
KEY = ChunkKey("a" * 64)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(("skipped", "tokens"), [(0, 20), (3, 10), (19, 1)])
def test_a_part_reads_its_tokens_of_the_whole(tmp_path, codec, skipped, tokens):
    torch.manual_seed(0)
    keys, values = ([torch.randn(3, 20, 8) for _ in range(2)] for _ in range(2))
    ids = tuple(range(20))
    with KVStore.open(tmp_path / "kv", 1 << 20) as store:
        store.put(KEY, ChunkKV(ids, 5, PART_SHAPE, keys, values), CODECS[codec])
        whole = store.get(KEY, ids)
        reader = store.open_chunk(KEY, ids)
        with Part(reader, skipped, tokens) as part:
            assert part.token_ids == ids[skipped : skipped + tokens] and part.start == 5 + skipped
            for layer in range(2):
                found = torch.empty(3, tokens, 8), torch.empty(3, tokens, 8)
                part.read_layer(layer, *found)
                for of_part, of_whole in zip(found, (whole.keys[layer], whole.values[layer]), strict=True):
                    assert torch.equal(of_part, of_whole[:, skipped : skipped + tokens])
