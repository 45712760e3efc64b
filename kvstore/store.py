"""KVStore: where chunks' KV is kept on disk, found by key, checked at every use and evicted by last use.

Whatever is wrong with a stored value makes a miss: it is put in quarantine and counted, and the caller
encodes the chunk again. Errors are raised only for what the caller must know: no room, no access, another
format.
"""

import contextlib
import logging
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import filterfalse
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.errors import CorruptBlobError, StoreError, StoreFullError
from ragblend.kvstore.files import DAMAGE, write_failed
from ragblend.kvstore.index import Index
from ragblend.kvstore.layout import files_of, value_files
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import HeldChunk, MemoryTier
from ragblend.kvstore.opening import open_index
from ragblend.kvstore.policy import choose_victims, least_recently_used
from ragblend.kvstore.reader import ChunkReader, open_verified
from ragblend.kvstore.sqlite import SQL_ERRORS, index_failed
from ragblend.kvstore.stats import Counters, StoreStats
from ragblend.kvstore.upkeep import (
    GcReport,
    Problem,
    check_files,
    collect,
    layers_of,
    refuse_row,
    remove_files,
    repair,
)

log = logging.getLogger(__name__)
_QUARANTINE_WAIT_S = 2.0  # a reader does not stand behind a long put for the sake of tidiness


