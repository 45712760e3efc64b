"""KVStore: stores values (one chunk's KV each) on disk by key, verifies them at every use, and evicts by policy.

The store raises errors only for problems that the caller must handle: no space, no access, another format. Damage is a
miss. The index says what is stored (`index.py`), the ledger what to evict first (`ledger.py`).
"""

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import filterfalse
from pathlib import Path

from ragblend.kvstore import system, upkeep
from ragblend.kvstore.blob import Blob, ChunkReader, open_verified
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, Source
from ragblend.kvstore.counters import Counters, Counts, StoreStats
from ragblend.kvstore.errors import CorruptBlobError, StoreError, StoreFullError
from ragblend.kvstore.files import (
    DAMAGE,
    Closing,
    make_private_folder,
    open_file,
    warn_if_on_network,
    write_error,
)
from ragblend.kvstore.index import Index, Row
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import LOCK_NAME, check_format, files_of, remove_values, value_files, write_value
from ragblend.kvstore.ledger import Ledger
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import MemoryTier, read_whole
from ragblend.kvstore.places import Place
from ragblend.kvstore.policy import Entry, EvictionPolicy, eviction_policy_named
from ragblend.kvstore.remote import Remote
from ragblend.kvstore.upkeep import GcReport, Problem

log = logging.getLogger(__name__)
# (cached, new) tokens -> the cost of computing one of the new tokens, in any unit.
TokenCost = Callable[[int, int], float]
# After the budget was lowered, a put evicts at most this many values more than it needs: deleting a file takes a
# millisecond or more, for which the caller waits.
EXTRA_EVICTIONS = 64
_QUARANTINE_WAIT_S = 2.0  # a reader must not wait for a long put only to quarantine a value


