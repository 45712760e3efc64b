"""Remote: the tier below the disk, where engines on several machines share values.

It holds the same self-checking blobs under their keys' names, read layer by layer. It is a cache that may be wrong,
slow, full or gone: values are verified like any blob, a prompt's wait is limited, and after a failure it is not used
for a while, and then retried in the background. After a `put` values are copied there from the disk, and deletions
apply there too. One thread runs an event loop for all network traffic.
"""

import asyncio
import atexit
import hmac
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ragblend.kvstore.blob import Blob, BlobDamage, BlobHeader, check_header, read_header
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.chunks import Geometry
from ragblend.kvstore.codec import Source
from ragblend.kvstore.counters import Counters
from ragblend.kvstore.errors import CorruptBlobError, RemoteError
from ragblend.kvstore.files import Closing
from ragblend.kvstore.keys import FORMAT_VERSION, ChunkKey
from ragblend.kvstore.places import SALT_VARIABLE, Place, safe_message
from ragblend.kvstore.servers import Refused, Server, server_at

log = logging.getLogger(__name__)
RATE_S = 300.0  # how long a measured throughput is valid
# Shares of the timeout: for look-ups that block others, and for reading for one prompt. The rest is for cancelling
# reads, and for the layer that is being computed when the time runs out: a prompt that lost a value starts again within
# the timeout.
PEEKING, READING = 0.1, 0.85
PEEK_S = 0.5  # whatever the timeout is
IN_FLIGHT = 16  # concurrent reads; others wait in the order of use
WAITING = 1024  # limit of values waiting to be written; only their names are held
WRITE_S = 30.0  # for one value, in the background
DELETED_AT_ONCE = 100
FLUSH_S = 30.0  # time to write when the store is closed
T = TypeVar("T")


def name_at(place: Place, key: ChunkKey) -> str:
    """The name of a value: an HMAC if this tenant has a secret, so that nobody else can compute it."""
    digest, salt = key.digest, os.environ.get(SALT_VARIABLE)
    if salt:
        digest = hmac.new(salt.encode(), bytes.fromhex(digest), "sha256").hexdigest()
    parts = place.namespace, f"v{FORMAT_VERSION}", digest[:2], digest
    return (":" if place.scheme.startswith("redis") else "/").join(parts)


