"""Maintenance of a whole store, for check, gc and open.

All functions except `check_files` need the writer lock: only then is a file without a row certainly a leftover.
"""

import errno
import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragblend.kvstore import layout
from ragblend.kvstore.blob import BlobDamage, open_verified
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.files import DAMAGE, discard
from ragblend.kvstore.index import Index, Row
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import ValueFile
from ragblend.kvstore.memory import layers_of
from ragblend.kvstore.system import HAS_MODES, sync_folder

log = logging.getLogger(__name__)
LOCK_TIMEOUT_S = 30.0  # of the writer lock, and of SQLite's
_REBUILT = "the KV index at %s is rebuilt from the stored values: %s"


@dataclass(frozen=True)
class Problem:
    """A problem of the store.

    kind: index, missing-file, bad-length, bad-header, bad-layer, wrong-key, unreadable, out-of-reach, orphan-file,
    temporary-file, foreign-file, open-to-others.
    """

    kind: str
    key: ChunkKey | None
    path: Path
    message: str


# Problems that leave all values usable.
HARMLESS = {"index", "out-of-reach", "orphan-file", "temporary-file", "foreign-file", "open-to-others"}


@dataclass(frozen=True)
class GcReport:
    """The result of gc: deleted files and their bytes."""

    files: int
    bytes: int

    def __add__(self, other: "GcReport") -> "GcReport":
        return GcReport(self.files + other.files, self.bytes + other.bytes)


def check_files(index: Index, files: list[ValueFile], rows: Mapping[str, Row]) -> Iterator[Problem]:
    """All problems in a snapshot of files and rows; reads every byte of every value."""
    for line in index.integrity():
        yield Problem("index", None, index.path, line)
    filenames = {file.filename for file in files}
    for digest, row in rows.items():
        yield from _check_value(index.root / row.filename, ChunkKey(digest), row.filename in filenames)
    listed = {row.filename for row in rows.values()}
    for file in files:
        yield from _check_file(index.root / file.filename, file, file.filename in listed)


def _check_value(path: Path, key: ChunkKey, exists: bool) -> Iterator[Problem]:
    if not exists:
        yield Problem("missing-file", key, path, "the index names a file that is not there")
        return
    try:
        with open_verified(path, key, None, lambda what: None) as reader:
            for _ in layers_of(reader):
                pass
    except FileNotFoundError:
        return  # evicted since the snapshot
    except BlobDamage as damage:
        yield Problem(damage.kind, key, path, str(damage))
    except OSError as error:  # too many open files, or missing rights, do not mean damage
        kind = "unreadable" if error.errno in DAMAGE else "out-of-reach"
        yield Problem(kind, key, path, f"reading failed: {error.strerror}")


def _check_file(path: Path, file: ValueFile, has_row: bool) -> Iterator[Problem]:
    key = ChunkKey(file.digest) if file.digest else None
    if key is None:
        yield Problem("foreign-file", None, path, "the store does not use such names; gc leaves it")
    elif file.is_temporary:
        yield Problem("temporary-file", key, path, "left by an interrupted put; gc removes it")
    elif not has_row:
        yield Problem("orphan-file", key, path, "the index has no row for this file; gc removes it")
    if HAS_MODES and file.mode & 0o077:
        yield Problem("open-to-others", key, path, f"mode {file.mode:o}, expected 600")


def quarantine(index: Index, digests: Collection[str]) -> None:
    """Quarantine values: move their files, and delete their rows."""
    for digest in digests:
        with suppress(OSError):  # the file is then an orphan, which the next open deletes
            layout.move_to_quarantine(index.root, digest)
    with index.changing():
        for digest in digests:
            index.delete(digest)


def remove_leftovers(index: Index) -> GcReport:
    """Delete files without a row (temporary ones included) and the quarantine."""
    root, listed = index.root, {row.filename for row in index.entries().values()}
    orphans = [
        root / file.filename
        for file in layout.value_files(root)
        if file.digest and file.filename not in listed
    ]
    return remove_files([*orphans, *layout.quarantine_folder(root).iterdir()])