@contextmanager
def _open_errors(root: Path) -> Iterator[None]:
    """Raise StoreError for an OSError of opening the store."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"opening the KV store at {root} failed: {error}. Check that the folder can be written to and that "
            "the disk has room, or choose another home (RAGBLEND_HOME)."
        ) from error


class KVStore(Closing):
    """Safe for several threads and processes: readers never wait for a writer, writers wait for each other."""

    name = "disk"  # as a tier

    @classmethod
    def open(
        cls,
        root: Path,
        budget_bytes: int | None,
        tiers: Sequence[MemoryTier] = (),
        policy: str | None = None,
        cost: TokenCost = lambda cached, new: 1.0,
        remote: str | None = None,
    ) -> "KVStore":
        """Open the store at `root`, created if absent (0700, files 0600).

        budget_bytes: limit of the values' bytes on the disk (None: a quarter of the free space plus the values). A put
        beyond it evicts at least what it adds, so a lowered budget is reached by several puts, or by `gc` at once;
        tiers: memory tiers above the disk, the fastest first (see `promote`); policy: of EVICTION_POLICIES (None:
        unchanged, at first DEFAULT_POLICY), which other processes with the store open adopt at their next save;
        cost: see `TokenCost`; remote: URL of a shared store (see `places.Place`). Raises StoreFormatError for a folder
        of another format, StoreLockedError, StoreError, UsageError for an unknown policy.
        """
        eviction = None if policy is None else eviction_policy_named(policy)
        store = cls(Path(root), tiers, cost, None if remote is None else Place.of(remote), eviction)
        with ExitStack() as opened, _open_errors(store.root):
            check_format(store.root)  # before anything changes in a folder that is not ours
            make_private_folder(store.root)
            warn_if_on_network(store.root)
            store._lock = opened.enter_context(WriterLock(store.root / LOCK_NAME, upkeep.LOCK_TIMEOUT_S))
            with store._lock.hold():
                store._index, was_damaged = upkeep.open_index(store.root)
                opened.enter_context(store._index)
                store._counters.add(quarantined=int(was_damaged))
                store._synchronise_or_rebuild()
            if budget_bytes is None:
                free = shutil.disk_usage(store.root).free
                budget_bytes = (free + store._index.totals[1]) // 4
            opened.pop_all()  # success: everything stays open
        store.budget_bytes = budget_bytes
        return store

    def __init__(
        self,
        root: Path,
        tiers: Sequence[MemoryTier],
        cost: TokenCost,
        remote: Place | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.root, self.tiers, self._cost, self._counters = root, tuple(tiers), cost, Counters()
        self.remote = None if remote is None else Remote(remote, self._read_file, self.contains)
        self._counted = {tier.name: tier.counters for tier in self.tiers} | {self.name: self._counters}
        if self.remote is not None:
            self._counted[self.remote.name] = self.remote.counters
        self._ledger = Ledger(self._counted, policy)
        self.budget_bytes: int  # `open` sets the following
        self._lock: WriterLock
        self._index: Index
        self._must_refresh = False  # the ledger is refreshed from the index before values to evict are chosen
        self._closed = False

    def _synchronise_or_rebuild(self) -> None:
        try:
            self._synchronise()
        except CorruptBlobError as error:
            self._rebuild(str(error))

    def _synchronise(self) -> None:
        """Make files, index and ledger agree. The caller holds the lock."""
        rows, lost = upkeep.sweep(self._index)
        self._counters.add(quarantined=lost)
        has_new_policy = self._ledger.load(self._index.ledger(), rows)
        if orphans := self._ledger.orphans():  # because their parent was damaged, for example
            self._delete_everywhere(self._index, orphans)
        if has_new_policy:
            self._try_to_save()  # for other processes that have the store open

    def _rebuild(self, why: str) -> None:
        """Replace a damaged index by a new one of the value files. The caller holds the lock."""
        self._counters.add(quarantined=1)
        self._index.close()
        self._index = upkeep.rebuild_index(self.root, why)
        self._synchronise()

    def close(self) -> None:
        """Save pending counts and close all files. Idempotent. Open readers continue."""
        if self._closed:
            return
        if self.remote is not None:
            self.remote.close()
        if self._ledger.has_changed:
            self._try_to_save()
        self._closed = True
        for tier in self.tiers:
            tier.clear()
        for each in (self._index, self._lock):
            each.close()

    # --- changing

    def put(
        self,
        key: ChunkKey,
        chunk: ChunkKV,
        codec: Codec = RAW,
        may_store: Callable[[], bool] | None = None,
    ) -> bool:
        """Store (or replace) a value; it is on disk and in the index when this returns, and in the shared store soon
        after.

        codec: of its layers, except that a tree node is raw, because it must stay exact. may_store: called while no
        other writer can delete or put anything; if it returns False, or the parent of a tree node is not stored,
        nothing is stored and this returns False. Raises StoreFullError, StoreLockedError, StoreError; then nothing has
        changed.
        """
        blob = Blob.of(key, chunk, RAW if chunk.parent is not None else codec)
        stored = self.put_blob(blob, may_store)
        if stored and self.remote is not None and chunk.parent is None:
            self.remote.queue_write(key)
        return stored

    def put_blob(self, blob: Blob, may_store: Callable[[], bool] | None = None) -> bool:
        """Store a packed value, as `put` does, without copying it to the shared store, from which it may come."""
        digest, tokens = blob.header.key.digest, len(blob.header.token_ids)
        parent = None if blob.header.parent is None else blob.header.parent.digest
        self._check_budget(tokens, blob.nbytes)
        cost = self._cost(blob.header.start, tokens)
        with self._changing() as index:
            if may_store is not None and not may_store():
                return False
            if parent is not None and index.get(parent) is None:
                return False
            file = write_value(self.root, blob)
            try:
                evicted, obsolete_files = self._insert(index, digest, Row(file.filename, blob.nbytes, parent))
            except BaseException:  # also for KeyboardInterrupt: no file may stay without a row
                if (found := index.get(digest)) is None or found.filename != file.filename:
                    remove_values(self.root, [file.filename])
                raise
            self._delete_memory_copies([digest])  # this key may have had another value
            self._ledger.add(digest, blob.nbytes, cost, parent)
            self._record_evictions(evicted)
            remove_values(self.root, obsolete_files)
            if self._ledger.is_due:
                self._try_to_save()
        return True

    def _insert(self, index: Index, digest: str, row: Row) -> tuple[list[Entry], list[str]]:
        """Insert a row and evict for it in one transaction; returns the evicted entries, and the names of the obsolete
        files, which have no row any more.
        """
        replaced = index.get(digest)
        grown_bytes = row.nbytes - (0 if replaced is None else replaced.nbytes)
        total_bytes = index.totals[1] + grown_bytes
        protected = {digest, row.parent or digest}
        with index.changing():
            index.set(digest, row)
            evicted, obsolete_files = self._make_room(
                index, total_bytes - self.budget_bytes, grown_bytes, protected
            )
            total_bytes -= sum(victim.nbytes for victim in evicted)
            has_room = total_bytes <= self.budget_bytes or len(evicted) >= EXTRA_EVICTIONS
            # Only a tree node can lack room: its parent must stay, and a larger value was refused before.
            if row.parent and grown_bytes > 0 and not has_room:
                self._must_refresh = True
                raise StoreFullError(
                    f"storing {row.nbytes:,} bytes of KV together with that of the passages before, which must stay, "
                    f"takes more than the budget of the store at {self.root} ({self.budget_bytes:,}). Raise it."
                )
        return evicted, obsolete_files if replaced is None else [replaced.filename, *obsolete_files]

    def _record_evictions(self, victims: Sequence[Entry]) -> None:
        """Update memory tiers, ledger and counts after the rows of these values were deleted."""
        self._delete_memory_copies([victim.digest for victim in victims])
        self._ledger.evict(victims)
        self._counters.add(evictions=len(victims))

    def check_room(self, tokens: int, nbytes: int) -> None:
        """Raises StoreFullError if evicting cannot make enough space, before anything is computed in vain."""
        self._check_budget(tokens, nbytes)
        disk = shutil.disk_usage(self.root)
        if disk.total and disk.free < nbytes:  # unknown on some file systems
            raise write_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.root, nbytes)

    def _check_budget(self, tokens: int, nbytes: int) -> None:
        if nbytes > self.budget_bytes:
            raise StoreFullError(
                f"storing {tokens} tokens takes {nbytes:,} bytes, more than the budget "
                f"of the store at {self.root} ({self.budget_bytes:,}). Raise it, or make chunks smaller."
            )

    def _make_room(
        self, index: Index, excess_bytes: int, needed_bytes: int = 0, protected: Collection[str] = ()
    ) -> tuple[list[Entry], list[str]]:
        """Delete the rows of values to evict; returns their entries and files.

        At most EXTRA_EVICTIONS beyond those that free `needed_bytes`, never those in `protected`.
        """
        evicted, obsolete_files = list[Entry](), list[str]()
        if excess_bytes > 0 and self._is_ledger_outdated(index):
            self._must_refresh = True
        for _ in range(2):  # a second time if the ledger did not know what other processes put and evicted
            if self._must_refresh:
                already_evicted = {victim.digest for victim in evicted}
                rows = index.entries()
                stored = {digest: row for digest, row in rows.items() if digest not in already_evicted}
                self._ledger.refresh(self._newer_ledger(index), stored)
                self._must_refresh = False
            for victim in self._ledger.victims(excess_bytes, EXTRA_EVICTIONS, needed_bytes, protected):
                row = index.get(victim.digest)
                if row is not None and index.delete(victim.digest):
                    evicted.append(victim)
                    obsolete_files.append(row.filename)
                    excess_bytes -= victim.nbytes
                    needed_bytes -= victim.nbytes
            if excess_bytes <= 0 or len(evicted) >= EXTRA_EVICTIONS:
                break
            self._must_refresh = True
        return evicted, obsolete_files

    def delete(
        self, keys: Collection[ChunkKey], recheck: Callable[[], Collection[ChunkKey]] | None = None
    ) -> int:
        """Delete every byte of these values and of their descendants in the tree, quarantined copies and counts
        included; returns the bytes freed.

        recheck: called while no other writer can put anything; returns those of `keys` that must still be deleted. The
        shared store keeps its copies (see `delete_shared`). Raises StoreError if a file stays.
        """
        with self._changing() as index:
            self._ledger.refresh(self._newer_ledger(index), index.entries())
            keys = keys if recheck is None else recheck()
            digests = self._ledger.with_descendants([key.digest for key in keys])
            freed = self._delete_everywhere(index, digests).bytes
            self._delete_memory_copies(digests)  # again, because a promotion may have been running
            index.erase_log()
            return freed

    def delete_shared(self, keys: Sequence[ChunkKey]) -> None:
        """Delete values from the shared store, if there is one. Raises RemoteError if that may have failed."""
        if self.remote is not None:
            self.remote.delete(keys)

    def _delete_memory_copies(self, digests: Sequence[str]) -> None:
        """Delete the copies in memory tiers."""
        for tier in self.tiers:
            tier.delete([ChunkKey(digest) for digest in digests])

    def _delete_everywhere(self, index: Index, digests: Sequence[str]) -> GcReport:
        """Delete values from memory and disk, with their counts.

        Files before rows: a kill in between leaves only a miss, and no file that a rebuilt index could include.
        """
        self._delete_memory_copies(digests)
        listed = {self.root / row.filename for each in digests if (row := index.get(each)) is not None}
        try:
            freed = upkeep.remove_files(listed.union(*(files_of(self.root, each) for each in digests)))
        except StoreError:  # rows and counts are deleted anyway; the caller retries the files
            self._delete_rows_and_counts(digests)
            raise
        self._delete_rows_and_counts(digests)
        return freed

    def _delete_rows_and_counts(self, digests: Sequence[str]) -> None:
        """Delete the counts and rows of values whose files were deleted."""
        self._ledger.forget(digests)
        self._save(digests)

    # --- reading: any damage of a stored value is a miss, and the caller encodes the chunk again

    def contains(self, key: ChunkKey) -> bool:
        """Whether the index has this key, without checking the value. False if the index cannot be read."""
        return self._row_of(key) is not None

    def open_chunk(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        geometry: Geometry | None = None,
        start: int | None = None,
        parent: ChunkKey | None = None,
    ) -> Source | None:
        """A reader from the fastest tier that has it; None is a miss (absent, or damaged).

        A value with another key, parent or token ids, or, if they are given, another geometry or start, counts as
        damaged: checksums do not detect a wrong but intact file.
        """
        self._ledger.used(key.digest)
        # Memory alone does not decide whether the value exists: another process may have deleted it from the index.
        for tier in self.tiers if self.tiers and self.contains(key) else ():
            if (held := tier.open_chunk(key, token_ids)) is not None:
                return held
        reader = self._open(self._on_damaged_hit, key, tuple(token_ids), geometry, start, parent)
        self._counters.add(**({"misses": 1} if reader is None else {"hits": 1}))
        return reader

    def _read_file(self, key: ChunkKey) -> bytes | None:
        """The bytes of a value's file, unverified: other machines verify what they read from the shared store."""
        path = self._path_of(key)
        if path is not None:
            with contextlib.suppress(OSError), os.fdopen(open_file(path), "rb") as file:
                return file.read()
        return None

    def read_ahead(self, key: ChunkKey) -> None:
        """Ask the kernel to read this value ahead; no error for absent values or old systems."""
        path = self._path_of(key)
        if path is not None:
            # OSError: it was evicted meanwhile, for example.
            with contextlib.suppress(OSError), os.fdopen(open_file(path), "rb") as file:
                system.read_ahead(file.fileno())

    def promote(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        geometry: Geometry | None = None,
        start: int | None = None,
        parent: ChunkKey | None = None,
    ) -> None:
        """Copy a used value to the next faster tier, if there is one; run in the background. See `open_chunk`."""
        target: MemoryTier | None = None
        source: Source | None = None
        for tier in self.tiers:  # the fastest first
            if (source := tier.peek(key, token_ids)) is not None:
                break
            target = tier
        if target is None or not self.contains(key):
            return
        source = source or self._open(self._quarantine, key, tuple(token_ids), geometry, start, parent)
        if source is not None:
            with source, contextlib.suppress(CorruptBlobError):  # now in quarantine
                target.admit(key, source, self._ledger.entry(key.digest))
        if not self.contains(key):  # deleted meanwhile
            target.delete([key])

    def save_ledger(self, is_last: bool = False) -> None:
        """Save the ledger for other processes, if enough has changed. is_last: the process ends; save any change."""
        self._live_index()
        if self._ledger.is_due:
            self._try_to_save()
        elif is_last and self._ledger.has_changed:
            self._try_to_save(logging.INFO)  # a read-only home would warn after every question

    def _try_to_save(self, level: int = logging.WARNING) -> None:
        try:
            self._save()
        except StoreError as error:  # a later save includes it
            log.log(level, "counts of uses, hits and misses cannot be saved now: %s", error)

    def _is_ledger_outdated(self, index: Index) -> bool:
        """Whether another process has saved the ledger since this one loaded or saved it."""
        return index.ledger_serial() != self._ledger.serial

    def _newer_ledger(self, index: Index) -> bytes:
        """The ledger that another process has saved meanwhile; empty, and not read, if none has."""
        return index.ledger() if self._is_ledger_outdated(index) else b""

    def _save(self, deleted: Sequence[str] = ()) -> None:
        """Save the ledger, and delete rows, in one transaction."""
        with self._changing() as index:
            packed, mark_saved = self._ledger.prepare_save(self._newer_ledger(index), index.entries)
            serial = self._ledger.serial + 1
            with index.changing():
                for digest in deleted:
                    index.delete(digest)
                index.set_ledger(packed, serial)
            mark_saved()

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
        """The whole value, every layer verified, in new memory; None is a miss."""
        reader = self.open_chunk(key, token_ids)
        if reader is None:
            return None
        with reader:
            try:
                return read_whole(reader)
            except CorruptBlobError:
                return None

    def _open(
        self,
        on_damage: Callable[[ChunkKey, Path, str], None],
        key: ChunkKey,
        token_ids: tuple[int, ...],
        geometry: Geometry | None,
        start: int | None,
        parent: ChunkKey | None,
    ) -> ChunkReader | None:
        """Open the value's file. on_damage: called with key, path and description if a layer is found to be damaged."""
        missing: Path | None = None
        while (path := self._path_of(key)) is not None:
            try:
                on_damaged_layer = partial(on_damage, key, path)
                return open_verified(path, key, token_ids, on_damaged_layer, geometry, start, parent)
            except FileNotFoundError:
                if (
                    path == missing
                ):  # the row has not changed, so the value was not evicted or replaced meanwhile
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

    def _row_of(self, key: ChunkKey) -> Row | None:
        """The row; None if there is none or the index cannot be read: then the caller computes the chunk."""
        try:
            return self._live_index().get(key.digest)
        except CorruptBlobError as error:
            self._quarantine(key, None, str(error))
        except StoreError as error:
            if self._closed:
                raise
            log.warning("%s", error)
        return None

    def _path_of(self, key: ChunkKey) -> Path | None:
        row = self._row_of(key)
        return None if row is None else self.root / row.filename

    def _on_damaged_hit(self, key: ChunkKey, path: Path, what: str) -> None:
        """Handle a damaged layer of an open value: turn the counted hit into a miss."""
        self._counters.add(hits=-1, misses=1)
        self._quarantine(key, path, what)

    def _quarantine(self, key: ChunkKey, path: Path | None, why: str) -> None:
        """Quarantine the value of `key`, if its row still refers to `path`.

        path None: the row could not be read. Reading it again lets `_changing` rebuild a damaged index.
        """
        try:
            with self._changing(_QUARANTINE_WAIT_S) as index:
                row = index.get(key.digest)
                if path is None or row is None or self.root / row.filename != path:
                    return  # evicted, replaced or rebuilt meanwhile
                upkeep.quarantine(index, [key.digest])
                self._ledger.forget([key.digest])
        except (StoreError, OSError) as error:
            log.warning(
                "damaged KV of chunk %s cannot be quarantined now, only when it is read again: %s",
                key.digest[:12],
                error,
            )
            return
        self._counters.add(quarantined=1)
        log.warning("KV of chunk %s is in quarantine and will be encoded again: %s", key.digest[:12], why)

    # --- maintenance

    def keys(self) -> Iterator[ChunkKey]:
        """A snapshot of the keys, in the order in which they were stored."""
        return map(ChunkKey, self._live_index().entries())

    def sizes(self) -> dict[ChunkKey, int]:
        """A snapshot of the values' sizes in bytes."""
        return {ChunkKey(digest): row.nbytes for digest, row in self._live_index().entries().items()}

    def check(self) -> list[Problem]:
        """All problems of the store, found by reading all of it; changes nothing."""
        with self._changing() as index:  # held only while listing, which must not see an unfinished put
            try:
                files, rows = list(value_files(self.root)), index.entries()
            except CorruptBlobError as error:
                return [Problem("index", None, index.path, str(error))]
        return list(upkeep.check_files(index, files, rows))

    def repair(self) -> list[Problem]:
        """Run check() and quarantine damaged values; returns the problems. Lost values are encoded again on use."""
        problems = self.check()
        with self._changing() as index:
            bad = {each.key.digest for each in problems if each.key and each.kind not in upkeep.HARMLESS}
            upkeep.quarantine(index, bad)
            self._counters.add(quarantined=len(bad))
            index_problems = [each.message for each in problems if each.kind == "index"]
            if index_problems:
                self._rebuild(index_problems[0])
            else:
                self._synchronise()
        return problems

    def gc(self, keep: Collection[ChunkKey] | None = None) -> GcReport:
        """Delete tree nodes without a parent, temporary files, the quarantine, values beyond the budget, and, if `keep`
        is given, all other values.
        """
        with self._changing() as index:
            rows = index.entries()
            self._ledger.refresh(self._newer_ledger(index), rows)
            unwanted = self._ledger.orphans()
            if keep is not None:
                kept = {key.digest for key in keep}
                unwanted += self._ledger.with_descendants([digest for digest in rows if digest not in kept])
                self._ledger.keep_only(kept)
            report = self._delete_everywhere(index, unwanted) + upkeep.remove_leftovers(index)
            index.erase_log()
        while (evicted := self._evict_some()).files:
            report += evicted
        for tier in self.tiers:  # copies of values that another process has deleted
            tier.delete(list(filterfalse(self.contains, tier.keys())))
        return report

    def _evict_some(self) -> GcReport:
        """Evict a part of what exceeds the budget, so that other writers wait only briefly for the lock."""
        with self._changing() as index:
            excess_bytes = index.totals[1] - self.budget_bytes
            if excess_bytes <= 0:
                return GcReport(0, 0)
            with index.changing():
                evicted, obsolete_files = self._make_room(index, excess_bytes)
            self._record_evictions(evicted)
            remove_values(self.root, obsolete_files)
            return GcReport(len(evicted), sum(victim.nbytes for victim in evicted))

    @property
    def room_bytes(self) -> int:
        """Bytes that can be put before anything is evicted."""
        return self.budget_bytes - self._live_index().totals[1]

    def unstored_request_counts(self) -> dict[str, float]:
        """How often values that are not stored were requested, by digest, as far as remembered."""
        return self._ledger.unstored_request_counts()

    def most_requested(self, count: int) -> list[ChunkKey]:
        """At most `count` of the stored values, the most often requested first."""
        return [ChunkKey(digest) for digest in self._ledger.most_requested(count)]

    def request_count(self, key: ChunkKey) -> float:
        """How often a value was requested, stored or not, as far as that is remembered; older requests count less."""
        return self._ledger.entry(key.digest).frequency

    @property
    def policy(self) -> str:
        """The name of the disk's eviction policy, in EVICTION_POLICIES."""
        return self._ledger.policy.name

    def stats(self) -> StoreStats:
        """Entries and bytes on the disk, and this process's hits and misses over all tiers."""
        disk, shared = self._disk_stats(), 0 if self.remote is None else self.remote.counters.counts.hits
        hits = disk.hits + shared + sum(tier.stats().hits for tier in self.tiers)
        return replace(disk, hits=hits, misses=max(0, disk.misses - shared))

    def stats_by_tier(self) -> dict[str, StoreStats]:
        """Stats by tier name, the fastest first: its content, and this process's hits and misses on it.

        A miss in memory may be a hit on the disk.
        """
        return {tier.name: tier.stats() for tier in self.tiers} | {self.name: self._disk_stats()}

    def counts_by_tier(self) -> dict[str, Counts]:
        """This process's counts by tier name, the shared store included."""
        return {name: counters.counts for name, counters in self._counted.items()}

    def totals_by_tier(self) -> dict[str, Counts]:
        """Counts of all processes by tier name since the store was created, except unsaved ones of killed processes.

        Includes tiers that only other processes have.
        """
        return self._ledger.totals(self._live_index().ledger())

    def _disk_stats(self) -> StoreStats:
        return self._counters.stats(*self._live_index().totals, self.budget_bytes)

    @contextmanager
    def _changing(self, timeout_s: float | None = None) -> Iterator[Index]:
        """Hold the writer lock, and yield the index, opened again if another process has rebuilt it.

        OSError becomes StoreError; for a damaged index StoreError is raised after rebuilding it.
        """
        self._live_index()
        try:
            with self._lock.hold(timeout_s):
                if not self._lock.is_in_place():
                    raise StoreError(f"the KV store at {self.root} was moved or removed. Open it again.")
                if not self._live_index().is_in_place():  # another process rebuilt it, because it was damaged
                    outdated = self._index
                    self._index, _ = upkeep.open_index(self.root)
                    outdated.close()  # last, because others read meanwhile
                    self._synchronise_or_rebuild()
                index = self._live_index()
                try:
                    yield index
                except CorruptBlobError as error:
                    self._rebuild(str(error))
                    raise StoreError(f"{error}. The index was rebuilt; try again.") from error
        except OSError as error:
            raise StoreError(
                f"changing the KV store at {self.root} failed: {error}. Check the disk and the folder's permissions."
            ) from error

    def _live_index(self) -> Index:
        if self._closed:
            raise StoreError(f"the KV store at {self.root} has been closed; open it again")
        return self._index
