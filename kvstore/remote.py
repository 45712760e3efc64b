"""Remote: the tier below the disk, where engines on several machines share values.

It holds the same self-checking blobs, named after their keys and read layer by layer. It is a cache that may be wrong,
slow, full or gone: values are verified like any blob, the time that a prompt waits is limited, and after a failure it
is not used for a while, and then retried in the background. After a `put` values are copied there from the disk, and
deletions apply there too. One thread runs an event loop for all network traffic.
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
THROUGHPUT_VALID_S = 300.0  # how long a measured throughput is used
# Shares of the place's timeout: for look-ups that other requests wait for, and for all reads of one prompt. The rest is
# for cancelling reads, and for the layer that is being computed when the time runs out: a prompt that lost a value
# starts again within the timeout.
LOOKUP_SHARE, READ_SHARE = 0.1, 0.85
MAX_LOOKUP_S = 0.5  # even if the share of the timeout is longer
MAX_CONCURRENT_READS = 16  # further reads wait in the order of use
MAX_QUEUED = 1024  # values waiting to be written; only their keys are held
WRITE_TIMEOUT_S = 30.0  # for one value, in the background
DELETE_BATCH = 100
FLUSH_TIMEOUT_S = 30.0  # for writing the queue when the store is closed
T = TypeVar("T")


def name_at(place: Place, key: ChunkKey) -> str:
    """The name of a value there: an HMAC if this tenant has a secret, so that nobody else can compute it."""
    digest, salt = key.digest, os.environ.get(SALT_VARIABLE)
    if salt:
        digest = hmac.new(salt.encode(), bytes.fromhex(digest), "sha256").hexdigest()
    parts = place.namespace, f"v{FORMAT_VERSION}", digest[:2], digest
    return (":" if place.scheme.startswith("redis") else "/").join(parts)


class Wanted(NamedTuple):
    """A value to look up, of a passage encoded alone, with what is verified."""

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
    """This process's use of a shared store.

    where: its URL without options; state: untried, available, or why it is not used; waiting: values still to be
    written; dropped: values that will not be written; refused: values that the server rejected.
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
    """A shared store as a tier. Thread-safe. Connects on first use.

    Methods raise for a failing server only if their docstring says so. read_file: returns the bytes of a value on the
    disk, None if it is absent; is_stored: whether the disk still has it.
    """

    name = "remote"  # as a tier

    def __init__(
        self,
        place: Place,
        read_file: Callable[[ChunkKey], bytes | None],
        is_stored: Callable[[ChunkKey], bool],
    ) -> None:
        self.place, self._read_file, self._is_stored = place, read_file, is_stored
        self.counters, self._tally = Counters(), Counter[str]()
        self._server: Server = server_at(place)
        self._changed = threading.Condition()  # guards the following
        self._queue: dict[ChunkKey, bool] = {}  # values to write; whether this is the second attempt
        self._writing: ChunkKey | None = None
        self._state = "untried"
        self._is_suspended = self._closed = False
        self._write_thread: threading.Thread | None = None
        self._loop_thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._when_available: dict[Hashable, Callable[[], None]] = {}
        # Used only in the event loop: the number of running reads, when the first of them began, the bytes received
        # since then, and when the last of these arrived.
        self._read_slots = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._reads, self._reads_began, self._received_bytes, self._last_arrival = 0, 0.0, 0, 0.0
        self._throughput = 0.0, 0.0, -math.inf  # bytes, seconds, and when it was measured

    # --- reading

    @property
    def is_available(self) -> bool:
        """False for a while after a failure, and after closing."""
        return not (self._is_suspended or self._closed)

    @property
    def _read_timeout_s(self) -> float:
        return READ_SHARE * self.place.timeout_s

    @property
    def bytes_per_s(self) -> float | None:
        """The recent throughput of all readers together; None if unknown."""
        nbytes, seconds, measured_at = self._throughput
        is_valid = time.monotonic() - measured_at < THROUGHPUT_VALID_S
        return nbytes / max(seconds, 1e-6) if is_valid else None

    def fits(self, nbytes: int) -> bool:
        """Whether this many bytes would arrive in time for a prompt, as far as the throughput is known."""
        rate = self.bytes_per_s
        return rate is None or nbytes <= rate * self._read_timeout_s

    def find(self, wanted: Sequence[Wanted]) -> "dict[ChunkKey, RemoteReader]":
        """Readers of the wanted values that exist and match, by key. All headers are requested at once.

        This and all reads by these readers together take at most READ_SHARE of the place's timeout.
        """
        deadline = time.monotonic() + self._read_timeout_s
        names = [name_at(self.place, each.key) for each in wanted]
        lead = max((each.header_nbytes for each in wanted), default=0)
        try:
            heads = (
                self._request(lambda server: server.peek(names, lead), self._read_timeout_s) if names else []
            )
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
                self.report_damage(each.key, str(damage))
            else:
                self.counters.add(hits=1)
                found[each.key] = RemoteReader(self, name, header, deadline)
        return found

    def has(self, keys: Collection[ChunkKey]) -> set[ChunkKey]:
        """The keys that it has; none if it does not answer quickly, because other requests wait for this."""
        names = [name_at(self.place, key) for key in keys]
        limit_s = min(MAX_LOOKUP_S, LOOKUP_SHARE * self.place.timeout_s)
        try:
            heads = self._request(lambda server: server.peek(names, 1), limit_s) if names else []
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
        return self._run_in_loop(lambda: self._read(name, start, nbytes, deadline))

    def report_damage(self, key: ChunkKey, why: str) -> None:
        """Count and log a damaged value. It stays in the shared store until it is overwritten."""
        self.counters.add(quarantined=1)
        log.warning("KV of chunk %s at %s is not used: %s", key.digest[:12], self.place, why)

    def _request(self, work: Callable[[Server], Awaitable[T]], limit_s: float | None = None) -> T:
        """Run a request, and wait for its result. Raises Refused, and RemoteError: at once while it is suspended."""
        if not self.is_available:
            raise self._error(self._state)
        seconds = self.place.timeout_s if limit_s is None else limit_s
        try:
            return self._run_in_loop(lambda: self._run_request(work, seconds)).result()
        except CancelledError:
            raise self._error("it has been closed") from None

    async def _run_request(self, work: Callable[[Server], Awaitable[T]], limit_s: float) -> T:
        try:
            async with asyncio.timeout(limit_s):
                found = await work(self._server)
        except Refused:
            raise
        except Exception as error:
            raise self._suspend(error, limit_s) from None
        self._mark_available()
        return found

    async def _read(self, name: str, start: int, nbytes: int, deadline: float) -> Any:
        if not self.is_available:
            raise self._error(self._state)
        if not self._reads:
            self._reads_began, self._received_bytes = time.monotonic(), 0
        self._reads += 1
        try:
            async with asyncio.timeout_at(deadline):  # the loop's clock is `time.monotonic`
                async with self._read_slots:
                    found = await self._server.read(name, start, nbytes)
            self._received_bytes += len(found)
            self._last_arrival = time.monotonic()
            return found
        except Exception as error:
            raise self._suspend(error, self._read_timeout_s) from None
        finally:
            self._reads -= 1
            if not self._reads and self._received_bytes:  # without any, the throughput stays unknown
                self._record_throughput(self._received_bytes, self._last_arrival - self._reads_began)

    def _record_throughput(self, nbytes: int, seconds: float) -> None:
        """Record bytes that arrived during reads; earlier measurements lose half their weight each time."""
        is_valid = self.bytes_per_s is not None
        old_nbytes, old_seconds, _ = self._throughput if is_valid else (0.0, 0.0, 0.0)
        self._throughput = old_nbytes / 2 + nbytes, old_seconds / 2 + seconds, time.monotonic()
        with self._changed:
            self._tally["read_bytes"] += nbytes

    # --- failures

    def _error(self, why: str) -> RemoteError:
        return RemoteError(f"the shared store at {self.place} cannot be used: {why}")

    def _mark_available(self) -> None:
        with self._changed:
            if not self._is_suspended:  # if it is, this request began before the failure
                self._state = "available"

    def _suspend(self, error: Exception, limit_s: float) -> RemoteError:
        """Stop using the server for a while after an error, and return the named error. Called in the event loop."""
        is_late = isinstance(error, TimeoutError)
        why = f"no answer within {limit_s:.3g} s" if is_late else safe_message(error)
        with self._changed:
            was_suspended, self._is_suspended, self._state = self._is_suspended, True, why
            self._tally["errors"] += not was_suspended
            self._changed.notify_all()
        if not was_suspended:
            message = "the shared store at %s is not used for %.0f s: %s"
            log.warning(message, self.place, self.place.retry_s, why)
            self._schedule_retry()
        return self._error(why)

    def _schedule_retry(self) -> None:
        self._loop.call_later(self.place.retry_s, lambda: self._loop.create_task(self._retry()))

    async def _retry(self) -> None:
        """Retry in the background, so that a server that is still down delays no request."""
        try:
            async with asyncio.timeout(self.place.timeout_s):
                await self._server.check()
        except Exception:
            self._schedule_retry()
            return
        log.info("the shared store at %s answers again", self.place)
        with self._changed:
            self._is_suspended, self._state = False, "available"
            self._changed.notify_all()
        self._run_callbacks()

    def _run_callbacks(self) -> None:
        """Call and remove the registered callbacks, unless the server is suspended."""
        with self._changed:
            if self._is_suspended:
                return
            callbacks, self._when_available = self._when_available, {}
        for callback in callbacks.values():
            callback()

    def call_when_available(self, callback: Callable[[], None], name: Hashable = None) -> None:
        """Register a short callback for when the server answers again; a later one of the same name replaces it.

        If the server is not suspended, it is called after `retry_s` seconds, too.
        """
        with self._changed:
            is_first, self._when_available[name or callback] = not self._when_available, callback
            if is_first and not self._is_suspended and self._loop_thread is not None and not self._closed:
                later = self.place.retry_s, self._run_callbacks
                self._loop.call_soon_threadsafe(self._loop.call_later, *later)

    # --- writing in the background

    def queue_write(self, key: ChunkKey, is_retry: bool = False) -> None:
        """Queue a value to be written, unless the queue is full. is_retry: the first attempt has failed."""
        with self._changed:
            if (len(self._queue) >= MAX_QUEUED and not is_retry) or self._closed:
                self._tally["dropped"] += 1
                return
            self._queue[key] = is_retry or self._queue.get(key, False)
            self._changed.notify_all()
            if self._write_thread is None:
                self._write_thread = threading.Thread(
                    target=self._write_all, name="ragblend-remote-write", daemon=True
                )
                self._write_thread.start()

    def delete(self, keys: Sequence[ChunkKey]) -> None:
        """Delete these values, and remove them from the queue. Raises RemoteError if that may have failed."""

        def remove_from_queue() -> bool:
            """Returns whether none of them is being written."""
            for key in keys:
                self._queue.pop(key, None)  # one that was being written may be queued again
            return self._writing not in keys

        with self._changed:
            being_written = None if remove_from_queue() else self._writing
        self._delete_in_batches([key for key in keys if key != being_written])
        if being_written is None:
            return
        with self._changed:
            if not self._changed.wait_for(remove_from_queue, self.place.timeout_s):
                raise self._error("one of the values to delete is being written")
        self._delete_in_batches([being_written])

    def _delete_in_batches(self, keys: Sequence[ChunkKey]) -> None:
        """Delete in batches that a working server handles within the timeout."""
        names = [name_at(self.place, key) for key in keys]
        for begin in range(0, len(names), DELETE_BATCH):
            batch = names[begin : begin + DELETE_BATCH]
            self._request(lambda server, batch=batch: server.delete(batch))  # type: ignore[misc]

    def sweep(self) -> int:
        """Delete values older than the TTL, unless the server does that; returns how many. Raises RemoteError."""
        return self._request(lambda server: server.sweep(), WRITE_TIMEOUT_S)

    def check(self) -> None:
        """Find out whether the server answers; `stats` then shows it."""
        with suppress(RemoteError):
            self._request(lambda server: server.check())

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._writing = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._closed or (self._queue and self.is_available))
                if not (self._queue and self.is_available):
                    return
                self._writing = next(iter(self._queue))
                is_retry = self._queue.pop(self._writing)
            increments = self._write(self._writing, is_retry)
            with self._changed:
                self._tally.update(increments)

    def _write(self, key: ChunkKey, is_retry: bool) -> dict[str, int]:
        """Write a value; returns increments of counters.

        If the server fails, the value is queued once more only, because it may be the cause. The failed attempt may
        have written it, so if it is not stored here any more, it is deleted from the server.
        """
        name = name_at(self.place, key)
        try:
            content = self._read_file(key)
            if content is None and not is_retry:  # evicted or deleted meanwhile
                return {}
            if content is not None:
                self._request(lambda server: server.write(name, content), WRITE_TIMEOUT_S)
            if not self._is_stored(key):  # deleted by another process while it was written or queued
                self._request(lambda server: server.delete([name]))
        except RemoteError:
            if is_retry and self._is_stored(key):
                return {"dropped": 1}
            self.queue_write(key, is_retry=True)
            return {}
        except Refused:
            return {"refused": 1}
        except Exception:  # affects only this value: the remaining ones are still written
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
                damaged=counts.quarantined, waiting=len(self._queue), bytes_per_s=self.bytes_per_s, **tally,
            )  # fmt: skip

    def _run_in_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run a coroutine in the event loop, which is started on first use. Raises RemoteError after closing.

        The lock is held until the loop has the coroutine: otherwise `close` could stop the loop before, and the future
        would never be done.
        """
        with self._changed:
            if self._closed:
                raise self._error("it has been closed")
            if self._loop_thread is None:
                self._loop = asyncio.new_event_loop()
                atexit.register(self.close)
                self._loop_thread = threading.Thread(
                    target=self._loop.run_forever, name="ragblend-remote", daemon=True
                )
                self._loop_thread.start()
            return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def flush(self, timeout_s: float = FLUSH_TIMEOUT_S) -> bool:
        """Wait until the queue is written; False if that takes too long, or the server is suspended."""

        def is_over() -> bool:
            return self._writing is None and not (self._queue and self.is_available)

        with self._changed:
            return self._changed.wait_for(is_over, timeout_s) and not self._queue

    def close(self) -> None:
        """Write the queue for at most FLUSH_TIMEOUT_S, and close. Idempotent. Open readers then raise RemoteError."""
        atexit.unregister(self.close)
        if self.is_available:
            self.flush()
        if self._queue:
            message = "%d values were not written to the shared store at %s"
            log.warning(message, len(self._queue), self.place)
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
            loop_thread = self._loop_thread
        if loop_thread is not None:
            asyncio.run_coroutine_threadsafe(self._stop_loop(), self._loop)
            loop_thread.join()
            self._loop.close()
        if self._write_thread is not None:
            self._write_thread.join()

    async def _stop_loop(self) -> None:
        """Cancel all requests, close the server, and stop the loop."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        with suppress(Exception):
            async with asyncio.timeout(1.0):
                await self._server.close()
        await asyncio.sleep(0)  # cancelled tasks notify their waiting threads in the loop's next turn
        self._loop.stop()