def remove_files(paths: Collection[Path]) -> GcReport:
    """Unlink every path; StoreError, after trying all, if one cannot be."""
    files, nbytes, failed = 0, 0, []
    for path in paths:
        try:
            size = path.lstat().st_size
            discard(path)
            files, nbytes = files + 1, nbytes + size
        except FileNotFoundError:
            continue
        except OSError as error:
            failed.append(f"{path} ({error.strerror})")
    for folder in {path.parent for path in paths}:
        sync_folder(folder)
    if failed:
        raise StoreError(
            f"deleting {len(paths)} files: {len(failed)} could not be removed, first {failed[0]}. They hold "
            "what was to be deleted: check the folder's permissions and run `ragblend store gc`."
        )
    return GcReport(files, nbytes)


# --- opening: a sound index, no leftovers of killed processes


def open_index(root: Path) -> tuple[Index, bool]:
    """The index, and whether it was damaged and has been rebuilt from the values. Raises StoreError."""
    layout.prepare(root)
    try:
        index = Index(root, LOCK_TIMEOUT_S)
        try:
            if not index.totals[0] and _has_values(root):  # a process was killed before its first commit
                log.warning(_REBUILT, root, "it has no rows yet")
                _insert_rows(index)  # the file is not replaced, because other processes may have it open
        except BaseException:
            index.close()
            raise
    except CorruptBlobError as error:
        return rebuild_index(root, str(error)), _has_values(root)
    return index, False


def _has_values(root: Path) -> bool:
    return any(file.digest and not file.is_temporary for file in layout.value_files(root))


def rebuild_index(root: Path, why: str) -> Index:
    """Rebuild the index from the value files, in one transaction; after a kill the next open starts again.

    Reads only headers, because layers are verified at every use. A deleted value cannot return this way, because
    deleting removes the file before the row.
    """
    log.warning(_REBUILT, root, why)
    layout.remove_index(root)
    layout.prepare(root)
    index = Index(root, LOCK_TIMEOUT_S)
    try:
        _insert_rows(index)
    except BaseException:
        index.close()
        raise
    return index


def _insert_rows(index: Index) -> None:
    """Insert a row for every usable value file, in one transaction."""
    with index.changing():
        for file in layout.value_files(index.root):
            if (row := _row_of(index.root, file)) is not None and file.digest is not None:
                index.set(file.digest, row)


def _row_of(root: Path, file: ValueFile) -> Row | None:
    """The row of a value from its file's header; None for a file that must not be used."""
    if file.digest is None or file.is_temporary:
        return None
    try:
        with open_verified(root / file.filename, ChunkKey(file.digest), None, lambda what: None) as reader:
            parent = reader.header.parent
            return Row(file.filename, file.nbytes, None if parent is None else parent.digest)
    except (CorruptBlobError, FileNotFoundError):
        return None
    except OSError as error:
        if error.errno == errno.EIO:
            return Row(file.filename, file.nbytes)  # it may be readable when it is used
        if error.errno not in DAMAGE:
            raise  # without a row `sweep` would delete the file
        return None


def sweep(index: Index) -> tuple[dict[str, Row], int]:
    """Delete leftovers of killed writers, and rows without a file. Returns the rows, and how many had no file."""
    rows = index.entries()
    listed, existing = {row.filename for row in rows.values()}, set[str]()
    for filename in layout.value_names(index.root):
        if filename in listed:
            existing.add(filename)
        elif layout.digest_in(filename) is not None:
            discard(index.root / filename)
    lost = [digest for digest, row in rows.items() if row.filename not in existing]
    if lost:
        quarantine(index, lost)
    return {digest: row for digest, row in rows.items() if row.filename in existing}, len(lost)
