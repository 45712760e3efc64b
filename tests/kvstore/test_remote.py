"""A store that machines share, over a real Redis, S3 server and folder: what one puts others read, or nobody does."""

import asyncio
import logging
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from itertools import cycle
from unittest.mock import AsyncMock

import pytest
import torch
from shared_servers import KINDS, RedisNames, free_port, proxy_to
from waiting import started, until

from ragblend.kvstore import remote as remote_module
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.codec import CODECS, RAW
from ragblend.kvstore.errors import CorruptBlobError, RemoteError, UsageError
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import value_files
from ragblend.kvstore.memory import read_whole
from ragblend.kvstore.places import Place, safe_message
from ragblend.kvstore.remote import Remote, Wanted, name_at
from ragblend.kvstore.servers import _Redis
from ragblend.kvstore.store import KVStore

GENEROUS = 1 << 30
PATIENT = "?timeout_s=60"  # where the server answers, however busy the machine is
LARGE = Geometry(
    layers=8, kv_heads=2, key_size=64, value_size=64, dtype="float32"
)  # 1 MB a layer of 1,024 tokens


def wanted(key, chunk):
    return Wanted(key, chunk.token_ids, chunk.geometry, chunk.start)


@pytest.fixture
def open_at(tmp_path):
    """open_at(url): a store of its own folder, as of another machine, over that shared store."""
    with ExitStack() as opened:
        count = iter(range(100))
        yield lambda url: opened.enter_context(
            closing(KVStore.open(tmp_path / f"machine{next(count)}" / "kv", GENEROUS, remote=url))
        )


@pytest.fixture(params=KINDS)
def shared(request, shared_of):
    return shared_of(request.param)


@pytest.fixture
def redis(shared_of):
    return shared_of("redis")


def put(store, *samples, codec=RAW):
    for key, chunk in samples:
        store.put(key, chunk, codec)
    assert store.remote.flush()


# --- what it is for


def test_values_of_one_machine_are_read_and_stored_by_another(shared, open_at, sample, same, monkeypatch):
    monkeypatch.setattr(remote_module, "MAX_LOOKUP_S", 60)
    one, other = open_at(shared.url + PATIENT), open_at(shared.url + PATIENT)
    samples = [sample(seed, tokens=3 + seed) for seed in range(4)]
    put(one, *samples)
    assert other.remote.find([wanted(*sample(9))]) == {}
    found = other.remote.find([wanted(*each) for each in samples])
    for key, chunk in samples:
        with found[key] as reader:
            assert reader.tier == "remote" and same(read_whole(reader), chunk)
            assert other.put_blob(reader.blob)
        assert same(other.get(key, chunk.token_ids), chunk)
    stats = other.remote.stats()
    assert (stats.hits, stats.misses, stats.damaged, stats.errors) == (4, 1, 0, 0)
    assert stats.state == "available" and stats.where == shared.url
    nbytes = sum(len(shared.names.get(name)) for name in shared.names.names())
    assert one.remote.stats().written_bytes == nbytes == one.stats().bytes
    assert other.stats().hits == 4 + 4  # read there, then here
    assert other.remote.has([sample(9)[0], *(key for key, _ in samples)]) == {key for key, _ in samples}
    third = open_at(shared.url + PATIENT)
    assert third.put_blob(third.remote.fetch(wanted(*samples[0])))
    assert same(third.get(samples[0][0], samples[0][1].token_ids), samples[0][1])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
def test_only_requested_layers_are_transferred_with_any_codec(redis, open_at, sample, codec):
    geometry = replace(LARGE, dtype="float32")
    random = torch.Generator().manual_seed(1)
    key, chunk = sample(1, tokens=256, geometry=geometry)
    numbers = [torch.randn(t.shape, generator=random) for t in (*chunk.keys, *chunk.values)]
    chunk = replace(chunk, keys=numbers[: geometry.layers], values=numbers[geometry.layers :])
    one = open_at(redis.url + PATIENT)
    put(one, (key, chunk), codec=codec)
    with proxy_to(redis.port) as proxy:
        other = open_at(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}")
        with other.remote.find([wanted(key, chunk)])[key] as reader:
            header_bytes = proxy.passed
            assert header_bytes < 2 * reader.header.nbytes + 2000
            keys, values = torch.empty_like(chunk.keys[5]), torch.empty_like(chunk.values[5])
            reader.read_layer(5, keys, values)
            assert proxy.passed - header_bytes < reader.header.layer_nbytes + 1000
            expected = read_whole(one.open_chunk(key, chunk.token_ids))
            assert torch.equal(keys, expected.keys[5]) and torch.equal(values, expected.values[5])
            assert reader.blob is None and not reader.is_lost