class RemoteReader(Source):
    """A value of a shared store, its header verified. Layers that were read are kept, to read them again or store them.

    Raises RemoteError for a layer that has not arrived by `deadline`, CorruptBlobError for a damaged one.
    """

    tier, in_memory = "remote", False

    def __init__(self, remote: Remote, name: str, header: BlobHeader, deadline: float) -> None:
        self.header, self.token_ids, self.start = header, header.token_ids, header.start
        self.geometry, self.codec = header.geometry, header.codec
        self._remote, self._name, self._deadline = remote, name, deadline
        self._lock = threading.Lock()
        self._pending: dict[int, Future[Any]] = {}  # reads by layer, running or done
        self._layers: dict[int, Tensor] = {}  # verified
        self._failed = False

    def expect(self, layer: int) -> None:
        with self._lock:
            if layer not in self._pending:
                offset, nbytes = self.header.layer_offset(layer), self.header.layer_nbytes
                self._pending[layer] = self._remote.begin_read(self._name, offset, nbytes, self._deadline)

    def read_layer(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.codec.unpack(self._layer(layer), self.geometry, keys, values)

    def read_packed(self, layer: int, packed: Tensor) -> None:
        packed.copy_(self._layer(layer))

    def read_all(self) -> None:
        """Read every layer, all at once. Raises RemoteError, CorruptBlobError."""
        for layer in range(self.geometry.layers):
            self.expect(layer)
        for layer in range(self.geometry.layers):
            self._layer(layer)

    def _layer(self, layer: int) -> Tensor:
        """A verified layer, (layer bytes,) uint8; waits for it."""
        if layer not in self._layers:
            try:
                self.expect(layer)
                content = np.frombuffer(self._pending[layer].result(), dtype=np.uint8)
                self._check(layer, content)
            except CancelledError:
                self._failed = True
                raise RemoteError(f"reading {self._name} after its reader was closed") from None
            except (RemoteError, CorruptBlobError):
                self._count_failure()
                raise
            self._layers[layer] = torch.from_numpy(content.copy())
        return self._layers[layer]

    def _count_failure(self) -> None:
        """Turn the counted hit into a miss, once."""
        with self._lock:
            failed_before, self._failed = self._failed, True
        if not failed_before:
            self._remote.counters.add(hits=-1, misses=1)

    def _check(self, layer: int, content: Any) -> None:
        if not content.nbytes:
            raise RemoteError(
                f"KV of chunk {self.header.key.digest[:12]} was deleted from {self._remote.place}"
            )
        if content.nbytes == self.header.layer_nbytes and crc32(content) == self.header.layer_crcs[layer]:
            return
        what = f"layer {layer} has {content.nbytes} bytes, or does not match its checksum"
        self._remote.report_damage(self.header.key, what)
        raise BlobDamage("bad-layer", f"reading KV from {self._remote.place}: {what}")

    @property
    def is_lost(self) -> bool:
        """Whether it is already known that some layer cannot be read."""
        is_late = time.monotonic() >= self._deadline or not self._remote.is_available
        return self._failed or (is_late and len(self._layers) < self.geometry.layers)

    @property
    def blob(self) -> Blob | None:
        """The whole value, if every layer was read."""
        if len(self._layers) < self.geometry.layers:
            return None
        return Blob(self.header, tuple((self._layers[layer],) for layer in range(self.geometry.layers)))

    def close(self) -> None:
        with self._lock:
            for read in self._pending.values():
                read.cancel()