class KVStore:
    """Safe for threads, and for several processes: readers never wait for a writer, writers take turns."""

    name = "disk"  # as a tier

    def __init__(
        self,
        root: Path,
        budget_bytes: int,
        lock: WriterLock,
        cache: Any,
        index: Index,
        tiers: Sequence[MemoryTier] = (),
    ) -> None:
        self.root, self.budget_bytes = root, budget_bytes
        self.tiers = tuple(tiers)
        self._lock, self._cache, self._index = lock, cache, index
        self._counters = Counters()
        self._over_budget = True  # whoever was killed here may not have come to evicting
        self._closed = False

    @classmethod
    def open(cls, root: Path, budget_bytes: int, tiers: Sequence[MemoryTier] = ()) -> "KVStore":
        """Open the store at `root`, made if absent (0700, files 0600).

        budget_bytes bounds the values' bytes on the disk, at every put; tiers: memory above it, the fastest first, for
        what is used (see `promote`). Raises StoreFormatError for a folder of another
        format, StoreLockedError, StoreError.
        """
        opened = open_index(Path(root))
        store = cls(Path(root), budget_bytes, opened.lock, opened.cache, opened.index, tiers)
        store._counters.add(quarantined=opened.refused)
        return store

    # --- reading

    def contains(self, key: ChunkKey) -> bool:
        """Whether the index has this key; the value is not looked at."""
        index = self._live_index()
        try:
            row = index.row(key.digest)
        except StoreError as error:
            log.warning("%s", error)
            return False
        return row is not None and row.digest == key.digest

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkReader | HeldChunk | None:
        """A reader of the fastest tier that has it, key and token ids verified; None is a miss (absent, or damaged)."""
        # What another process deleted is deleted: the index has the last word on whether there is such a value.
        for tier in self.tiers if self.contains(key) else ():
            if (held := tier.open_chunk(key, token_ids)) is not None:
                self._counters.add(hits=1)
                self._index.touch(key.digest)
                return held
        reader = self._open(key, tuple(token_ids))
        if reader is None:
            self._counters.add(misses=1)
        else:
            self._counters.add(hits=1)
            self._index.touch(key.digest)
        return reader

    def will_need(self, key: ChunkKey) -> None:
        """Ask the kernel to read that value ahead of its use; absent values and old systems are no error."""
        path = self._path_of(key)
        if path is None or not hasattr(os, "posix_fadvise"):
            return
        try:
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError as error:  # evicted meanwhile, say: its use will tell
            log.debug("reading ahead %s: %s", path, error)

    def promote(self, key: ChunkKey, token_ids: Sequence[int]) -> None:
        """Bring a value that was used one tier up, if there is one; for when nobody waits."""
        source: ChunkReader | HeldChunk | None = None
        wanting: MemoryTier | None = None
        for tier in self.tiers:  # the fastest first
            if tier.contains(key):
                source = tier.open_chunk(key, token_ids)
                break
            wanting = tier
        if wanting is None or not self.contains(key):
            return
        with contextlib.suppress(CorruptBlobError):  # it is in quarantine by now
            source = source or self._open(key, tuple(token_ids))
            if source is not None:
                with source:
                    wanting.admit(key, source)
        if not self.contains(key):  # deleted meanwhile
            wanting.delete(key)

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
        """The whole value, every layer verified, in memory that the caller owns; None is a miss."""
        reader = self.open_chunk(key, token_ids)
        if reader is None:
            return None
        with reader:
            try:
                layers = list(layers_of(reader))
            except CorruptBlobError:
                return None
            keys, values = zip(*layers, strict=True)
            return ChunkKV(reader.token_ids, reader.start, reader.geometry, keys, values)

    def _open(self, key: ChunkKey, token_ids: tuple[int, ...]) -> ChunkReader | None:
        missing: Path | None = None
        while (path := self._path_of(key)) is not None:
            try:
                return open_verified(path, key, token_ids, partial(self._spoiled, key, path))
            except FileNotFoundError:
                if path == missing:  # twice the same: hardly an eviction in between; the lock will tell
                    self._quarantine(key, path, "the index names a file that is not there")
                    return None
                missing = path
            except (CorruptBlobError, OSError) as error:
                if isinstance(error, OSError) and error.errno not in DAMAGE:
                    log.warning("KV of chunk %s cannot be opened: %s", key.digest[:12], error)
                else:
                    self._quarantine(key, path, str(error))
                return None
        return None

    def _path_of(self, key: ChunkKey) -> Path | None:
        self._live_index()
        try:
            path = self._cache.get(key.digest, read=True)
        except CorruptBlobError as error:
            self._quarantine(key, None, str(error))
            return None
        except SQL_ERRORS as error:
            log.warning("%s", index_failed(error, self._index.path))  # a miss: the caller goes on without us
            return None
        assert path is None or isinstance(path, Path)
        return path

    def _spoiled(self, key: ChunkKey, path: Path, what: str) -> None:
        """A layer of an open value is damaged: what was counted a hit is a miss."""
        self._counters.add(hits=-1, misses=1)
        self._quarantine(key, path, what)

    def _quarantine(self, key: ChunkKey, path: Path | None, why: str) -> None:
        """Take the row of `key` out of use, if it still names `path` (None: whatever it names)."""
        try:
            with self._changing(_QUARANTINE_WAIT_S) as index:
                row = index.row(key.digest)
                if row is None or not (path is None or self.root / str(row.filename) == path):
                    return  # evicted or replaced meanwhile
                refuse_row(self.root, index, row)
        except (StoreError, OSError) as error:
            log.warning("damaged KV of chunk %s stays until it is read again: %s", key.digest[:12], error)
            return
        self._counters.add(quarantined=1)
        log.warning("KV of chunk %s is in quarantine and will be encoded anew: %s", key.digest[:12], why)

    # --- changing

    def put(self, key: ChunkKey, chunk: ChunkKV) -> None:
        """Store (or replace) a value; it is on disk and in the index when this returns.

        Values are evicted only after the new one is safely there. Raises StoreFullError (nothing has changed
        then), StoreLockedError, StoreError.
        """
        blob = Blob.of(key, chunk)
        if blob.nbytes > self.budget_bytes:
            raise StoreFullError(
                f"storing {len(chunk.token_ids)} tokens takes {blob.nbytes:,} bytes, more than the budget "
                f"of the store at {self.root} ({self.budget_bytes:,}). Raise it, or make chunks smaller."
            )
        with self._changing() as index:
            index.flush_touches()
            if self._over_budget:
                self._keep_budget(spare=key.digest)
            self._write(blob)
            index.stored(key.digest)
            for tier in self.tiers:  # another value may have lain under this key
                tier.delete(key)
            self._keep_budget(spare=key.digest)

    def _keep_budget(self, spare: str) -> None:
        try:
            self._evict(spare)
            self._over_budget = False
        except StoreError as error:  # the value is stored; the next put tries again
            self._over_budget = True
            log.warning("the KV store is over its budget: %s", error)

    def _write(self, blob: Blob) -> None:
        digest = blob.header.key.digest
        try:
            self._cache.set(digest, blob)
        except OSError as error:
            raise write_failed(error, self.root / self._cache.disk.last_written, blob.nbytes) from error
        except BaseException as error:  # KeyboardInterrupt too: no file may stay that no row names
            self._cache.close()  # a failed COMMIT leaves this thread's connection inside its transaction
            self._drop_if_unnamed(digest, self._cache.disk.last_written)
            if isinstance(error, SQL_ERRORS):
                raise index_failed(error, self._index.path) from error
            raise

    def _drop_if_unnamed(self, digest: str, filename: str | None) -> None:
        row = self._index.row(digest)
        if row is None or row.filename != filename:
            self._cache.disk.remove(filename)

    def _evict(self, spare: str) -> None:
        if self._index.totals()[1] <= self.budget_bytes:
            return
        entries = [row.entry for row in self._index.rows() if row.digest]
        excess = sum(entry.nbytes for entry in entries) - self.budget_bytes
        order = least_recently_used(entry for entry in entries if entry.digest != spare)
        for victim in choose_victims(order, excess):
            self._forget_row(victim.digest)
            self._counters.add(evictions=1)

    def delete(self, key: ChunkKey) -> int:
        """Remove every byte of a value, quarantined copies too; bytes freed. StoreError if a file stays."""
        for tier in self.tiers:
            tier.delete(key)
        with self._changing() as index:
            # Files before the row: a kill in between leaves a miss, not a file that adopt() would bring back.
            report = remove_files(files_of(self.root, key.digest))
            self._forget_row(key.digest)
            index.truncate_log()
            return report.bytes

    def _forget_row(self, digest: str) -> None:
        try:
            self._cache.delete(digest)  # retry=True would go round for ever on a read-only disk
        except SQL_ERRORS as error:
            self._cache.close()
            raise index_failed(error, self._index.path) from error

    # --- looking after

    def keys(self) -> Iterator[ChunkKey]:
        """The keys as they are now, oldest first."""
        return iter([ChunkKey(row.digest) for row in self._live_index().rows() if row.digest])

    def check(self) -> list[Problem]:
        """Everything wrong with the store, from reading all of it; changes nothing."""
        with self._changing() as index:  # for the listing only: it must not see half a put
            files, rows = list(value_files(self.root)), index.rows()
        return list(check_files(self.root, index, files, rows))

    def repair(self) -> list[Problem]:
        """What check() finds, after taking it out of use; what is lost then heals by encoding again."""
        problems = self.check()
        with self._changing() as index:
            self._counters.add(quarantined=repair(self.root, index, problems))
        return problems

    def gc(self, keep: Collection[ChunkKey] | None = None) -> GcReport:
        """Remove orphans, temporary files, the quarantine and, given `keep`, every other key's value."""
        wanted = None if keep is None else {key.digest for key in keep}
        with self._changing() as index:
            report = collect(self.root, index, wanted)
        for tier in self.tiers:
            for key in filterfalse(self.contains, tier.keys()):
                tier.delete(key)
        return report

    def stats(self) -> StoreStats:
        """Entries and bytes of the store, and this process's counters, which begin at 0 when it opens it."""
        return self._counters.stats(*self._live_index().totals(), self.budget_bytes)

    def stats_by_tier(self) -> dict[str, StoreStats]:
        """The same for each tier by its name, the fastest first. The disk's hits are those of all tiers."""
        return {tier.name: tier.stats() for tier in self.tiers} | {"disk": self.stats()}

    def close(self) -> None:
        """Write what is pending and let go of the files; closing twice is fine. Open readers go on."""
        if self._closed:
            return
        try:
            self._index.flush_touches()
        except StoreError as error:
            log.warning("the order of use of this session is lost: %s", error)
        self._closed = True
        for tier in self.tiers:
            tier.clear()
        self._cache.close()
        self._index.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _changing(self, timeout_s: float | None = None) -> Iterator[Index]:
        """Be the only one, of all threads and processes, that changes the store; OSError becomes StoreError."""
        self._live_index()
        try:
            with self._lock.hold(timeout_s):
                index = self._live_index()
                if not (self._lock.is_in_place() and index.is_in_place()):
                    raise StoreError(
                        f"the KV store at {self.root} was moved or removed, or another process set its damaged index "
                        "aside. Open it again."
                    )
                yield index
        except OSError as error:
            raise StoreError(
                f"changing the KV store at {self.root} failed: {error}. Check the disk and the folder's permissions."
            ) from error

    def _live_index(self) -> Index:
        if self._closed:
            raise StoreError(f"the KV store at {self.root} has been closed; open it again")
        return self._index