def test_a_put_does_not_wait_for_a_dead_server(open_at, sample, same):
    store = open_at(f"redis://127.0.0.1:{free_port()}/0")
    key, chunk = sample(1)
    assert store.put(key, chunk) and same(store.get(key, chunk.token_ids), chunk)
    store.remote.flush()
    stats = store.remote.stats()
    assert (stats.errors, stats.waiting, stats.dropped, stats.written_bytes) == (1, 1, 0, 0)


def test_the_write_queue_is_bounded(redis, open_at, sample, monkeypatch):
    monkeypatch.setattr(remote_module, "MAX_QUEUED", 2)
    with proxy_to(redis.port, most=0) as proxy:
        store = open_at(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}")
        for seed in range(6):  # one at least waits for the server
            store.put(*sample(seed))
        stats = store.remote.stats()
        assert stats.waiting <= 2 and stats.dropped >= 3 and store.stats().entries == 6


def test_tree_nodes_are_not_written(redis, open_at, sample):
    store = open_at(redis.url + PATIENT)
    (parent, chunk), (own, other) = sample(1), sample(2)
    put(store, (parent, chunk), (own, replace(other, parent=parent)))
    assert store.remote.flush() and len(redis.names.names()) == 1


# --- deleting, and time


def test_delete_shared_deletes_values(shared, open_at, sample):
    store = open_at(shared.url + PATIENT)
    samples = [sample(seed) for seed in range(3)]
    put(store, *samples)
    assert len(shared.names.names()) == 3
    store.delete_shared([key for key, _ in samples[:2]])
    (left,) = shared.names.names()
    assert left.endswith(samples[2][0].digest)
    store.delete_shared([samples[0][0]])  # deleting an absent value is no error


def test_values_deleted_while_queued_are_not_written(redis, open_at, sample):
    with proxy_to(redis.port) as proxy:
        proxy.cut()
        store = open_at(f"redis://127.0.0.1:{proxy.port}/0?timeout_s=60&retry_s=0.05")
        keys, back = [sample(seed)[0] for seed in range(4)], threading.Event()
        for seed in range(4):
            store.put(*sample(seed))
        store.remote.flush()  # all wait, the first of them again
        with KVStore.open(store.root, GENEROUS) as other:
            other.delete([keys[1]])
        with pytest.raises(RemoteError):
            store.delete_shared([keys[2]])
        store.remote.call_when_available(back.set)
        proxy.mend()
        assert back.wait(60) and store.remote.flush()
    assert {name.rpartition(":")[2] for name in redis.names.names()} == {keys[0].digest, keys[3].digest}


def test_a_value_deleted_by_another_process_during_the_write_is_deleted_again(redis, tmp_path, sample):
    """It is there no more by the time the server has it."""
    there = list[list[str]]()

    def stored(key):
        there.append(redis.names.names())
        return False

    key, chunk = sample(1)
    content = b"".join(Blob.of(key, chunk).pieces())
    with closing(Remote(Place.of(redis.url + PATIENT), lambda _: content, stored)) as remote:
        remote.queue_write(key)
        assert remote.flush()
    assert [len(names) for names in there] == [1] and redis.names.names() == []


def test_a_failed_deletion_is_repeated_when_the_server_answers_again(redis):
    """It was forgotten, and stayed there for its time to live."""
    contents = iter([b"value"])
    with proxy_to(redis.port) as proxy:
        cuts = [proxy.cut, proxy.cut]

        def stored(key):
            if cuts:
                cuts.pop()()
            return False

        place = Place.of(f"redis://127.0.0.1:{proxy.port}/0?timeout_s=60&retry_s=0.05")
        with closing(Remote(place, lambda _: next(contents, None), stored)) as remote:
            remote.queue_write(ChunkKey("ab" * 32))
            for _ in range(2):
                remote.flush()
                assert len(redis.names.names()) == 1
                back = threading.Event()
                remote.call_when_available(back.set)
                proxy.mend()
                assert back.wait(60)
            assert remote.flush() and not cuts
    assert redis.names.names() == []


