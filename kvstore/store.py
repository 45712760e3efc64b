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

from ragblend.kvstore import upkeep
from ragblend.kvstore.blob import Blob, ChunkReader, open_verified
from ragblend.kvstore.chunks import ChunkKV, Geometry
from ragblend.kvstore.codec import RAW, Codec, Source
from ragblend.kvstore.errors import CorruptBlobError, StoreError, StoreFullError
from ragblend.kvstore.files import DAMAGE, Closing, open_file, write_failed
from ragblend.kvstore.index import FOREIGN, Index
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import LEDGER_NAME, files_of, remove_values, value_files, write_value
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import MemoryTier, whole
from ragblend.kvstore.places import Place
from ragblend.kvstore.policy import Entry, policy_named
from ragblend.kvstore.remote import Remote
from ragblend.kvstore.sqlite import DamagedFileError
from ragblend.kvstore.upkeep import GcReport, Problem
from ragblend.kvstore.uses import Change, Counters, Counts, Ledger, StoreStats

log = logging.getLogger(__name__)
Cost = Callable[[int, int], float]
AT_ONCE = 64  # evictions, where a budget was lowered
_COUNTS_AT_A_TIME = 64
_QUARANTINE_WAIT_S = 2.0  # a reader does not stand behind a long put for the sake of tidiness


