"""Looking a whole store over: what open sweeps, what check reports, what gc removes.

`sweep`, `collect` and `adopt` need the writer's lock: only then is a file without a row surely a leftover.
"""

import errno
import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragblend.kvstore.blob import BlobDamage
from ragblend.kvstore.chunks import ChunkKey
from ragblend.kvstore.disk import digest_in
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.files import DAMAGE, sync_folder
from ragblend.kvstore.held import layers_of
from ragblend.kvstore.index import Index, Row
from ragblend.kvstore.layout import (
    QUARANTINE_FOLDER,
    ValueFile,
    keep_evidence,
    move_to_quarantine,
    value_files,
    value_sizes,
)
from ragblend.kvstore.reader import open_verified


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the store would have left it.

    kind: index, foreign-row, missing-file, bad-length, bad-header, bad-layer, wrong-key, unreadable,
    orphan-file, temporary-file, foreign-file, open-to-others.
    """

    kind: str
    key: ChunkKey | None
    path: Path
    message: str


@dataclass(frozen=True)
class GcReport:
    """What gc removed: files and their bytes."""

    files: int
    bytes: int


def check_files(root: Path, index: Index, files: list[ValueFile], rows: list[Row]) -> Iterator[Problem]:
    """Everything wrong in a snapshot of files and rows; reads every byte of every value."""
    for line in index.integrity():
        yield Problem("index", None, index.path, line)
    by_name = {file.filename: file for file in files}
    for row in rows:
        yield from check_row(root, row, by_name.get(str(row.filename)))
    named = {row.filename for row in rows if row.digest}
    for file in files:
        yield from _check_file(root, file, file.filename in named)


def check_row(root: Path, row: Row, file: ValueFile | None) -> Iterator[Problem]:
    """What is wrong with one row and its value: nothing, or the first thing found."""
    if row.digest is None:
        yield Problem(
            "foreign-row", None, root, f"row {row.rowid} (mode {row.mode!r}) was not written by this store"
        )
        return
    key, path = ChunkKey(row.digest), root / str(row.filename)
    if file is None:
        yield Problem("missing-file", key, path, "the index names a file that is not there")
    elif file.nbytes != row.size:
        yield Problem("bad-length", key, path, f"the file has {file.nbytes} bytes, the index says {row.size}")
    else:
        try:
            _read_through(path, key)
        except FileNotFoundError:
            return  # evicted since the snapshot
        except BlobDamage as damage:
            yield Problem(damage.kind, key, path, str(damage))
        except OSError as error:
            yield Problem("unreadable", key, path, f"reading failed: {error.strerror}")


def _check_file(root: Path, file: ValueFile, has_row: bool) -> Iterator[Problem]:
    key = ChunkKey(file.digest) if file.digest else None
    if key is None:
        yield Problem(
            "foreign-file", None, root / file.filename, "this store gives no such name; gc leaves it"
        )
    elif file.temporary:
        yield Problem(
            "temporary-file", key, root / file.filename, "left by an interrupted put; gc removes it"
        )
    elif not has_row:
        yield Problem("orphan-file", key, root / file.filename, "no row names this file; gc removes it")
    if file.mode & 0o077:
        yield Problem("open-to-others", key, root / file.filename, f"mode {file.mode:o}, expected 600")


def _read_through(path: Path, key: ChunkKey) -> None:
    with open_verified(path, key, None, lambda what: None) as reader:
        for _ in layers_of(reader):
            pass


def sweep(root: Path, index: Index) -> int:
    """Remove leftovers of killed puts, put aside rows that cannot be true; how many of those there were."""
    files = value_sizes(root)
    amiss, named = index.compared(files)
    refused = sum(refuse_row(root, index, row) for row in amiss)
    for leftover, _ in files - named:
        if digest_in(os.fsdecode(leftover)) is not None:
            (root / os.fsdecode(leftover)).unlink(missing_ok=True)
    return refused


def refuse_row(root: Path, index: Index, row: Row) -> bool:
    """Remove a row and quarantine what it held, undecoded; False when somebody else did."""
    inline = index.value_of(row.rowid) if row.has_value else b""
    if not index.remove(row.rowid):
        return False
    with suppress(OSError):  # then the file is an orphan, and the next open sweeps it
        if digest_in(row.filename) == row.key:  # a planted row must not take another key's file with it
            move_to_quarantine(root, str(row.filename))
        if inline:
            keep_evidence(root, inline)
    return True


def adopt(root: Path, index: Index) -> int:
    """Enter value files into a new index, after the old one was set aside; how many: all, or none when killed.

    Only headers are read: layers are checked at every use anyway. A deleted value cannot come back this way,
    because delete unlinks the file before the row.
    """
    return index.insert(file for file in value_files(root) if _is_sound(root, file))


def _is_sound(root: Path, file: ValueFile) -> bool:
    if file.digest is None or file.temporary:
        return False
    try:
        open_verified(root / file.filename, ChunkKey(file.digest), None, lambda what: None).close()
    except (CorruptBlobError, FileNotFoundError):
        return False
    except OSError as error:  # what is not entered is swept away
        if error.errno == errno.EIO:
            return True  # it may be readable the next time: its use will judge it, as it does any other value
        if error.errno not in DAMAGE:
            raise
        return False
    return True


def repair(root: Path, index: Index, problems: Collection[Problem]) -> int:
    """Take every value with a problem out of use and remove what no row names; how many rows were refused.

    A damaged SQLite file is not mended here: the next open sets it aside.
    """
    bad = {problem.path for problem in problems}
    doubtful = [row for row in index.rows() if row.digest is None or root / str(row.filename) in bad]
    refused = sum(refuse_row(root, index, row) for row in doubtful)
    collect_orphans(root, index)
    return refused


def collect(root: Path, index: Index, wanted: Collection[str] | None) -> GcReport:
    """Remove orphans, the quarantine and, unless `wanted` is None, every other digest's value."""
    dropped = [row for row in index.rows() if row.digest and wanted is not None and row.digest not in wanted]
    values = remove_files([root / str(row.filename) for row in dropped])
    for row in dropped:
        index.remove(row.rowid)
    orphans = collect_orphans(root, index)
    evidence = remove_files(list((root / QUARANTINE_FOLDER).iterdir()))
    index.truncate_log()
    reports = (values, orphans, evidence)
    return GcReport(sum(report.files for report in reports), sum(report.bytes for report in reports))


def collect_orphans(root: Path, index: Index) -> GcReport:
    """Remove value files that no row names, temporary ones among them."""
    named = {row.filename for row in index.rows() if row.digest}
    return remove_files(
        [root / file.filename for file in value_files(root) if file.digest and file.filename not in named]
    )


def remove_files(paths: Collection[Path]) -> GcReport:
    """Unlink every path; StoreError, after trying all, if one cannot be."""
    files, nbytes, failed = 0, 0, []
    for path in paths:
        try:
            size = path.lstat().st_size
            os.unlink(path)
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