def test_values_have_a_time_to_live(redis, open_at, sample):
    store = open_at(redis.url + "?timeout_s=60&ttl_s=1000")
    put(store, sample(1))
    (name,) = redis.names.names()
    assert 900 < redis.names._client.ttl(name) <= 1000


def test_expired_values_of_a_folder_are_misses_and_swept(shared_of, open_at, sample):
    shared = shared_of("file")
    store = open_at(shared.url + "?timeout_s=60&ttl_s=1000")
    put(store, sample(1), sample(2))
    old, _ = shared.names.names()
    shared.names.age(old, 2000)
    found = open_at(shared.url + "?timeout_s=60&ttl_s=1000").remote.find(
        [wanted(*sample(1)), wanted(*sample(2))]
    )
    assert len(found) == 1 and store.remote.sweep() == 1
    assert old not in shared.names.names() and len(shared.names.names()) == 1


def test_what_a_killed_writer_left_in_a_folder_is_deleted_with_the_value_or_swept(shared_of, open_at, sample):
    """obstore writes NAME#1 first, and neither lists nor deletes such a file: a deleted document's KV stayed."""
    shared = shared_of("file")
    store = open_at(shared.url + "?timeout_s=60&ttl_s=1000")
    put(store, sample(1), sample(2))
    for name in shared.names.names():
        shared.names.set(f"{name}#1", b"half a value")
    kept = name_at(store.remote.place, sample(2)[0])
    store.delete_shared([sample(1)[0]])
    assert len(shared.names.names()) == 3  # it may still be written
    for name in shared.names.names():
        shared.names.age(name, 120)
    store.delete_shared([sample(1)[0]])
    assert shared.names.names() == [kept, f"{kept}#1"]
    assert store.remote.sweep() == 0 and len(shared.names.names()) == 2  # it may still be written
    shared.names.age(f"{kept}#1", 2000)
    assert store.remote.sweep() == 0 and shared.names.names() == [kept]


def test_an_unmounted_folder_is_not_created(tmp_path, open_at, sample):
    store = open_at(f"file://{tmp_path}/share")
    store.put(*sample(1))
    store.remote.flush()
    assert not (tmp_path / "share").exists()
    assert store.remote.stats().errors == 1


@pytest.mark.parametrize("left", ["nothing", "an empty mount point"])
def test_a_folder_that_is_unmounted_later_is_an_unavailable_server(
    shared_of, open_at, sample, tmp_path, left
):
    """It was looked at once: later deletions were done in the empty mount point, and writes filled the local disk."""
    store = open_at(shared_of("file").url + "?timeout_s=60&retry_s=0.05")
    put(store, sample(1))
    share = (tmp_path / "share").rename(tmp_path / "share elsewhere")
    if left != "nothing":
        (tmp_path / "share").mkdir()
    with pytest.raises(RemoteError, match="mount it again"):
        store.delete_shared([sample(1)[0]])
    assert store.remote.find([wanted(*sample(1))]) == {}
    store.put(*sample(2))
    if left != "nothing":
        assert list((tmp_path / "share").iterdir()) == []
        (tmp_path / "share").rmdir()
    back = threading.Event()
    store.remote.call_when_available(back.set)
    share.rename(tmp_path / "share")
    assert back.wait(60) and store.remote.flush()
    assert set(store.remote.find([wanted(*sample(1)), wanted(*sample(2))])) == {sample(1)[0], sample(2)[0]}


def test_a_shared_folder_is_private(shared_of, open_at, sample, tmp_path):
    store = open_at(shared_of("file").url + PATIENT)
    put(store, sample(1))
    assert (tmp_path / "share" / "ragblend").stat().st_mode & 0o777 == 0o700


# --- what it must not give