def same_cost(cached_tokens: int, new_tokens: int) -> float:
    """What a token costs to compute where nothing was measured: all alike."""
    return 1.0


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
        cost: Cost = same_cost,
        remote: str | None = None,
    ) -> "KVStore":
        """Open the store at `root`, made if absent (0700, files 0600).

        budget_bytes bounds the values' bytes on the disk (None: a quarter of what is free there and taken by them): a
        put that goes beyond it evicts what it adds, at least, so that a lowered budget is worked off by puts, some
        values each, or by `gc` at once; tiers: memory above it, the fastest first, for what is used (see `promote`);
        policy: a row of POLICIES, from now on everybody's who has the store open (None: as it was, at first
        DEFAULT_POLICY); cost(cached, new): of computing one of `new` tokens behind `cached` ones, in any one unit;
        remote: URL of a store that others share (see `places.Place`).
        Raises StoreFormatError for a folder of another format, StoreLockedError, StoreError, UsageError for an unknown
        policy.
        """
        wanted = None if policy is None else policy_named(policy)
        store = cls(Path(root), tiers, cost, None if remote is None else Place.of(remote))
        with ExitStack() as opened, _opening(store.root):
            store._lock = opened.enter_context(upkeep.open_folder(store.root))
            with store._lock.hold():
                store._index, untrusted = upkeep.open_index(store.root)
                opened.enter_context(store._index)
                store._ledger = Ledger(store.root / LEDGER_NAME, wanted, store._counted)
                opened.enter_context(store._ledger)
                store._counters.add(quarantined=int(untrusted not in upkeep.NO_DAMAGE))
                try:
                    store._settle()
                except CorruptBlobError as error:  # a row that diskcache can neither read nor delete
                    store._make_anew(str(error))
            if budget_bytes is None:
                free = shutil.disk_usage(store.root).free
                budget_bytes = (free + store._index.totals[1]) // 4
            opened.pop_all()  # all is well, so all stays open
        store.budget_bytes = budget_bytes
        return store

    def __init__(
        self, root: Path, tiers: Sequence[MemoryTier], cost: Cost, remote: Place | None = None
    ) -> None:
        self.root, self.tiers, self._cost, self._counters = root, tuple(tiers), cost, Counters()
        self.remote = None if remote is None else Remote(remote, self._content, self.contains)
        self._counted = {tier.name: tier.counters for tier in self.tiers} | {self.name: self._counters}
        if self.remote is not None:
            self._counted[self.remote.name] = self.remote.counters
        self.budget_bytes: int  # what follows is `open`'s to set
        self._lock: WriterLock
        self._index: Index
        self._ledger: Ledger
        self._unsettled = self._closed = False
        self._settled_file = 0  # the ledger's generation
        self._total_before = 0

    def _settle(self) -> None:
        """Bring files, index and ledger in line with each other."""
        try:
            self._settle_once()
        except DamagedFileError:  # the ledger, which is a new one now
            self._settle_once()

    def _settle_once(self) -> None:
        stored, refused = upkeep.sweep(self._index, self._ledger.sizes())
        self._counters.add(quarantined=refused)
        self._ledger.settle(stored, self._parent_of)
        self._settled_file = self._ledger.generation
        self._sweep_unreachable()

    def _parent_of(self, digest: str) -> str | None:
        """Of a value that the ledger does not know, from its file; None where that cannot be read."""
        return upkeep.parent_in(self._index, digest)

    def _sweep_unreachable(self) -> None:
        """Nodes that have lost their parent, as when it was damaged: nobody would find them."""
        with self._committing() as (change, _):
            self._remove(change, change.unreachable())

    def _make_anew(self, why: str) -> None:
        self._counters.add(quarantined=1)
        self._index.close()
        self._index = upkeep.made_anew(self.root, why)
        self._settle()

    def close(self) -> None:
        """Write what is pending and let go of the files; closing twice is fine. Open readers go on."""
        if self._closed:
            return
        if self.remote is not None:
            self.remote.close()
        self._write_waiting()
        self._closed = True
        for tier in self.tiers:
            tier.clear()
        for each in (self._index, self._ledger, self._lock):
            each.close()

    def rest(self) -> None:
        """Let go of what this thread holds open of the index, for who waits next; the next use opens it again."""
        self._index.close()

    # --- changing

    def put(self, key: ChunkKey, chunk: ChunkKV, codec: Codec = RAW, shared: bool = True) -> bool:
        """Store (or replace) a value; it is on disk and in the index when this returns, and shared soon after.

        codec: how its layers are packed; any is read, and a node of the tree is raw, or it would not be exact. What the
        value displaces goes in the same transaction. shared: whether others may have it. False for a node whose parent
        is not stored. Raises StoreFullError, StoreLockedError, StoreError; nothing has changed then.
        """
        stored = self.put_blob(Blob.of(key, chunk, RAW if chunk.parent is not None else codec))
        if self.remote is not None and shared and chunk.parent is None:
            self.remote.offer(key)
        return stored

    def put_blob(self, blob: Blob) -> bool:
        """The same for one that is packed, which others may have already."""
        key, tokens = blob.header.key, len(blob.header.token_ids)
        parent = None if blob.header.parent is None else blob.header.parent.digest
        self._check_budget(tokens, blob.nbytes)
        cost = self._cost(blob.header.start, tokens)
        with self._changing() as index:
            if parent is not None and upkeep.name_in(index, parent) is None:
                return False
            file = write_value(self.root, blob)
            try:
                with self._committing(_COUNTS_AT_A_TIME) as (change, unnamed):
                    index.set(file)
                    change.arrive(key.digest, blob.nbytes, cost, parent)
                    evicted = self._make_room(change, change.grown_bytes, spare=key.digest)
                    if parent and change.grown_bytes > 0 and self._total_bytes(change) > self.budget_bytes:
                        raise StoreFullError(
                            f"storing {blob.nbytes:,} bytes behind what the store at {self.root} keeps for them takes "
                            f"more than its budget ({self.budget_bytes:,}). Raise it."
                        )
            except BaseException as error:  # KeyboardInterrupt too: no file may stay that no row names
                if upkeep.name_in(index, key.digest) != file.filename:
                    remove_values(self.root, [file.filename])
                    raise
                if not isinstance(error, StoreError):
                    raise
                log.warning("the value is stored, the ledger of uses is brought in line later: %s", error)
            self._forget_in_memory([key.digest])  # another value may have lain under this key
            self._counters.add(evictions=evicted)
            remove_values(self.root, unnamed)
        return True

    def check_room(self, tokens: int, nbytes: int) -> None:
        """Raises StoreFullError where so much has no place, whatever is evicted: for who would compute it first."""
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

    def _make_room(self, change: Change, needed_bytes: int = 0, spare: str = "") -> int:
        """Evict what is beyond the budget, the lowest values first, and none that another stands behind: how many.

        At most AT_ONCE beyond what frees `needed_bytes`, and never `spare`. Deleting a file takes a millisecond and
        more, and who puts a value waits for it.
        """
        excess_bytes, freed_bytes, extra = self._total_bytes(change) - self.budget_bytes, 0, 0
        evicted = 0
        while freed_bytes < excess_bytes and extra < AT_ONCE:
            victims, ghosts = list[Entry](), list[str]()
            for lowest in change.in_order(spare):
                if not self._index.delete(lowest.digest):
                    ghosts.append(lowest.digest)  # the index's part of that change was never committed
                    continue
                extra += freed_bytes >= needed_bytes
                victims.append(lowest)
                freed_bytes += lowest.nbytes
                if freed_bytes >= excess_bytes or extra == AT_ONCE:
                    break
            self._forget_in_memory([victim.digest for victim in victims])  # where nobody would find them
            change.evict(victims)
            change.forget(ghosts)
            evicted += len(victims)
            if not victims and not ghosts:  # then there are values that the ledger does not know
                self._unsettled = True
                break
        return evicted

    def _total_bytes(self, change: Change) -> int:
        """All values' bytes: of the files, where diskcache's sum moved otherwise than the ledger's (a damaged row)."""
        if self._total_before < 0 or self._index.totals[1] != self._total_before + change.grown_bytes:
            sizes = self._sizes()
            self._index.recount(len(sizes), sum(sizes.values()))
            self._total_before = self._index.totals[1] - change.grown_bytes
        return self._index.totals[1]

    def _sizes(self) -> dict[str, int]:
        """The bytes of every value by its key, in the order they came."""
        sizes = {file.filename: file.nbytes for file in value_files(self.root)}
        index = self._live_index()
        named = {digest: upkeep.name_in(index, digest) for digest in index.digests() if digest != FOREIGN}
        return {digest: sizes[name] for digest, name in named.items() if name in sizes}

    def delete(self, keys: Collection[ChunkKey]) -> int:
        """Remove every byte of these values, and of all that was computed behind them; bytes freed.

        Quarantined copies and counts too; what others share is `withdraw`'s. Raises StoreError if a file stays.
        """
        with self._changing() as index:
            with self._committing() as (change, _):
                below = list({digest: None for key in keys for digest in change.below(key.digest)})
                freed = self._remove(change, below)
            self._forget_in_memory(below)  # once more: a promotion may have been half done
            index.truncate_log()
            self._ledger.truncate_log()
            return freed

    def withdraw(self, keys: Sequence[ChunkKey]) -> None:
        """Remove values from the shared store, if there is one. Raises RemoteError where that is not certain."""
        if self.remote is not None:
            self.remote.withdraw(keys)

    def _forget_in_memory(self, digests: Sequence[str]) -> None:
        for tier in self.tiers:
            tier.delete([ChunkKey(digest) for digest in digests])

    def _remove(self, change: Change, digests: Sequence[str]) -> int:
        """From all tiers: bytes freed. Files before rows: a kill in between leaves a miss, no file to enter again."""
        self._forget_in_memory(digests)
        report = upkeep.remove_files([path for digest in digests for path in files_of(self.root, digest)])
        for digest in digests:
            self._index.delete(digest)
        change.forget(digests)
        return report.bytes

    # --- reading: whatever is wrong with a stored value makes a miss, and the caller encodes the chunk again

    def contains(self, key: ChunkKey) -> bool:
        """Whether the index has this key; the value is not looked at. False where the index cannot be read."""
        index = self._live_index()
        try:
            return upkeep.name_in(index, key.digest) is not None
        except StoreError as error:
            log.warning("%s", error)
            return False

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
        """A value's file as it is, for others, who check what they read."""
        path = self._path_of(key)
        if path is not None:
            with contextlib.suppress(OSError), os.fdopen(open_file(path), "rb") as file:
                return file.read()
        return None

    def will_need(self, key: ChunkKey) -> None:
        """Ask the kernel to read that value ahead of its use; absent values and old systems are no error."""
        path = self._path_of(key)
        if path is None or not hasattr(os, "posix_fadvise"):
            return
        with contextlib.suppress(OSError):  # evicted meanwhile, say: its use will tell
            fd = open_file(path)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def promote(
        self,
        key: ChunkKey,
        token_ids: Sequence[int],
        geometry: Geometry | None = None,
        start: int | None = None,
        parent: ChunkKey | None = None,
    ) -> None:
        """Bring a value that was used one tier up, if there is one; for when nobody waits. See `open_chunk`."""
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

    def write_uses(self, at_least: int = 64) -> None:
        """Write down what was used, for other processes to know, if so much waits; for when nobody does."""
        self._live_index()
        if self._ledger.waiting >= at_least:
            self._write_waiting()

    def _write_waiting(self) -> None:
        try:
            with self._ledger.changing():
                pass
        except StoreError as error:  # the next change, or the next time, writes it
            log.warning("what was used and counted cannot be written: %s", error)

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
        """spoiled: told of a layer that is damaged."""
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

    def _path_of(self, key: ChunkKey) -> Path | None:
        index = self._live_index()
        try:
            filename = index.filename(key.digest)
            return None if filename is None else self.root / filename
        except CorruptBlobError as error:
            self._quarantine(key, None, str(error))
        except StoreError as error:
            log.warning("%s", error)  # a miss: the caller goes on without us
        return None

    def _spoiled(self, key: ChunkKey, path: Path, what: str) -> None:
        """A layer of an open value is damaged: what was counted a hit is a miss."""
        self._counters.add(hits=-1, misses=1)
        self._quarantine(key, path, what)

    def _quarantine(self, key: ChunkKey, path: Path | None, why: str) -> None:
        """Take the row of `key` out of use, if it still names `path` (None: whatever it names)."""
        try:
            with self._changing(_QUARANTINE_WAIT_S) as index:
                if path is not None and self.root / str(upkeep.name_in(index, key.digest)) != path:
                    return  # evicted or replaced meanwhile
                upkeep.refuse(index, key.digest)
        except (StoreError, OSError) as error:
            log.warning("damaged KV of chunk %s stays until it is read again: %s", key.digest[:12], error)
            return
        self._counters.add(quarantined=1)
        log.warning("KV of chunk %s is in quarantine and will be encoded anew: %s", key.digest[:12], why)

    # --- looking after

    def keys(self) -> Iterator[ChunkKey]:
        """The keys as they are now, oldest first."""
        return iter([ChunkKey(digest) for digest in self._live_index().digests() if digest != FOREIGN])

    def sizes(self) -> dict[ChunkKey, int]:
        """How many bytes each value takes, as they are now."""
        return {ChunkKey(digest): nbytes for digest, nbytes in self._sizes().items()}

    def check(self) -> list[Problem]:
        """Everything wrong with the store, from reading all of it; changes nothing."""
        with self._changing() as index:  # for the listing only: it must not see half a put
            files, digests = list(value_files(self.root)), index.digests()
        return list(upkeep.check_files(index, files, digests))

    def repair(self) -> list[Problem]:
        """What check() finds, after taking it out of use; what is lost then heals by encoding again."""
        problems = self.check()
        with self._changing() as index:
            bad = {
                problem.key.digest
                for problem in problems
                if problem.key and problem.kind not in upkeep.HARMLESS
            }
            for digest in bad:
                upkeep.refuse(index, digest)
            self._counters.add(quarantined=len(bad))
            damaged = [each.message for each in problems if each.kind in ("index", "foreign-row")]
            if damaged:
                self._make_anew(damaged[0])
            else:
                self._settle()
        return problems

    def gc(self, keep: Collection[ChunkKey] | None = None) -> GcReport:
        """Remove orphans, temporary files, the quarantine, what is beyond the budget and, given `keep`, all others."""
        wanted = None if keep is None else {key.digest for key in keep}
        with self._changing() as index:
            dropped = [] if wanted is None else [each for each in index.digests() if each not in wanted]
            report = upkeep.collect(index, dropped)
            if wanted is not None:
                with self._ledger.changing() as change:
                    change.keep_only(wanted)
                self._ledger.truncate_log()
            self._unsettled = True  # the ledger may take for stored what is in quarantine
            self._sweep_unreachable()
        while (evicted := self._evict_some()).files:
            report += evicted
        for tier in self.tiers:
            tier.delete(list(filterfalse(self.contains, tier.keys())))
        return report

    def _evict_some(self) -> GcReport:
        """Of what is beyond the budget, so much that others need not wait long for the lock."""
        with self._changing() as index:
            before = index.totals[1]
            with self._committing() as (change, unnamed):
                evicted = self._make_room(change)
            self._counters.add(evictions=evicted)
            remove_values(self.root, unnamed)
            return GcReport(evicted, before - index.totals[1])

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
        return self._ledger.totals()

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
                        f"the KV store at {self.root} was moved or removed, or another process made its damaged index "
                        "anew. Open it again."
                    )
                try:
                    yield index
                except CorruptBlobError as error:
                    self._make_anew(str(error))
                    raise StoreError(f"{error}. The index was made anew; try again.") from error
        except OSError as error:
            raise StoreError(
                f"changing the KV store at {self.root} failed: {error}. Check the disk and the folder's permissions."
            ) from error

    @contextmanager
    def _committing(self, counts_at_least: int = 1) -> Iterator[tuple[Change, list[str]]]:
        """A transaction of the index, and then of the ledger; the list is of files that no row names any more.

        The index has the last word: a ledger that could not follow is brought in line by the next one.
        """
        settle, self._unsettled = self._unsettled, False
        try:
            with self._ledger.changing(counts_at_least) as change:
                if settle or self._ledger.generation != self._settled_file:
                    change.settle(self._sizes(), None, self._parent_of)
                    self._settled_file = self._ledger.generation
                with self._index.changing() as unnamed:
                    self._total_before = self._index.totals[1]
                    yield change, unnamed
                    self._total_bytes(change)
        except BaseException:
            self._unsettled = True
            raise

    def _live_index(self) -> Index:
        if self._closed:
            raise StoreError(f"the KV store at {self.root} has been closed; open it again")
        return self._index