class Wanted(NamedTuple):
    """A wanted value (encoded alone), with everything to verify it by."""

    key: ChunkKey
    token_ids: tuple[int, ...]
    geometry: Geometry
    start: int

    @property
    def header_nbytes(self) -> int:
        return BlobHeader(self.key, self.token_ids, self.start, self.geometry, ()).nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of its raw KV."""
        return len(self.token_ids) * self.geometry.token_bytes


@dataclass(frozen=True)
class RemoteStats:
    """This process's use of a shared store. where: its URL without options; state: untried, available, or why it is not
    used; waiting: values still to be written; dropped: values that will not be written; refused: values that the server
    rejected.
    """

    where: str
    state: str
    hits: int
    misses: int
    damaged: int
    errors: int
    read_bytes: int
    written_bytes: int
    waiting: int
    dropped: int
    refused: int
    bytes_per_s: float | None


class Remote(Closing):
    """Thread-safe. Connects on first use.

    Methods raise for a failing server only if their docstring says so. content: returns the bytes of a value on the
    disk, None if absent; stored: whether the disk still has it.
    """

    name = "remote"  # as a tier

    def __init__(
        self,
        place: Place,
        content: Callable[[ChunkKey], bytes | None],
        stored: Callable[[ChunkKey], bool],
    ) -> None:
        self.place, self._content, self._stored = place, content, stored
        self.counters, self._tally = Counters(), Counter[str]()
        self._server: Server = server_at(place)
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[ChunkKey, bool] = {}  # queue to write; value: whether it was tried before
        self._writing: ChunkKey | None = None
        self._state = "untried"
        self._away = self._ending = self._closed = False
        self._writer: threading.Thread | None = None
        self._runner: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._returned: dict[Hashable, Callable[[], None]] = {}
        # Used only in the event loop: running reads, since when, and bytes received until when.
        self._in_flight = asyncio.Semaphore(IN_FLIGHT)
        self._reads, self._since, self._received, self._until = 0, 0.0, 0, 0.0
        self._moved = 0.0, 0.0, -math.inf  # bytes, seconds, and when measured

    # --- reading

    @property
    def is_available(self) -> bool:
        """Whether it is used: False for a while after a failure."""
        return not (self._away or self._closed)

    @property
    def _reading_s(self) -> float:
        return READING * self.place.timeout_s

    @property
    def bytes_per_s(self) -> float | None:
        """The recent throughput of all readers together; None if unknown."""
        moved, took, at = self._moved
        return moved / max(took, 1e-6) if time.monotonic() - at < RATE_S else None

    def fits(self, nbytes: int) -> bool:
        """Whether this many bytes would arrive in time for a prompt, as far as the throughput is known."""
        rate = self.bytes_per_s
        return rate is None or nbytes <= rate * self._reading_s

    def find(self, wanted: Sequence[Wanted]) -> "dict[ChunkKey, RemoteReader]":
        """Readers of the wanted values that exist and match, by key. All headers are requested at once.

        This and all reads by these readers together take at most READING of the place's timeout.
        """
        deadline = time.monotonic() + self._reading_s
        names = [name_at(self.place, each.key) for each in wanted]
        lead = max((each.header_nbytes for each in wanted), default=0)
        try:
            heads = self._ask(lambda server: server.peek(names, lead), self._reading_s) if names else []
        except RemoteError:
            return {}
        found = {}
        for each, name, head in zip(wanted, names, heads, strict=True):
            if head is None:
                self.counters.add(misses=1)
                continue
            try:
                header = read_header(lambda nbytes, at: head[0][at : at + nbytes], head[1])  # noqa: B023
                check_header(header, each.key, each.token_ids, each.geometry, each.start, None)
            except CorruptBlobError as damage:
                self.spoiled(each.key, str(damage))
            else:
                self.counters.add(hits=1)
                found[each.key] = RemoteReader(self, name, header, deadline)
        return found

    def has(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """The keys that exist there; none if it does not answer quickly, because other work waits for this."""
        names = [name_at(self.place, key) for key in keys]
        limit_s = min(PEEK_S, PEEKING * self.place.timeout_s)
        try:
            heads = self._ask(lambda server: server.peek(names, 1), limit_s) if names else []
        except RemoteError:
            return set()
        return {key for key, head in zip(keys, heads, strict=True) if head is not None}

    def fetch(self, wanted: Wanted) -> Blob | None:
        """A whole value, verified; None if it is absent, damaged or late."""
        reader = None
        if self.is_available and self.fits(wanted.nbytes):
            reader = self.find([wanted]).get(wanted.key)
        if reader is None:
            return None
        with reader, suppress(RemoteError, CorruptBlobError):
            reader.read_all()
        return reader.blob

    def begin_read(self, name: str, start: int, nbytes: int, deadline: float) -> "Future[Any]":
        """Start reading a range of a value; RemoteError if it has not arrived by `deadline` (of `time.monotonic`)."""
        return self._start(lambda: self._read(name, start, nbytes, deadline))

    def spoiled(self, key: ChunkKey, why: str) -> None:
        """Count a damaged value. It stays there until it is overwritten."""
        self.counters.add(quarantined=1)
        log.warning("KV of chunk %s at %s is not used: %s", key.digest[:12], self.place, why)

    def _ask(self, work: Callable[[Server], Awaitable[T]], limit_s: float | None = None) -> T:
        """Run a request. Raises RemoteError, at once while it is not used, else after the limit at most; Refused."""
        if not self.is_available:
            raise self._error(self._state)
        seconds = self.place.timeout_s if limit_s is None else limit_s
        try:
            return self._start(lambda: self._within(work, seconds)).result()
        except CancelledError:
            raise self._error("it has been closed") from None

    async def _within(self, work: Callable[[Server], Awaitable[T]], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s):
                found = await work(self._server)
        except Refused:
            raise
        except Exception as error:
            raise self._failed(error, limit_s) from None
        self._answered()
        return found

    async def _read(self, name: str, start: int, nbytes: int, deadline: float) -> Any:
        if not self.is_available:
            raise self._error(self._state)
        if not self._reads:
            self._since, self._received = time.monotonic(), 0
        self._reads += 1
        try:
            async with asyncio.timeout_at(deadline):  # the loop's clock is `time.monotonic`
                async with self._in_flight:
                    found = await self._server.read(name, start, nbytes)
            self._received, self._until = self._received + len(found), time.monotonic()
            return found
        except Exception as error:
            raise self._failed(error, self._reading_s) from None
        finally:
            self._reads -= 1
            if not self._reads and self._received:  # silence tells nothing about the later throughput
                self._measured(self._received, self._until - self._since)

    def _measured(self, nbytes: int, seconds: float) -> None:
        """Record bytes that arrived during reads; earlier measurements lose half their weight each time."""
        moved, took, _ = self._moved if self.bytes_per_s is not None else (0.0, 0.0, 0.0)
        self._moved = moved / 2 + nbytes, took / 2 + seconds, time.monotonic()
        with self._changed:
            self._tally["read_bytes"] += nbytes

    # --- failures

    def _error(self, why: str) -> RemoteError:
        return RemoteError(f"the shared store at {self.place} cannot be used: {why}")

    def _answered(self) -> None:
        with self._changed:
            if not self._away:  # else this request began before the failure
                self._state = "available"

    def _failed(self, error: Exception, limit_s: float) -> RemoteError:
        """In the loop: stop using it, and retry later."""
        is_late = isinstance(error, TimeoutError)
        why = f"no answer within {limit_s:.3g} s" if is_late else safe_message(error)
        with self._changed:
            was_away, self._away, self._state = self._away, True, why
            self._tally["errors"] += not was_away
            self._changed.notify_all()
        if not was_away:
            said = "the shared store at %s is not asked for %.0f s: %s"
            log.warning(said, self.place, self.place.retry_s, why)
            self._try_later()
        return self._error(why)

    def _try_later(self) -> None:
        self._loop.call_later(self.place.retry_s, lambda: self._loop.create_task(self._try_again()))

    async def _try_again(self) -> None:
        """Retry in the background, so that a server that is still down delays no request."""
        try:
            async with asyncio.timeout(self.place.timeout_s):
                await self._server.check()
        except Exception:
            self._try_later()
            return
        log.info("the shared store at %s answers again", self.place)
        with self._changed:
            self._away, self._state = False, "available"
            self._changed.notify_all()
        self._call_returned()

    def _call_returned(self) -> None:
        with self._changed:
            returned = {} if self._away else self._returned
            self._returned = self._returned if self._away else {}
        for call in returned.values():
            call()

    def when_back(self, call: Callable[[], None], name: Hashable = None) -> None:
        """Register a short callback for when the server answers again; a later one of the same name replaces it.

        If it does answer, they are called after the same wait as for one that does not.
        """
        with self._changed:
            is_first, self._returned[name or call] = not self._returned, call
            if is_first and not self._away and self._runner is not None and not self._closed:
                later = self.place.retry_s, self._call_returned
                self._loop.call_soon_threadsafe(self._loop.call_later, *later)

    # --- writing in the background

    def offer(self, key: ChunkKey, tried: bool = False) -> None:
        """Queue a value to be written, unless too many are waiting. tried: a first attempt has failed."""
        with self._changed:
            if (len(self._waiting) >= WAITING and not tried) or self._closed:
                self._tally["dropped"] += 1
                return
            self._waiting[key] = tried or self._waiting.get(key, False)
            self._changed.notify_all()
            if self._writer is None:
                self._writer = threading.Thread(
                    target=self._write_all, name="ragblend-remote-write", daemon=True
                )
                self._writer.start()

    def withdraw(self, keys: Sequence[ChunkKey]) -> None:
        """Delete these values there, and do not write them later. Raises RemoteError if that is not certain."""

        def gone() -> bool:
            for key in keys:
                self._waiting.pop(key, None)  # one that was being written may be queued again
            return self._writing not in keys

        with self._changed:
            written = None if gone() else self._writing
        self._delete([key for key in keys if key != written])
        if written is None:
            return
        with self._changed:
            if not self._changed.wait_for(gone, self.place.timeout_s):
                raise self._error("one of them is being written")
        self._delete([written])

    def _delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete in batches that a working server handles within the timeout."""
        names = [name_at(self.place, key) for key in keys]
        for begin in range(0, len(names), DELETED_AT_ONCE):
            some = names[begin : begin + DELETED_AT_ONCE]
            self._ask(lambda server, some=some: server.delete(some))  # type: ignore[misc]

    def sweep(self) -> int:
        """Delete values older than the TTL, unless the server does that; returns how many. Raises RemoteError."""
        return self._ask(lambda server: server.sweep(), WRITE_S)

    def check(self) -> None:
        """Find out whether the server answers, if that is unknown; `stats` then shows it."""
        with suppress(RemoteError):
            self._ask(lambda server: server.check())

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._ending or (self._waiting and self.is_available))
                if not (self._waiting and self.is_available):
                    return
                self._writing = next(iter(self._waiting))
                tried = self._waiting.pop(self._writing)
            what = self._write(self._writing, tried)
            with self._changed:
                self._tally.update(what)

    def _write(self, key: ChunkKey, tried: bool) -> dict[str, int]:
        """Write a value; returns increments of counters. If the server fails, the value is queued once more only,
        because it may be the cause.

        An attempt may have written it: if it is no longer stored here, it must be deleted there.
        """
        name = name_at(self.place, key)
        try:
            content = self._content(key)
            if content is None and not tried:  # evicted or deleted meanwhile
                return {}
            if content is not None:
                self._ask(lambda server: server.write(name, content), WRITE_S)
            if not self._stored(key):  # deleted by another process while it was written or queued
                self._ask(lambda server: server.delete([name]))
        except RemoteError:
            if tried and self._stored(key):
                return {"dropped": 1}
            self.offer(key, tried=True)
            return {}
        except Refused:
            return {"refused": 1}
        except Exception:  # affects only this value: the others are still written
            log.warning("KV of chunk %s is not shared", key.digest[:12], exc_info=True)
            return {"dropped": 1}
        return {"written_bytes": len(content or b"")}

    # --- starting and closing

    def stats(self) -> RemoteStats:
        counts = self.counters.counts
        with self._changed:
            names = ("errors", "read_bytes", "written_bytes", "dropped", "refused")
            tally = {name: self._tally[name] for name in names}
            return RemoteStats(
                where=str(self.place), state=self._state, hits=counts.hits, misses=counts.misses,
                damaged=counts.quarantined, waiting=len(self._waiting), bytes_per_s=self.bytes_per_s, **tally,
            )  # fmt: skip

    def _start(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run it in the loop, which is started if necessary. Raises RemoteError if that is closed.

        The lock is held until the loop has it, else `close` could stop the loop before, and nobody would end it.
        """
        with self._changed:
            if self._closed:
                raise self._error("it has been closed")
            if self._runner is None:
                self._loop = asyncio.new_event_loop()
                atexit.register(self.close)
                self._runner = threading.Thread(
                    target=self._loop.run_forever, name="ragblend-remote", daemon=True
                )
                self._runner.start()
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until the queue is written; False if that takes too long, or the server is not used."""

        def over() -> bool:
            return self._writing is None and not (self._waiting and self.is_available)

        with self._changed:
            return self._changed.wait_for(over, timeout_s) and not self._waiting

    def close(self) -> None:
        """Write the queue for a while, and close. Idempotent. Open readers then raise RemoteError."""
        atexit.unregister(self.close)
        if self.is_available:
            self.flush()
        if self._waiting:
            said = "%d values were not written to the shared store at %s"
            log.warning(said, len(self._waiting), self.place)
        with self._changed:
            if self._closed:
                return
            self._closed = self._ending = True
            self._waiting.clear()
            self._changed.notify_all()
            runner = self._runner
        if runner is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop)
            runner.join()
            self._loop.close()
        if self._writer is not None:
            self._writer.join()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        with suppress(Exception):
            async with asyncio.timeout(1.0):
                await self._server.close()
        await asyncio.sleep(0)  # what has just ended tells its threads in the next turn
        self._loop.stop()


