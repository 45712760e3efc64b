"""Finding a stored value, checking it at every use, and taking it out of use when it is damaged.

Whatever is wrong with a stored value makes a miss: it is put in quarantine and counted, and the caller encodes the
chunk again.
"""

import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ragblend.kvstore.chunks import ChunkKey, ChunkKV
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.files import DAMAGE
from ragblend.kvstore.held import Held, whole
from ragblend.kvstore.memory import MemoryTier
from ragblend.kvstore.reader import ChunkReader, open_verified
from ragblend.kvstore.sqlite import SQL_ERRORS, index_failed
from ragblend.kvstore.state import StoreState
from ragblend.kvstore.upkeep import refuse_row

log = logging.getLogger(__name__)
_QUARANTINE_WAIT_S = 2.0  # a reader does not stand behind a long put for the sake of tidiness


class ReadingStore(StoreState):
    """The half of KVStore that finds values. Readers never wait for a writer."""

    def contains(self, key: ChunkKey) -> bool:
        """Whether the index has this key; the value is not looked at."""
        index = self._live_index()
        try:
            row = index.row(key.digest)
        except StoreError as error:
            log.warning("%s", error)
            return False
        return row is not None and row.digest == key.digest

    def open_chunk(self, key: ChunkKey, token_ids: Sequence[int]) -> ChunkReader | Held | None:
        """A reader of the fastest tier that has it, key and token ids verified; None is a miss (absent, or damaged)."""
        # What another process deleted is deleted: the index has the last word on whether there is such a value.
        self._uses.used(key.digest)
        for tier in self.tiers if self.tiers and self.contains(key) else ():
            if (held := tier.open_chunk(key, token_ids)) is not None:
                return held
        reader = self._open(key, tuple(token_ids))
        self._counters.add(**({"misses": 1} if reader is None else {"hits": 1}))
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
        wanting: MemoryTier | None = None
        source: ChunkReader | Held | None = None
        for tier in self.tiers:  # the fastest first
            if (source := tier.peek(key, token_ids)) is not None:
                break
            wanting = tier
        if wanting is None or not self.contains(key):
            return
        with contextlib.suppress(CorruptBlobError):  # it is in quarantine by now
            source = source or self._open(key, tuple(token_ids))
            if source is not None:
                with source:
                    wanting.admit(key, source, self._cost(source.start, len(source.token_ids)))
        if not self.contains(key):  # deleted meanwhile
            wanting.delete(key)

    def write_uses(self, at_least: int = 64) -> None:
        """Write down what was used, for other processes to know, if so much waits; for when nobody does."""
        if self._uses.waiting >= at_least:
            try:
                self._live_index()
                self._flush()
            except StoreError as error:  # the next change, or the next time, writes it
                log.warning("what was used cannot be written: %s", error)

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
