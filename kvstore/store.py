"""KVStore: where chunks' KV is kept on disk, found by key, checked at every use, and evicted by policy.

Errors are raised only for what the caller must know: no room, no access, another format.
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

from ragblend.kvstore import posix, upkeep
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
    warn_of_network,
    write_failed,
)
from ragblend.kvstore.index import Index, Row
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import LOCK_NAME, check_format, files_of, remove_values, value_files, write_value
from ragblend.kvstore.ledger import Ledger
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import MemoryTier, whole
from ragblend.kvstore.places import Place
from ragblend.kvstore.policy import Entry, EvictionPolicy, policy_named
from ragblend.kvstore.remote import Remote
from ragblend.kvstore.upkeep import GcReport, Problem

log = logging.getLogger(__name__)
Cost = Callable[[int, int], float]
AT_ONCE = 64  # evictions, where a budget was lowered
_QUARANTINE_WAIT_S = 2.0  # a reader does not stand behind a long put for the sake of tidiness


@contextmanager
def _opening(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"opening the KV store at {root} failed: {error}. Check that the folder can be written to and that "
            "the disk has room, or choose another home (RAGBLEND_HOME)."
        ) from error


class KVStore(Closing):
    """Safe for threads, and for several processes: readers never wait for a writer, writers take turns."""

    name = "disk"  # as a tier

    @classmethod
    def open(
        cls,
        root: Path,
        budget_bytes: int | None,
        tiers: Sequence[MemoryTier] = (),
        policy: str | None = None,
        cost: Cost = lambda cached, new: 1.0,
        remote: str | None = None,
    ) -> "KVStore":
        """Open the store at `root`, made if absent (0700, files 0600).

        budget_bytes bounds the values' bytes on the disk (None: a quarter of what is free there and taken by them): a
        put that goes beyond it evicts what it adds, at least, so that a lowered budget is reached by puts, some
        values each, or by `gc` at once; tiers: memory above it, the fastest first, for what is used (see `promote`);
        policy: a row of POLICIES (None: as it was, at first DEFAULT_POLICY), which processes that have the store open
        take over when they save next; cost(cached, new): of computing one of `new` tokens behind `cached` ones, in any
        one unit; remote: URL of a store that others share (see `places.Place`).
        Raises StoreFormatError for a folder of another format, StoreLockedError, StoreError, UsageError for an unknown
        policy.
        """
        wanted = None if policy is None else policy_named(policy)
        store = cls(Path(root), tiers, cost, None if remote is None else Place.of(remote), wanted)
        with ExitStack() as opened, _opening(store.root):
            check_format(store.root)  # before anything is made or tightened in a folder that is not ours
            make_private_folder(store.root)
            warn_of_network(store.root)
            store._lock = opened.enter_context(WriterLock(store.root / LOCK_NAME, upkeep.TIMEOUT_S))
            with store._lock.hold():
                store._index, was_damaged = upkeep.open_index(store.root)
                opened.enter_context(store._index)
                store._counters.add(quarantined=int(was_damaged))
                try:
                    store._settle()
                except CorruptBlobError as error:
                    store._rebuild(str(error))
            if budget_bytes is None:
                free = shutil.disk_usage(store.root).free
                budget_bytes = (free + store._index.totals[1]) // 4
            opened.pop_all()  # all is well, so all stays open
        store.budget_bytes = budget_bytes
        return store

    def __init__(
        self,
        root: Path,
        tiers: Sequence[MemoryTier],
        cost: Cost,
        remote: Place | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.root, self.tiers, self._cost, self._counters = root, tuple(tiers), cost, Counters()
        self.remote = None if remote is None else Remote(remote, self._content, self.contains)
        self._counted = {tier.name: tier.counters for tier in self.tiers} | {self.name: self._counters}
        if self.remote is not None:
            self._counted[self.remote.name] = self.remote.counters
        self._ledger = Ledger(self._counted, policy)
        self.budget_bytes: int  # what follows is `open`'s to set
        self._lock: WriterLock
        self._index: Index
        self._unsynced = self._closed = False

    def _settle(self) -> None:
        """Bring files, index and ledger in line with each other. The caller holds the lock."""
        rows, lost = upkeep.sweep(self._index)
        self._counters.add(quarantined=lost)
        is_ranked_anew = self._ledger.load(self._index.ledger(), rows)
        if orphans := self._ledger.orphans():  # their parent was damaged, say
            self._remove(self._index, orphans)
        if is_ranked_anew:
            self._try_to_save()  # for other processes that have the store open

    def _rebuild(self, why: str) -> None:
        self._counters.add(quarantined=1)
        self._index.close()
        self._index = upkeep.rebuilt(self.root, why)
        self._settle()

    def close(self) -> None:
        """Save what is pending and close all files; closing twice is fine. Open readers go on."""
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
        shared: bool = True,
        wanted: Callable[[], bool] | None = None,
    ) -> bool:
        """Store (or replace) a value; it is on disk and in the index when this returns, and shared soon after.

        codec: how its layers are packed; any is read, and a node of the tree is raw, or it would not be exact. shared:
        whether others may have it. wanted: asked while no other writer can delete or put anything. False, and nothing
        is stored, where it says no, and for a node whose parent is not stored. Raises StoreFullError,
        StoreLockedError, StoreError; nothing has changed then.
        """
        blob = Blob.of(key, chunk, RAW if chunk.parent is not None else codec)
        stored = self.put_blob(blob, wanted)
        if stored and self.remote is not None and shared and chunk.parent is None:
            self.remote.offer(key)
        return stored

    def put_blob(self, blob: Blob, wanted: Callable[[], bool] | None = None) -> bool:
        """The same for one that is packed, which others may have already."""
        digest, tokens = blob.header.key.digest, len(blob.header.token_ids)
        parent = None if blob.header.parent is None else blob.header.parent.digest
        self._check_budget(tokens, blob.nbytes)
        cost = self._cost(blob.header.start, tokens)
        with self._changing() as index:
            if (wanted is not None and not wanted()) or (parent is not None and index.get(parent) is None):
                return False
            file = write_value(self.root, blob)
            try:
                evicted, unnamed = self._enter(index, digest, Row(file.filename, blob.nbytes, parent))
            except BaseException:  # KeyboardInterrupt too: no file may stay that no row names
                if (found := index.get(digest)) is None or found.filename != file.filename:
                    remove_values(self.root, [file.filename])
                raise
            self._forget_in_memory([digest])  # another value may have lain under this key
            self._ledger.arrive(digest, blob.nbytes, cost, parent)
            self._was_evicted(evicted)
            remove_values(self.root, unnamed)
            if self._ledger.is_due:
                self._try_to_save()
        return True

    def _enter(self, index: Index, digest: str, row: Row) -> tuple[list[Entry], list[str]]:
        """Enter a row and evict what it displaces, in one transaction; what was evicted, and files without a row."""
        replaced = index.get(digest)
        grown_bytes = row.nbytes - (0 if replaced is None else replaced.nbytes)
        total_bytes = index.totals[1] + grown_bytes
        spare = {digest, row.parent or digest}
        with index.changing():
            index.set(digest, row)
            evicted, unnamed = self._make_room(index, total_bytes - self.budget_bytes, grown_bytes, spare)
            total_bytes -= sum(victim.nbytes for victim in evicted)
            has_room = total_bytes <= self.budget_bytes or len(evicted) >= AT_ONCE
            if row.parent and grown_bytes > 0 and not has_room:
                self._unsynced = True
                raise StoreFullError(
                    f"storing {row.nbytes:,} bytes behind what the store at {self.root} keeps for them takes "
                    f"more than its budget ({self.budget_bytes:,}). Raise it."
                )
        return evicted, unnamed if replaced is None else [replaced.filename, *unnamed]

    def _was_evicted(self, victims: Sequence[Entry]) -> None:
        self._forget_in_memory([victim.digest for victim in victims])  # the index has no row for them
        self._ledger.evict(victims)
        self._counters.add(evictions=len(victims))

    def check_room(self, tokens: int, nbytes: int) -> None:
        """Raises StoreFullError where there is no room whatever is evicted, so that nothing is computed in vain."""
        self._check_budget(tokens, nbytes)
        disk = shutil.disk_usage(self.root)
        if disk.total and disk.free < nbytes:  # some file systems do not say
            raise write_failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), self.root, nbytes)

    def _check_budget(self, tokens: int, nbytes: int) -> None:
        if nbytes > self.budget_bytes:
            raise StoreFullError(
                f"storing {tokens} tokens takes {nbytes:,} bytes, more than the budget "
                f"of the store at {self.root} ({self.budget_bytes:,}). Raise it, or make chunks smaller."
            )

    def _make_room(
        self, index: Index, excess_bytes: int, needed_bytes: int = 0, spare: Collection[str] = ()
    ) -> tuple[list[Entry], list[str]]:
        """Delete the rows of what is to be evicted; these, and their files.

        At most AT_ONCE beyond what frees `needed_bytes`, and never `spare`. Deleting a file takes a millisecond and
        more, and the caller of put waits for it.
        """
        evicted, unnamed = list[Entry](), list[str]()
        if excess_bytes > 0 and self._others_saved(index):
            self._unsynced = True
        for _ in range(2):
            if self._unsynced:  # other processes put and evict values as well
                gone, rows = {victim.digest for victim in evicted}, index.entries()
                stored = {digest: row for digest, row in rows.items() if digest not in gone}
                self._ledger.refresh(self._saved_by_others(index), stored)
                self._unsynced = False
            for victim in self._ledger.victims(excess_bytes, AT_ONCE, needed_bytes, spare):
                row = index.get(victim.digest)
                if row is not None and index.delete(victim.digest):
                    evicted.append(victim)
                    unnamed.append(row.filename)
                    excess_bytes -= victim.nbytes
                    needed_bytes -= victim.nbytes
            if excess_bytes <= 0 or len(evicted) >= AT_ONCE:
                break
            self._unsynced = True
        return evicted, unnamed

    def delete(
        self, keys: Collection[ChunkKey], still: Callable[[], Collection[ChunkKey]] | None = None
    ) -> int:
        """Remove every byte of these values, and of all that was computed behind them; bytes freed.

        still: asked while no other writer can put anything, which of them are still to be deleted.
        Quarantined copies and counts too; what others share is `withdraw`'s. Raises StoreError if a file stays.
        """
        with self._changing() as index:
            self._ledger.refresh(self._saved_by_others(index), index.entries())
            below = self._ledger.below([key.digest for key in (keys if still is None else still())])
            freed = self._remove(index, below).bytes
            self._forget_in_memory(below)  # once more: a promotion may have been half done
            index.erase_log()
            return freed

    def withdraw(self, keys: Sequence[ChunkKey]) -> None:
        """Remove values from the shared store, if there is one. Raises RemoteError where that is not certain."""
        if self.remote is not None:
            self.remote.withdraw(keys)

    def _forget_in_memory(self, digests: Sequence[str]) -> None:
        for tier in self.tiers:
            tier.delete([ChunkKey(digest) for digest in digests])

    def _remove(self, index: Index, digests: Sequence[str]) -> GcReport:
        """From all tiers. Files before rows: a kill in between leaves a miss, and no file to enter again."""
        self._forget_in_memory(digests)
        named = {self.root / row.filename for each in digests if (row := index.get(each)) is not None}
        try:
            freed = upkeep.remove_files(named.union(*(files_of(self.root, each) for each in digests)))
        except StoreError:  # rows and counts go all the same; the caller tries the files again
            self._forget(digests)
            raise
        self._forget(digests)
        return freed

    def _forget(self, digests: Sequence[str]) -> None:
        self._ledger.forget(digests)
        self._save(digests)

    # --- reading: whatever is wrong with a stored value makes a miss, and the caller encodes the chunk again

    def contains(self, key: ChunkKey) -> bool:
        """Whether the index has this key; the value is not looked at. False where the index cannot be read."""
        return self._row_of(key) is not None

    def open_chunk(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        geometry: Geometry | None = None,
        start: int | None = None,
        parent: ChunkKey | None = None,
    ) -> Source | None:
        """A reader of the fastest tier that has it; None is a miss (absent, or damaged).

        Damaged is what holds another key, parent or other token ids, and, where they are given, another geometry or
        start: a key stands for them too, and a checksum is right for whatever was written.
        """
        # What another process deleted is deleted: the index has the last word on whether there is such a value.
        self._ledger.used(key.digest)
        for tier in self.tiers if self.tiers and self.contains(key) else ():
            if (held := tier.open_chunk(key, token_ids)) is not None:
                return held
        reader = self._open(self._spoiled, key, tuple(token_ids), geometry, start, parent)
        self._counters.add(**({"misses": 1} if reader is None else {"hits": 1}))
        return reader

    def _content(self, key: ChunkKey) -> bytes | None:
        """A value's file as it is, for other machines, which check what they read."""
        path = self._path_of(key)
        if path is not None:
            with contextlib.suppress(OSError), os.fdopen(open_file(path), "rb") as file:
                return file.read()
        return None

    def will_need(self, key: ChunkKey) -> None:
        """Ask the kernel to read that value ahead of its use; absent values and old systems are no error."""
        path = self._path_of(key)
        if path is not None:
            with (
                contextlib.suppress(OSError),
                os.fdopen(open_file(path), "rb") as file,
            ):  # evicted meanwhile, say
                posix.read_ahead(file.fileno())

    def promote(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        geometry: Geometry | None = None,
        start: int | None = None,
        parent: ChunkKey | None = None,
    ) -> None:
        """Copy a value that was used to the next faster tier, if there is one; for the background. See `open_chunk`."""
        wanting: MemoryTier | None = None
        source: Source | None = None
        for tier in self.tiers:  # the fastest first
            if (source := tier.peek(key, token_ids)) is not None:
                break
            wanting = tier
        if wanting is None or not self.contains(key):
            return
        source = source or self._open(self._quarantine, key, tuple(token_ids), geometry, start, parent)
        if source is not None:
            with source, contextlib.suppress(CorruptBlobError):  # it is in quarantine by now
                wanting.admit(key, source, self._ledger.entry(key.digest))
        if not self.contains(key):  # deleted meanwhile
            wanting.delete([key])

    def save_uses(self) -> None:
        """Save what was used, for other processes, if enough has changed; for the background."""
        self._live_index()
        if self._ledger.is_due:
            self._try_to_save()

    def _try_to_save(self) -> None:
        try:
            self._save()
        except StoreError as error:  # the next change, or the next time, saves it
            log.warning("what was used and counted cannot be saved: %s", error)

    def _others_saved(self, index: Index) -> bool:
        return index.ledger_serial() != self._ledger.serial

    def _saved_by_others(self, index: Index) -> bytes:
        """The saved ledger, where another process saved since this one did; else it is not read."""
        return index.ledger() if self._others_saved(index) else b""

    def _save(self, deleted: Sequence[str] = ()) -> None:
        """Save the ledger, and delete rows, in one transaction."""
        with self._changing() as index:
            packed, is_saved = self._ledger.merged(self._saved_by_others(index), index.entries)
            serial = self._ledger.serial + 1
            with index.changing():
                for digest in deleted:
                    index.delete(digest)
                index.set_ledger(packed, serial)
            is_saved()

    def get(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkKV | None:
        """The whole value, every layer verified, in memory that the caller owns; None is a miss."""
        reader = self.open_chunk(key, token_ids)
        if reader is None:
            return None
        with reader:
            try:
                return whole(reader)
            except CorruptBlobError:
                return None

    def _open(
        self,
        spoiled: Callable[[ChunkKey, Path, str], None],
        key: ChunkKey,
        token_ids: tuple[int, ...],
        geometry: Geometry | None,
        start: int | None,
        parent: ChunkKey | None,
    ) -> ChunkReader | None:
        """spoiled: called with a layer that is damaged."""
        missing: Path | None = None
        while (path := self._path_of(key)) is not None:
            try:
                damaged = partial(spoiled, key, path)
                return open_verified(path, key, token_ids, damaged, geometry, start, parent)
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

    def _row_of(self, key: ChunkKey) -> Row | None:
        """None where there is none, and where the index cannot be read: the caller computes the chunk."""
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

    def _spoiled(self, key: ChunkKey, path: Path, what: str) -> None:
        """A layer of an open value is damaged: what was counted a hit is a miss."""
        self._counters.add(hits=-1, misses=1)
        self._quarantine(key, path, what)

    def _quarantine(self, key: ChunkKey, path: Path | None, why: str) -> None:
        """Take the row of `key` out of use, if it still names `path`; None: rebuild the index if it is damaged."""
        try:
            with self._changing(_QUARANTINE_WAIT_S) as index:
                row = index.get(key.digest)
                if path is None or row is None or self.root / row.filename != path:
                    return  # evicted, replaced or rebuilt meanwhile
                upkeep.refuse(index, [key.digest])
                self._ledger.forget([key.digest])
        except (StoreError, OSError) as error:
            log.warning("damaged KV of chunk %s stays until it is read again: %s", key.digest[:12], error)
            return
        self._counters.add(quarantined=1)
        log.warning("KV of chunk %s is in quarantine and will be encoded again: %s", key.digest[:12], why)

    # --- looking after

    def keys(self) -> Iterator[ChunkKey]:
        """The keys as they are now, oldest first."""
        return map(ChunkKey, self._live_index().entries())

    def sizes(self) -> dict[ChunkKey, int]:
        """How many bytes each value takes, as they are now."""
        return {ChunkKey(digest): row.nbytes for digest, row in self._live_index().entries().items()}

    def check(self) -> list[Problem]:
        """Everything wrong with the store, from reading all of it; changes nothing."""
        with self._changing() as index:  # for the listing only: it must not see half a put
            try:
                files, rows = list(value_files(self.root)), index.entries()
            except CorruptBlobError as error:
                return [Problem("index", None, index.path, str(error))]
        return list(upkeep.check_files(index, files, rows))

    def repair(self) -> list[Problem]:
        """What check() finds, after taking it out of use; what is lost then heals by encoding again."""
        problems = self.check()
        with self._changing() as index:
            bad = {each.key.digest for each in problems if each.key and each.kind not in upkeep.HARMLESS}
            upkeep.refuse(index, bad)
            self._counters.add(quarantined=len(bad))
            damaged = [each.message for each in problems if each.kind == "index"]
            if damaged:
                self._rebuild(damaged[0])
            else:
                self._settle()
        return problems

    def gc(self, keep: Collection[ChunkKey] | None = None) -> GcReport:
        """Remove orphans, temporary files, the quarantine, what is beyond the budget and, given `keep`, all others."""
        with self._changing() as index:
            rows = index.entries()
            self._ledger.refresh(self._saved_by_others(index), rows)
            gone = self._ledger.orphans()
            if keep is not None:
                wanted = {key.digest for key in keep}
                gone += self._ledger.below([digest for digest in rows if digest not in wanted])
                self._ledger.keep_only(wanted)
            report = self._remove(index, gone) + upkeep.remove_leftovers(index)
            index.erase_log()
        while (evicted := self._evict_some()).files:
            report += evicted
        for tier in self.tiers:
            tier.delete(list(filterfalse(self.contains, tier.keys())))
        return report

    def _evict_some(self) -> GcReport:
        """Of what is beyond the budget, so much that others need not wait long for the lock."""
        with self._changing() as index:
            excess_bytes = index.totals[1] - self.budget_bytes
            if excess_bytes <= 0:
                return GcReport(0, 0)
            with index.changing():
                evicted, unnamed = self._make_room(index, excess_bytes)
            self._was_evicted(evicted)
            remove_values(self.root, unnamed)
            return GcReport(len(evicted), sum(victim.nbytes for victim in evicted))

    @property
    def room_bytes(self) -> int:
        """What may still be put before anything is evicted."""
        return self.budget_bytes - self._live_index().totals[1]

    def asked(self) -> dict[str, float]:
        """How often what is not stored was asked for, by digest, as far as that is remembered."""
        return self._ledger.asked()

    def times_asked(self, key: ChunkKey) -> float:
        """How often a value was asked for, stored or not, as far as that is remembered."""
        return self._ledger.entry(key.digest).frequency

    @property
    def policy(self) -> str:
        """What the disk evicts by: a row of POLICIES."""
        return self._ledger.policy.name

    def stats(self) -> StoreStats:
        """Entries and bytes of the store, and what this process asked of it, on whichever tier it was found."""
        disk, shared = self._disk_stats(), 0 if self.remote is None else self.remote.counters.counts.hits
        hits = disk.hits + shared + sum(tier.stats().hits for tier in self.tiers)
        return replace(disk, hits=hits, misses=max(0, disk.misses - shared))

    def stats_by_tier(self) -> dict[str, StoreStats]:
        """For each tier by its name, the fastest first: what it holds, and what this process found there.

        A miss is a tier's own: what memory does not have, the disk may.
        """
        return {tier.name: tier.stats() for tier in self.tiers} | {self.name: self._disk_stats()}

    def counts_by_tier(self) -> dict[str, Counts]:
        """What this process did on each tier, the shared store included."""
        return {name: counters.counts for name, counters in self._counted.items()}

    def totals_by_tier(self) -> dict[str, Counts]:
        """What all processes ever did on each tier, this one included; what a killed one had not written is lost.

        Tiers that only other processes have are there as well.
        """
        return self._ledger.totals(self._live_index().ledger())

    def _disk_stats(self) -> StoreStats:
        return self._counters.stats(*self._live_index().totals, self.budget_bytes)

    @contextmanager
    def _changing(self, timeout_s: float | None = None) -> Iterator[Index]:
        """Be the only one, of all threads and processes, that changes the store; OSError becomes StoreError."""
        self._live_index()
        try:
            with self._lock.hold(timeout_s):
                index = self._live_index()
                if not (self._lock.is_in_place() and index.is_in_place()):
                    raise StoreError(
                        f"the KV store at {self.root} was moved or removed, or another process rebuilt its damaged "
                        "index. Open it again."
                    )
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