class RemoteReader(Source):
    """A value of a shared store, its header verified. Layers are kept once read, for a retry and for storing them here.

    Raises RemoteError for a layer that has not arrived by `deadline`, CorruptBlobError for a damaged one.
    """

    tier, in_memory = "remote", False

    def __init__(self, remote: Remote, name: str, header: BlobHeader, deadline: float) -> None:
        self.header, self.token_ids, self.start = header, header.token_ids, header.start
        self.geometry, self.codec = header.geometry, header.codec
        self._remote, self._name, self._deadline = remote, name, deadline
        self._guard = threading.Lock()
        self._coming: dict[int, Future[Any]] = {}
        self._layers: dict[int, Tensor] = {}
        self._failed = False

    def expect(self, layer: int) -> None:
        with self._guard:
            if layer not in self._coming:
                at, nbytes = self.header.layer_offset(layer), self.header.layer_nbytes
                self._coming[layer] = self._remote.begin_read(self._name, at, nbytes, self._deadline)

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.codec.unpack(self._layer(layer), self.geometry, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        packed.copy_(self._layer(layer))

    def read_all(self) -> None:
        """Read every layer."""
        for layer in range(self.geometry.layers):
            self.expect(layer)
        for layer in range(self.geometry.layers):
            self._layer(layer)

    def _layer(self, layer: int) -> Tensor:
        """(layer bytes,) uint8, verified."""
        if layer not in self._layers:
            try:
                self.expect(layer)
                content = np.frombuffer(self._coming[layer].result(), dtype=np.uint8)
                self._check(layer, content)
            except CancelledError:
                self._failed = True
                raise RemoteError(f"reading {self._name} after its reader was closed") from None
            except (RemoteError, CorruptBlobError):
                self._fail()
                raise
            self._layers[layer] = torch.from_numpy(content.copy())
        return self._layers[layer]

    def _fail(self) -> None:
        """Turn the counted hit into a miss, once."""
        with self._guard:
            failed_before, self._failed = self._failed, True
        if not failed_before:
            self._remote.counters.add(hits=-1, misses=1)

    def _check(self, layer: int, content: Any) -> None:
        if not content.nbytes:
            raise RemoteError(
                f"KV of chunk {self.header.key.digest[:12]} is not at {self._remote.place} any more"
            )
        if content.nbytes == self.header.layer_nbytes and crc32(content) == self.header.layer_crcs[layer]:
            return
        what = f"layer {layer} has {content.nbytes} bytes, or does not match its checksum"
        self._remote.spoiled(self.header.key, what)
        raise BlobDamage("bad-layer", f"reading KV from {self._remote.place}: {what}")

    @property
    def is_lost(self) -> bool:
        """Whether reading to the end is known to fail."""
        late = time.monotonic() >= self._deadline or not self._remote.is_available
        return self._failed or (late and len(self._layers) < self.geometry.layers)

    @property
    def blob(self) -> Blob | None:
        """The whole value, if every layer was read."""
        if len(self._layers) < self.geometry.layers:
            return None
        return Blob(self.header, tuple((self._layers[layer],) for layer in range(self.geometry.layers)))

    def close(self) -> None:
        with self._guard:
            for each in self._coming.values():
                each.cancel()
