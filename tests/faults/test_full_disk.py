"""A real file system of 100 MB that is filled completely; needs the right to mount."""

import contextlib
import shutil
import subprocess
import tempfile

import pytest
from fault_values import demand, key_of, put, token_ids, value, version_read

from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.errors import StoreFullError
from ragblend.kvstore.nodes import NodeIndex, Scope
from ragblend.kvstore.store import KVStore

SCOPE = Scope("papers", "aa" * 32)
LARGE = Geometry(layers=4, kv_heads=8, key_size=512, value_size=512, dtype="float32")  # 2.6 MB a value


def _mounted(folder, *command):
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount here: {done.stderr.strip() or done.returncode}")


@pytest.fixture(params=["tmpfs", "ext4"])
def disk(request, tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("there is no mount")
    if request.param == "tmpfs":
        _mounted(folder, "mount", "-t", "tmpfs", "-o", "size=100m", "tmpfs")
    else:
        make = shutil.which("mkfs.ext4", path="/sbin:/usr/sbin:/bin:/usr/bin")
        if not make:
            pytest.skip("there is no mkfs.ext4")
        image = tmp_path / "image"
        with open(image, "wb") as file:
            file.truncate(100 << 20)
        subprocess.run([make, "-q", "-F", image], check=True, capture_output=True)
        _mounted(folder, "mount", "-o", "loop", image)
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def large():
    """Values of megabytes under the usual numbers, made by repeating their bits."""

    def make(number):
        small = value(number)
        repeat = (LARGE.kv_heads // 2, 1, LARGE.key_size // 2)
        keys = [
            k.float().nan_to_num().repeat(repeat)[..., : LARGE.key_size].contiguous() for k in small.keys * 2
        ]
        return ChunkKV(small.token_ids, 2, LARGE, keys, keys)

    return make


def fill(put_one, numbers, held):
    for number in numbers:
        if number not in held:
            put_one(number)
            held.add(number)


@pytest.mark.timeout(600)
def test_filled_until_nothing_goes_in(disk, large, count):
    """Filled, emptied a little, filled again: named errors, and everything acknowledged stays readable."""
    root, held = disk / "kv", set()
    with KVStore.open(root, 1 << 30) as store:
        for round_ in range(count(6, 2)):
            with pytest.raises(StoreFullError, match=r"[Nn]o space|disk is full"):
                fill(lambda number: store.put(key_of(number), large(number)), range(100), held)
            assert len(held) > 20
            _verify(store, held, large)
            for number in sorted(held)[round_ : round_ + 3]:
                store.delete([key_of(number)])
                held.discard(number)
    with KVStore.open(root, 1 << 30) as store:
        assert store.stats().quarantined == 0
        _verify(store, held, large)


def _verify(store, held, large):
    demand(store.check() == [], store.check())
    for number in range(100):
        found = store.get(key_of(number), token_ids(number))
        is_found, is_held = found is not None, number in held
        demand(is_found == is_held, "acknowledged:", is_held, "found:", is_found)
        if found is not None:
            expected = large(number)
            pairs = zip([*found.keys, *found.values], [*expected.keys, *expected.values], strict=True)
            demand(all((a == b).all() for a, b in pairs), "a wrong value was served for", number)


def test_small_values_until_the_index_has_no_room(disk):
    """A disk filled by something else to the last byte: reads go on, puts and deletes are named errors at most."""
    root = disk / "kv"
    with KVStore.open(root, 1 << 30) as store:
        for number in range(5):
            put(store, number)
        with open(disk / "ballast", "wb") as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(1 << 20))
                ballast.flush()
        with open(disk / "ballast2", "wb", buffering=0) as ballast, contextlib.suppress(OSError):
            while True:
                ballast.write(bytes(512))
        held = set(range(5))
        with pytest.raises(StoreFullError):
            fill(lambda number: put(store, number), range(2000), held)
        for number in held:
            version_read(store, number, {0})
        with contextlib.suppress(StoreFullError):  # its file is gone; there may be no room to note that
            store.delete([key_of(0)])
        version_read(store, 0, {None})
        for name in ("ballast", "ballast2"):
            (disk / name).unlink()
        put(store, 6000)
        store.delete([key_of(0)])
        assert store.check() == []


def test_a_store_on_a_full_disk_opens_and_is_read(disk, tmp_path, monkeypatch):
    """Nothing of it was open: an index that is opened for reading takes no room, not even for shared memory."""
    with KVStore.open(disk / "kv", 1 << 30) as store, NodeIndex.open(disk / "nodes.sqlite") as nodes:
        for number in range(3):
            put(store, number)
            nodes.put_many(SCOPE, [(str(number), token_ids(number), key_of(number))])
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    with KVStore.open(disk / "kv", 1 << 30) as store, NodeIndex.open(disk / "nodes.sqlite") as nodes:
        assert [version_read(store, number, {0}) for number in range(3)] == [0, 0, 0]
        assert nodes.get(SCOPE, "1") == tuple(token_ids(1))
        (disk / "fill").unlink()
        put(store, 3)
        nodes.put_many(SCOPE, [("3", token_ids(3), key_of(3))])
        assert version_read(store, 3, {0}) == 0 and nodes.get(SCOPE, "3") is not None