def flipped(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


SPOILED = {
    "a bit of the header": lambda raw, _: flipped(raw, 60),
    "a bit of the magic": lambda raw, _: flipped(raw, 0),
    "shorter": lambda raw, _: raw[:-1],
    "longer": lambda raw, _: raw + b"\0",
    "only its header": lambda raw, _: raw[:128],
    "a byte": lambda raw, _: b"x",
    "other bytes": lambda raw, _: bytes(range(256)) * (len(raw) // 256 + 1),
    "another chunk's value": lambda _, other: other,
}


@pytest.mark.parametrize(("kind", "how"), list(zip(cycle(KINDS), SPOILED, strict=False)))
def test_a_damaged_header_is_a_miss_until_the_value_is_overwritten(
    shared_of, open_at, sample, same, kind, how
):
    shared = shared_of(kind)
    one, other = open_at(shared.url + PATIENT), open_at(shared.url + PATIENT)
    key, chunk = sample(1)
    put(one, (key, chunk))
    (name,) = shared.names.names()
    strange = b"".join(Blob.of(*sample(2)).pieces())
    shared.names.set(name, SPOILED[how](shared.names.get(name), strange))
    assert other.remote.find([wanted(key, chunk)]) == {} and other.remote.fetch(wanted(key, chunk)) is None
    stats = other.remote.stats()
    assert (stats.damaged, stats.hits, stats.errors) == (2, 0, 0) and other.remote.is_available
    put(other, (key, chunk))
    third = open_at(shared.url + PATIENT)
    assert same(read_whole(third.remote.find([wanted(key, chunk)])[key]), chunk)


def as_a_list(names, name):
    names._client.delete(name)
    names._client.rpush(name, "other")


@pytest.mark.parametrize(
    ("kind", "spoil"), [("s3", lambda names, name: names.set(name, b"")), ("redis", as_a_list)]
)
def test_an_empty_object_or_a_list_is_a_miss(shared_of, open_at, sample, kind, spoil):
    shared = shared_of(kind)
    one, other = open_at(shared.url + PATIENT), open_at(shared.url + PATIENT)
    put(one, sample(1))
    spoil(shared.names, shared.names.names()[0])
    assert other.remote.find([wanted(*sample(1))]) == {}
    assert other.remote.stats().errors == 0


def test_damage_of_a_layer_is_detected_when_it_is_read(shared, open_at, sample, same):
    one, other = open_at(shared.url + PATIENT), open_at(shared.url + PATIENT)
    key, chunk = sample(1, tokens=6)
    put(one, (key, chunk))
    (name,) = shared.names.names()
    raw = shared.names.get(name)
    with other.remote.find([wanted(key, chunk)])[key] as reader:
        shared.names.set(name, flipped(raw, reader.header.layer_offset(1) + 3))
        keys, values = torch.empty_like(chunk.keys[0]), torch.empty_like(chunk.values[0])
        reader.read_layer(0, keys, values)
        with pytest.raises(CorruptBlobError, match="layer 1"):
            reader.read_layer(1, keys, values)
        assert reader.is_lost and reader.blob is None
        with pytest.raises(CorruptBlobError):
            reader.read_layer(1, keys, values)
    stats = other.remote.stats()
    assert (stats.damaged, stats.hits) == (2, 0) and stats.misses == 1  # a hit that cannot be read is a miss
    assert other.remote.fetch(wanted(key, chunk)) is None


def test_a_value_deleted_between_two_layers_is_lost(shared, open_at, sample):
    one, other = open_at(shared.url + PATIENT), open_at(shared.url + PATIENT)
    key, chunk = sample(1)
    put(one, (key, chunk))
    with other.remote.find([wanted(key, chunk)])[key] as reader:
        one.delete_shared([key])
        with pytest.raises(RemoteError):
            read_whole(reader)
    assert other.remote.is_available and other.remote.stats().damaged == 0


def test_a_value_of_another_shape_tokens_or_start_is_a_miss(redis, open_at, sample):
    one, other = open_at(redis.url + PATIENT), open_at(redis.url + PATIENT)
    key, chunk = sample(1)
    put(one, (key, chunk))
    shaped = replace(chunk.geometry, layers=chunk.geometry.layers + 1)
    assert other.remote.find([Wanted(key, chunk.token_ids, shaped, chunk.start)]) == {}
    assert other.remote.find([Wanted(key, chunk.token_ids[::-1], chunk.geometry, chunk.start)]) == {}
    assert other.remote.find([Wanted(key, chunk.token_ids, chunk.geometry, chunk.start + 1)]) == {}


# --- servers that do not answer


def test_a_dead_server_is_asked_once_until_it_answers_again(redis, open_at, sample, same):
    put(open_at(redis.url + PATIENT), sample(1))
    with proxy_to(redis.port) as proxy:
        other = open_at(f"redis://127.0.0.1:{proxy.port}/0?timeout_s=60&retry_s=0.05")
        assert other.remote.find([wanted(*sample(1))])
        proxy.cut()
        back = threading.Event()
        for _ in range(5):
            assert other.remote.find([wanted(*sample(1))]) == {}
        assert other.remote.stats().errors == 1 and not other.remote.is_available
        with pytest.raises(RemoteError, match="cannot be used"):
            other.delete_shared([sample(1)[0]])
        other.put(*sample(2))  # waits
        other.remote.call_when_available(back.set)
        proxy.mend()
        assert back.wait(60) and other.remote.flush()
        assert other.remote.stats().errors == 1 and other.remote.find([wanted(*sample(1))])
    key, chunk = sample(2)
    assert same(read_whole(open_at(redis.url + PATIENT).remote.find([wanted(key, chunk)])[key]), chunk)


@pytest.mark.parametrize("kind", ["redis", "s3"])
def test_a_silent_server_costs_less_than_one_timeout(kind, shared_of, open_at, sample, monkeypatch):
    shared = shared_of(kind)
    with proxy_to(shared.port, most=0) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        url = f"redis://127.0.0.1:{proxy.port}/0" if kind == "redis" else shared.url
        store = open_at(url + "?timeout_s=0.4&retry_s=600")
        wants = [wanted(*sample(seed)) for seed in range(6)]
        assert store.remote.find(wants) == {}
        connections = proxy.connections
        for _ in range(5):
            assert store.remote.find(wants) == {} and store.remote.fetch(wants[0]) is None
        assert store.remote.stats().errors == 1 and proxy.connections == connections
        assert store.remote.stats().state == "no answer within 0.34 s"
    assert remote_module.LOOKUP_SHARE + remote_module.READ_SHARE < 1  # inside vLLM a prompt may pay for both


def test_lookups_that_block_others_have_a_shorter_timeout(redis, open_at, sample, monkeypatch):
    """vLLM's scheduler asks before any answer has its next token."""
    monkeypatch.setattr(remote_module, "MAX_LOOKUP_S", 0.2)
    for timeout_s, waited in (600, "0.2"), (1, "0.1"):
        with proxy_to(redis.port, most=0) as proxy:
            store = open_at(f"redis://127.0.0.1:{proxy.port}/0?timeout_s={timeout_s}&retry_s=600")
            assert store.remote.has([sample(1)[0]]) == set()
            assert store.remote.stats().state == f"no answer within {waited} s"


def test_a_server_that_dies_during_a_read_fails_all_readers(redis, open_at, sample):
    one = open_at(redis.url + PATIENT)
    samples = [sample(seed, tokens=256, geometry=LARGE) for seed in range(3)]
    put(one, *samples)
    with proxy_to(redis.port, most=1 << 20, cuts=True) as proxy:
        store = open_at(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}")
        with ExitStack() as readers:
            found = store.remote.find([wanted(*each) for each in samples])
            for reader in found.values():
                readers.enter_context(reader)
            with pytest.raises(RemoteError):
                read_whole(found[samples[0][0]])
            assert len(found) == 3 and all(reader.is_lost for reader in found.values())
            for key, _ in samples:
                with pytest.raises(RemoteError):
                    read_whole(found[key])
        assert store.remote.stats().errors == 1


def test_values_that_would_arrive_late_are_not_requested(redis, open_at, sample):
    """At 100 kB/s: what was read says how much fits, and a value beyond that is left where it is."""
    one = open_at(redis.url + PATIENT)
    small, large = sample(1, tokens=8, geometry=LARGE), sample(2, tokens=1024, geometry=LARGE)
    put(one, small, large)
    with proxy_to(redis.port, bytes_per_s=1e5) as proxy:
        store = open_at(f"redis://127.0.0.1:{proxy.port}/0?timeout_s=20")
        assert store.remote.fits(large[1].nbytes)  # nothing is known
        assert store.remote.fetch(wanted(*small)) is not None
        assert store.remote.bytes_per_s <= 1.1e5
        passed = proxy.passed
        assert store.remote.fetch(wanted(*large)) is None
        assert proxy.passed == passed and store.remote.stats().errors == 0


class BadServer:
    """Answers for a beginning once more is asked for, is silent about that, goes away at what is written."""

    def __init__(self, place):
        self.is_silent = asyncio.Event()

    async def read(self, name, start, nbytes):
        if start:
            self.is_silent.set()
            await asyncio.Event().wait()
        await self.is_silent.wait()
        return bytes(nbytes)

    async def write(self, name, content):
        raise ConnectionResetError

    async def check(self):
        pass

    async def close(self):
        pass


@pytest.mark.parametrize("came", [0, 1000])
def test_a_silent_server_does_not_change_the_throughput(monkeypatch, came):
    """It was, for five minutes in which the server was back: about 0, or what came by all the time waited."""
    monkeypatch.setattr(remote_module, "server_at", BadServer)
    with closing(Remote(Place.of(f"redis://host{PATIENT}"), lambda _: None, lambda _: False)) as remote:
        begun = time.monotonic()
        beginning = remote.begin_read("name", 0, came, begun + 60) if came else None
        silent = remote.begin_read("name", 1, 1, begun + 0.1)
        if beginning is not None:
            beginning.result()
        slowest = came / (time.monotonic() - begun)
        with pytest.raises(RemoteError):
            silent.result()
        assert remote.bytes_per_s >= slowest if came else remote.bytes_per_s is None


def test_a_value_whose_write_fails_twice_is_dropped(monkeypatch):
    """It may be why: else it would be left alone for its sake for ever."""
    monkeypatch.setattr(remote_module, "server_at", BadServer)
    place = Place.of(f"redis://host{PATIENT}&retry_s=0.01")
    with closing(Remote(place, lambda _: b"value", lambda _: True)) as remote:
        remote.queue_write(ChunkKey("ab" * 32))
        until(lambda: remote.stats().dropped)
        stats = remote.stats()
        assert (stats.errors, stats.waiting, stats.dropped, stats.written_bytes) == (2, 0, 1, 0)


def test_a_deletion_is_tried_again_at_a_server_that_answers(redis, monkeypatch):
    """A value that was being written could not be deleted, and nothing tried again until the next failure."""
    back = threading.Event()
    with closing(Remote(Place.of(f"{redis.url}?retry_s=0.01"), lambda _: b"value", lambda _: True)) as remote:
        remote.check()
        assert remote.is_available
        called = []
        remote.call_when_available(lambda: called.append("first"), "delete")
        remote.call_when_available(lambda: called.append("last"), "delete")
        remote.call_when_available(back.set)
        assert back.wait(60) and called == ["last"]


def test_an_unreadable_value_does_not_stop_the_writer(redis, monkeypatch):
    """The writer's thread ended: nothing was written any more, and closing waited for it."""
    spoiled, whole = ChunkKey("ab" * 32), ChunkKey("cd" * 32)

    def content(key):
        if key == spoiled:
            raise MemoryError
        return b"value"

    with closing(Remote(Place.of(redis.url + PATIENT), content, lambda _: True)) as remote:
        remote.queue_write(spoiled)
        remote.queue_write(whole)
        assert remote.flush()
        stats = remote.stats()
        assert (stats.waiting, stats.dropped, stats.written_bytes) == (0, 1, 5)


def test_a_full_server_refuses_writes_and_serves_reads(redis_server, open_at, sample, same):
    redis = redis_server("--maxmemory", "9mb", "--maxmemory-policy", "noeviction")
    store, other = open_at(redis.url() + PATIENT), open_at(redis.url() + PATIENT)
    samples = [sample(seed, tokens=128, geometry=LARGE) for seed in range(16)]  # 1 MB each
    for each in samples:
        store.put(*each)
    store.remote.flush()
    stats = store.remote.stats()
    assert stats.refused >= 7 and (stats.errors, stats.dropped) == (0, 0) and store.stats().entries == 16
    found = other.remote.find([wanted(*each) for each in samples])
    assert 1 <= len(found) == 16 - stats.refused
    for key, chunk in samples:
        if key in found:
            assert same(read_whole(found[key]), chunk)


# --- secrets


def test_tenants_with_different_salts_share_no_names(redis, open_at, sample, monkeypatch):
    key, chunk = sample(1)
    for salt in ("one tenant's", "another tenant's"):
        monkeypatch.setenv("RAGBLEND_REMOTE_SALT", salt)
        store = open_at(redis.url + PATIENT)
        assert store.remote.find([wanted(key, chunk)]) == {}
        put(store, (key, chunk))
    names = redis.names.names()
    assert len(names) == 2 and not any(key.digest in name for name in names)
    assert open_at(redis.url + PATIENT).remote.find([wanted(key, chunk)])


def test_the_password_comes_from_the_environment_and_is_never_logged(
    redis_server, open_at, sample, monkeypatch, caplog
):
    redis = redis_server("--requirepass", "the-right-secret")
    monkeypatch.setenv("REDIS_PASSWORD", "the-right-secret")
    put(open_at(redis.url() + PATIENT), sample(1))
    assert len(RedisNames(redis, password="the-right-secret").names()) == 1
    monkeypatch.setenv("REDIS_PASSWORD", "a-wrong-secret")
    with caplog.at_level(logging.DEBUG):
        store = open_at(redis.url() + PATIENT)
        assert store.remote.find([wanted(*sample(1))]) == {}
        with pytest.raises(RemoteError) as refused:
            store.delete_shared([sample(1)[0]])
    told = caplog.text + str(refused.value) + repr(refused.value.__cause__) + str(store.remote.stats())
    assert "is not used" in told and "secret" not in told and store.remote.stats().errors == 1


def test_tls_certificates_are_verified(redis_server, open_at, sample, tmp_path, monkeypatch):
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    try:
        command = [*line.split(), "-keyout", "key.pem", "-out", "cert.pem"]
        made = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("no openssl")
    assert made.returncode == 0, made.stderr
    port, cert, key = free_port(), tmp_path / "cert.pem", tmp_path / "key.pem"
    paths = ["--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    redis_server("--tls-port", str(port), *paths, "--tls-auth-clients", "no")
    url = f"rediss://127.0.0.1:{port}/0{PATIENT}"
    store = open_at(url)
    store.put(*sample(1))
    store.remote.flush()
    assert "certificate" in store.remote.stats().state.lower()
    monkeypatch.setenv("SSL_CERT_FILE", str(cert))
    put(open_at(url), sample(1))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("redis://user:hunter2@host:6379/0", "environment"),
        ("redis://:hunter2@host", "environment"),
        ("s3://hunter2:hunter2@bucket", "environment"),
        ("redis://host/0?timeout_s=hunter2", "timeout_s"),
        ("redis://host/0?timeout_s=0", "timeout_s"),
        ("redis://host/0?namespace=hunter2/../x", "namespace"),
        ("redis://host/0?pasword=hunter2", "pasword"),
        ("redis://host:hunter2/0", "cannot be read"),
        ("http://hunter2", "must begin with"),
        ("redis:///0", "host, bucket or folder"),
        ("file://host/mnt", "host, bucket or folder"),
        ("file:///", "host, bucket or folder"),
        ("hunter2", "must begin with"),
    ],
)
def test_invalid_urls_are_refused_without_repeating_them(url, said, tmp_path):
    with pytest.raises(UsageError, match=said) as refused:
        KVStore.open(tmp_path / "kv", GENEROUS, remote=url)
    assert "hunter2" not in str(refused.value)


def test_a_missing_library_is_reported_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(UsageError, match=r"pip install \S+\[remote\]"):
        KVStore.open(tmp_path / "kv", GENEROUS, remote="redis://host:6379/0")


def test_names_hold_the_format_and_the_digest():
    key = ChunkKey("ab" * 32)
    assert name_at(Place.of("redis://h/0"), key) == f"ragblend:v2:ab:{key.digest}"
    assert name_at(Place.of("s3://b/x?namespace=team"), key) == f"team/v2/ab/{key.digest}"


def test_closing_fails_running_reads_and_may_be_repeated(redis, open_at, sample):
    put(open_at(redis.url + PATIENT), sample(1))
    with proxy_to(redis.port) as proxy:
        other = open_at(f"redis://127.0.0.1:{proxy.port}/0{PATIENT}")
        with other.remote.find([wanted(*sample(1))])[sample(1)[0]] as reader:
            proxy.most = proxy.passed
            reader.expect(0)  # which does not come
            other.close()
            other.close()
            for _ in range(2):
                with pytest.raises(RemoteError):
                    read_whole(reader)
    assert list(value_files(other.root)) == []


class Contended:
    """A re-entrant lock. waited: threads that could not have it at once."""

    def __init__(self):
        self._lock, self.waited = threading.RLock(), set()
        self._release_save, self._acquire_restore = self._lock._release_save, self._lock._acquire_restore
        self._is_owned, self.release = self._lock._is_owned, self._lock.release

    def acquire(self, *given):
        if self._lock.acquire(blocking=False):
            return True
        self.waited.add(threading.get_ident())
        return self._lock.acquire(*given)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


def test_a_request_that_begins_while_the_store_is_closed_ends(tmp_path, sample, monkeypatch):
    """Handed to the loop after its end it waited for ever, and with it the thread of an `encode`."""
    lock, hand_over = Contended(), asyncio.run_coroutine_threadsafe
    monkeypatch.setattr(threading, "Condition", lambda made=threading.Condition: made(lock))
    remote = Remote(Place.of(f"file://{tmp_path}"), lambda key: None, lambda key: False)
    monkeypatch.undo()
    closer = threading.Thread(target=remote.close)

    def closed_before(work, loop):
        monkeypatch.undo()
        closer.start()
        until(lambda: closer.ident in lock.waited or not closer.is_alive())
        return hand_over(work, loop)

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", closed_before)
    assert remote.has([sample(1)[0]]) == set()
    closer.join()


def test_an_answer_in_the_last_turn_of_the_loop_is_handed_over(monkeypatch):
    """The loop stopped before: the request's thread waited for ever."""
    asked, is_ending, hand_over = threading.Event(), threading.Event(), asyncio.run_coroutine_threadsafe

    class AnswersLast(BadServer):
        async def check(self):
            answer = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(answer.set_result, None)
            asked.set()
            assert is_ending.wait(60)  # no turn of the loop passes meanwhile
            await answer

    def handed_over(work, loop):
        future = hand_over(work, loop)
        if asked.is_set():
            is_ending.set()
        return future

    monkeypatch.setattr(remote_module, "server_at", AnswersLast)
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", handed_over)
    remote = Remote(Place.of(f"redis://host{PATIENT}"), lambda _: None, lambda _: False)
    asking = started(remote.check)
    assert asked.wait(60)
    remote.close()
    until(lambda: not asking.is_alive(), timeout_s=60)


def test_error_messages_hold_no_secrets(monkeypatch):
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    said = safe_message(ValueError("could not log in as hunter2\nwith hunter2"))
    assert said == "ValueError: could not log in as ***"
    assert safe_message(TimeoutError()) == "TimeoutError"


class Deleting(BadServer):
    """Deletes no more than 100 names within a time-out, and writes when it is told to."""

    def __init__(self, place):
        super().__init__(place)
        self.deleted, self.writes = [], asyncio.Event()

    async def write(self, name, content):
        await self.writes.wait()

    async def delete(self, names):
        if len(names) > 100:
            raise TimeoutError
        self.deleted += names


def test_large_deletions_are_split_into_batches(monkeypatch):
    """All at once took longer than the time-out, and nobody read there any more; then it was begun anew."""
    monkeypatch.setattr(remote_module, "server_at", Deleting)
    with closing(Remote(Place.of(f"redis://host{PATIENT}"), lambda _: None, lambda _: False)) as remote:
        keys = [ChunkKey(f"{number:064x}") for number in range(300)]
        remote.delete(keys)
        assert len(remote._server.deleted) == 300 and remote.is_available


def test_a_running_write_does_not_delay_other_deletions(monkeypatch):
    monkeypatch.setattr(remote_module, "server_at", Deleting)
    keys = [ChunkKey(f"{number:064x}") for number in range(3)]
    with closing(
        Remote(Place.of("redis://host?timeout_s=0.2"), lambda _: b"value", lambda _: False)
    ) as remote:
        remote.queue_write(keys[1])
        until(lambda: remote._writing == keys[1])
        with pytest.raises(RemoteError, match="being written"):
            remote.delete(keys)
        assert len(remote._server.deleted) == 2
        remote._loop.call_soon_threadsafe(remote._server.writes.set)
        assert remote.flush()
        assert len(set(remote._server.deleted)) == 3, "by the writer, as it is stored here no more"


@pytest.mark.parametrize("answer", [(b"twelve", b"x" * 12), (12, 7), (12, [])])
def test_a_server_that_is_not_redis_is_reported(answer):
    server = _Redis(Place.of("redis://host"))
    with pytest.raises(ConnectionError, match="not Redis"):
        server._head(*answer)
    server._client.getrange = AsyncMock(return_value=[1, 2])
    with pytest.raises(ConnectionError, match="not Redis"):
        asyncio.run(server.read("name", 0, 9))
