"""KVStore: where chunks' KV is kept on disk, found by key, checked at every use, and evicted by policy.

Errors are raised only for what the caller must know: no room, no access, another format.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path

from ragblend.kvstore.admission import Newcomer, admit
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.codec import RAW, Codec
from ragblend.kvstore.errors import StoreFullError
from ragblend.kvstore.files import write_failed
from ragblend.kvstore.index import drop
from ragblend.kvstore.layout import files_of, value_files
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.opening import default_budget_bytes, open_index
from ragblend.kvstore.policy import policy_named
from ragblend.kvstore.reading import ReadingStore
from ragblend.kvstore.state import Cost
from ragblend.kvstore.stats import Counts, StoreStats, read_totals, with_unwritten
from ragblend.kvstore.upkeep import GcReport, Problem, check_files, collect, remove_files, repair
from ragblend.kvstore.uses import Uses

_COUNTS_AT_A_TIME = 64


def same_cost(cached_tokens: int, new_tokens: int) -> float:
    """What a token costs to compute where nothing was measured: all alike."""
    return 1.0


class KVStore(ReadingStore):
    """Safe for threads, and for several processes: readers never wait for a writer, writers take turns."""

    @classmethod
    def open(
        cls,
        root: Path,
        budget_bytes: int | None,
        tiers: Sequence[MemoryTier] = (),
        policy: str | None = None,
        cost: Cost = same_cost,
    ) -> "KVStore":
        """Open the store at `root`, made if absent (0700, files 0600).

        budget_bytes bounds the values' bytes on the disk, at every put (None: a quarter of what is free there and
        taken by them); tiers: memory above it, the fastest first, for what is used (see `promote`); policy: a row of
        POLICIES, from now on everybody's who has the store open (None: as it was, at first DEFAULT_POLICY);
        cost(cached, new): of computing one of `new` tokens behind `cached` ones, in any one unit. Raises
        StoreFormatError for a folder of another format, StoreLockedError, StoreError, UsageError for an unknown policy.
        """
        uses = Uses(None if policy is None else policy_named(policy))
        opened = open_index(Path(root), uses)
        if budget_bytes is None:
            budget_bytes = default_budget_bytes(Path(root), opened.index.totals()[1])
        store = cls(Path(root), budget_bytes, opened, uses, tiers, cost)
        store._counters.add(quarantined=opened.refused)
        return store

    # --- changing

    def put(self, key: ChunkKey, chunk: ChunkKV, codec: Codec = RAW) -> None:
        """Store (or replace) a value; it is on disk and in the index when this returns.

        codec: how its layers are packed; any is read. What the value displaces goes in the same transaction. Raises
        StoreFullError, StoreLockedError, StoreError; nothing has changed then.
        """
        blob = Blob.of(key, chunk, codec)
        nbytes = blob.nbytes
        if nbytes > self.budget_bytes:
            raise StoreFullError(
                f"storing {len(chunk.token_ids)} tokens takes {nbytes:,} bytes, more than the budget "
                f"of the store at {self.root} ({self.budget_bytes:,}). Raise it, or make chunks smaller."
            )
        cost = self._cost(chunk.start, len(chunk.token_ids))
        with self._changing():
            filename = self._write(blob)
            try:
                unnamed = self._enter(Newcomer(key.digest, filename, nbytes, cost))
            except BaseException:  # KeyboardInterrupt too: no file may stay that no row names
                self._drop_if_unnamed(key.digest, filename)
                raise
            for tier in self.tiers:  # another value may have lain under this key
                tier.delete(key)
            for name in unnamed:
                self._cache.disk.remove(name)

    def _write(self, blob: Blob) -> str:
        disk = self._cache.disk
        try:
            filename: str = disk.store(blob, False, key=blob.header.key.digest)[2]
        except OSError as error:
            raise write_failed(error, self.root / disk.last_written, blob.nbytes) from error
        return filename

    def _enter(self, new: Newcomer) -> list[str | None]:
        """Name the file in the index and evict what is too much then; the files that no row names any more."""
        with self._recording(_COUNTS_AT_A_TIME) as sql:
            admitted = admit(sql, self._uses, new, self.budget_bytes)
        self._counters.add(evictions=admitted.evicted)
        return admitted.unnamed

    def _drop_if_unnamed(self, digest: str, filename: str) -> None:
        row = self._index.row(digest)
        if row is None or row.filename != filename:
            self._cache.disk.remove(filename)

    def delete(self, key: ChunkKey) -> int:
        """Remove every byte of a value, quarantined copies and counts too; bytes freed. StoreError if a file stays."""
        for tier in self.tiers:
            tier.delete(key)
        with self._changing() as index:
            # Files before the row: a kill in between leaves a miss, not a file that adopt() would bring back.
            report = remove_files(files_of(self.root, key.digest))
            row = index.row(key.digest)
            with self._recording() as sql:
                self._uses.forget(sql, [key.digest])
                if row is not None:
                    drop(sql, row.rowid)
            index.truncate_log()
            return report.bytes

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
            if wanted is not None:
                with index.transaction() as sql:
                    self._uses.keep_only(sql, wanted)
            report = collect(self.root, index, wanted)
        for tier in self.tiers:
            for key in filterfalse(self.contains, tier.keys()):
                tier.delete(key)
        return report

    @property
    def policy(self) -> str:
        """What the disk evicts by: a row of POLICIES."""
        return self._uses.policy.name

    def stats(self) -> StoreStats:
        """Entries and bytes of the store, and what this process asked of it, on whichever tier it was found."""
        disk = self._disk_stats()
        return replace(disk, hits=disk.hits + sum(tier.stats().hits for tier in self.tiers))

    def stats_by_tier(self) -> dict[str, StoreStats]:
        """For each tier by its name, the fastest first: what it holds, and what this process found there.

        A miss is a tier's own: what memory does not have, the disk may.
        """
        return {tier.name: tier.stats() for tier in self.tiers} | {self.name: self._disk_stats()}

    def totals_by_tier(self) -> dict[str, Counts]:
        """What all processes ever did on each tier, this one included; what a killed one had not written is lost.

        Tiers that only other processes have are there as well.
        """
        with self._live_index().connection() as sql:
            totals = read_totals(sql)
        return with_unwritten(totals, self._counted)

    def _disk_stats(self) -> StoreStats:
        return self._counters.stats(*self._live_index().totals(), self.budget_bytes)
