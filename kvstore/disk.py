"""diskcache behind a Disk that refuses pickle.

diskcache 5.6.3 unpickles whatever row it finds (CVE-2025-69872), drops ten values at a time and believes
file lengths. Here a key is a `str`, a value is a `Blob`, a row is BINARY or refused; eviction and the sweep
of orphans are ours.

synchronous is NORMAL, not FULL: in WAL mode a commit outlives a killed process either way. FULL would add
an fsync to every put, and to the twenty writes of every open, to save the newest rows from a power cut; KV
is rebuildable, and as the file is fsynced *before* its row commits, a lost row is a miss and an orphan,
never a row without bytes.
"""

import contextlib
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from diskcache import Cache, Disk
from diskcache.core import MODE_BINARY, UNKNOWN

from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import CorruptBlobError, UsageError
from ragblend.kvstore.files import make_private_folder, write_durably

INDEX_NAME = "cache.db"  # diskcache's own choice
VALUES_FOLDER = "values"
_FILENAME = re.compile(r"values/([0-9a-f]{2})/(\1[0-9a-f]{62})-[0-9a-f]{16}\.(?:kv|tmp)")


def digest_in(filename: object) -> str | None:
    """The key digest in a value file's name; None for any name that this store would not have given.

    Rows are not trusted: a planted `../../thesis.txt` must be neither opened nor unlinked.
    """
    match = _FILENAME.fullmatch(filename) if isinstance(filename, str) else None
    return match[2] if match else None


class BlobDisk(Disk):  # type: ignore[misc]
    """Only `str` keys and `Blob` values; reads give the path, any other row raises before it is decoded."""

    last_written: str | None = (
        None  # the file of the latest store(), for cleaning up when its row does not commit
    )

    def put(self, key: object) -> tuple[str, bool]:
        if type(key) is not str:
            raise UsageError(f"a key of the KV store is a str, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> str:
        if raw != 1 or type(key) is not str:
            raise CorruptBlobError(
                "the index holds a key that this store did not write; it was not unpickled"
            )
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> tuple[int, int, str, None]:
        """Write the blob durably; diskcache commits the row after this returns."""
        if type(value) is not Blob or type(key) is not str or read:
            raise UsageError(f"a value of the KV store is a Blob, not {type(value).__name__}")
        filename = f"{VALUES_FOLDER}/{key[:2]}/{key}-{os.urandom(8).hex()}.kv"
        self.last_written = filename
        path = Path(self._directory, filename)
        make_private_folder(path.parent)
        write_durably(path, value.pieces(), value.nbytes)
        return value.nbytes, MODE_BINARY, filename, None

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> Path:
        """The value's path, unopened; CorruptBlobError for any row that `store` did not make."""
        if mode != MODE_BINARY or value is not None or digest_in(filename) is None:
            raise CorruptBlobError(
                f"the index holds a row of mode {mode!r}, not written by this store; it was not unpickled"
            )
        return Path(self._directory, str(filename))

    def filename(self, key: object = UNKNOWN, value: object = UNKNOWN) -> NoReturn:
        raise AssertionError("names are given in store()")

    def remove(self, file_path: object) -> None:
        """Unlink one value file; what cannot be unlinked stays as an orphan, which check() and gc() see."""
        if digest_in(file_path) is not None:
            with contextlib.suppress(OSError):
                Path(self._directory, str(file_path)).unlink()


def open_cache(root: Path, timeout_s: float) -> Any:
    """diskcache on `root`, with everything of its own accord switched off."""
    return Cache(
        str(root),
        timeout=timeout_s,
        disk=BlobDisk,
        disk_min_file_size=0,
        cull_limit=0,
        eviction_policy="none",
        size_limit=2**62,
        statistics=0,
        tag_index=0,
        sqlite_journal_mode="wal",
        sqlite_synchronous=1,
        sqlite_auto_vacuum=1,
        sqlite_cache_size=2**13,
        disk_pickle_protocol=0,  # never used; given so that no setting is taken from the file
        sqlite_secure_delete=1,  # a deleted row leaves no bytes in the file
        sqlite_mmap_size=0,  # a truncated index under mmap would be a SIGBUS, not an error
    )
