"""Looking a whole store over: what check reports, what gc removes, what open mends.

All but `check_files` needs the writer's lock: only then is a file without a row surely a leftover.
"""

import errno
import logging
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ragblend.kvstore.blob import BlobDamage, open_verified
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.files import DAMAGE, discard, make_private_folder, sync_folder, warn_of_network
from ragblend.kvstore.index import FOREIGN, Index, schema_of
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import (
    INDEX_NAME,
    LOCK_NAME,
    ValueFile,
    check_format,
    files_of,
    move_to_quarantine,
    prepare,
    quarantine_of,
    remove_index,
    value_files,
)
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import layers_of
from ragblend.kvstore.sqlite import BUSY, SQL_ERRORS, error_code, index_failed

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0
_NOT_DAMAGE = {
    *BUSY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
}


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


# Of a value whose key is named: what makes it unfit for use.
OUT_OF_USE = {
    "foreign-row",
    "missing-file",
    "bad-length",
    "bad-header",
    "bad-layer",
    "wrong-key",
    "unreadable",
}


@dataclass(frozen=True)
class GcReport:
    """What gc removed: files and their bytes."""

    files: int
    bytes: int

    def __add__(self, other: "GcReport") -> "GcReport":
        return GcReport(self.files + other.files, self.bytes + other.bytes)


def check_files(root: Path, index: Index, files: list[ValueFile], digests: list[str]) -> Iterator[Problem]:
    """Everything wrong in a snapshot of files and keys; reads every byte of every value."""
    for line in index.integrity():
        yield Problem("index", None, index.path, line)
    by_name, named = {file.filename: file for file in files}, set()
    for digest in digests:
        try:
            filename = index.filename(digest) if digest != FOREIGN else None
        except CorruptBlobError as error:
            yield Problem("foreign-row", ChunkKey(digest), index.path, str(error))
            continue
        if digest == FOREIGN:
            yield Problem("foreign-row", None, index.path, "a row that this store did not write")
        elif filename is not None:
            named.add(filename)
            yield from _check_value(root, ChunkKey(digest), filename, by_name.get(filename))
    for file in files:
        yield from _check_file(root, file, file.filename in named)


def _check_value(root: Path, key: ChunkKey, filename: str, file: ValueFile | None) -> Iterator[Problem]:
    path = root / filename
    if file is None:
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
    except OSError as error:
        yield Problem("unreadable", key, path, f"reading failed: {error.strerror}")


def _check_file(root: Path, file: ValueFile, has_row: bool) -> Iterator[Problem]:
    key, path = ChunkKey(file.digest) if file.digest else None, root / file.filename
    if key is None:
        yield Problem("foreign-file", None, path, "this store gives no such name; gc leaves it")
    elif file.temporary:
        yield Problem("temporary-file", key, path, "left by an interrupted put; gc removes it")
    elif not has_row:
        yield Problem("orphan-file", key, path, "no row names this file; gc removes it")
    if file.mode & 0o077:
        yield Problem("open-to-others", key, path, f"mode {file.mode:o}, expected 600")


def name_in(index: Index, digest: str) -> str | None:
    """The value's file, below the root; None also where the index cannot tell."""
    try:
        return index.filename(digest)
    except StoreError as error:
        log.warning("%s", error)
        return None


def refuse(root: Path, index: Index, digest: str) -> None:
    """Take a key out of use: its files into the quarantine, its row away."""
    with suppress(OSError):  # then a file is an orphan, and the next open sweeps it
        move_to_quarantine(root, digest)
    with index.changing():
        index.delete(digest)


def collect(root: Path, index: Index, dropped: Collection[str]) -> GcReport:
    """Remove the values of `dropped`, what no row names, temporary files among it, and the quarantine."""
    named = {root / name for digest in dropped if (name := name_in(index, digest))}
    values = remove_files(named.union(*(files_of(root, digest) for digest in dropped)))
    with index.changing():
        for digest in dropped:
            index.delete(digest)
    orphans = collect_orphans(root, index)
    evidence = remove_files(list(quarantine_of(root).iterdir()))
    index.truncate_log()
    return values + orphans + evidence


def collect_orphans(root: Path, index: Index) -> GcReport:
    """Remove value files that no row names, temporary ones among them."""
    named = {name_in(index, digest) for digest in index.digests()}
    return remove_files(
        [root / file.filename for file in value_files(root) if file.digest and file.filename not in named]
    )


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


# --- opening: format, folders, an index that can be trusted, leftovers of whoever was killed here


def open_folder(root: Path) -> WriterLock:
    """The lock of a folder that is a store, or is to be one. StoreFormatError, StoreError."""
    check_format(root)  # before anything is made or tightened in a folder that is not ours
    make_private_folder(root)
    warn_of_network(root)
    return WriterLock(root / LOCK_NAME, TIMEOUT_S)


def default_budget_bytes(root: Path, stored_bytes: int) -> int:
    """A quarter of what values may take there: the disk's free bytes and their own."""
    return (shutil.disk_usage(root).free + stored_bytes) // 4


@contextmanager
def opening(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"opening the KV store at {root} failed: {error}. Check that the folder can be written to and that "
            "the disk has room, or choose another home (RAGBLEND_HOME)."
        ) from error


def open_index(root: Path) -> tuple[Index, str | None]:
    """The index, and why it had to be made anew from the values. StoreError."""
    prepare(root)
    untrusted = why_untrusted(root)
    if untrusted is None:
        try:
            index = Index(root, TIMEOUT_S)
            untrusted = _why_of_no_use(root, index)
            if untrusted is None:
                return index, None
            index.close()
        except CorruptBlobError as error:
            untrusted = str(error)
    return made_anew(root, untrusted), untrusted


def _why_of_no_use(root: Path, index: Index) -> str | None:
    digests = index.digests()
    if FOREIGN in digests:
        return "it holds rows that this store did not write"
    if not digests and any(file.digest and not file.temporary for file in value_files(root)):
        return EMPTY
    return None


def made_anew(root: Path, why: str) -> Index:
    """Make an index of the values that are there: of all, or, when killed, of none, and the next open begins again.

    Only headers are read: layers are checked at every use anyway. A deleted value cannot come back this way, because
    delete unlinks the file before the row.
    """
    log.warning("the KV index at %s is made anew from the values that are there: %s", root, why)
    remove_index(root)
    prepare(root)
    index = Index(root, TIMEOUT_S)
    try:
        with index.changing():
            for file in value_files(root):
                if _is_sound(root, file):
                    index.set(file)
    except BaseException:
        index.close()
        raise
    return index


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


def sweep(root: Path, index: Index, expected: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Remove leftovers of killed puts; take out of use what has no file, or one of other than the expected bytes.

    Returns the bytes of every value, in the order they came, and how many were refused.
    """
    files: dict[str, list[ValueFile]] = {}
    for file in value_files(root):
        if file.digest is not None:
            files.setdefault(file.digest, []).append(file)
    stored, refused = {}, 0
    for digest in index.digests():
        # Others than the one that is named: of a put that was killed, or of one that a power cut took out of the index.
        named, several = name_in(index, digest), files.pop(digest, [])
        found = [file for file in several if file.filename == named]
        files[digest] = [file for file in several if file.filename != named]
        if not found or found[0].temporary or expected.get(digest, found[0].nbytes) != found[0].nbytes:
            refuse(root, index, digest)
            refused += 1
        else:
            stored[digest] = found[0].nbytes
    for leftover in (file for several in files.values() for file in several):
        discard(root / leftover.filename)
    index.recount(len(stored), sum(stored.values()))
    return stored, refused


_FORMER = frozenset({"Uses", "Gone", "Ranking", "Totals"})  # tables beside diskcache's, of earlier versions
EARLIER = "an earlier version made it, with its order of eviction inside"
EMPTY = "the values have yet to be entered"
NO_DAMAGE = {None, EARLIER, EMPTY}


def why_untrusted(root: Path) -> str | None:
    """What is wrong with the index; None when it is sound, or new and empty like the rest."""
    path = root / INDEX_NAME
    try:
        problems, found = schema_of(path, TIMEOUT_S)
    except SQL_ERRORS as error:
        if error_code(error) in _NOT_DAMAGE:
            raise index_failed(error, path) from error  # the disk's fault, or another program's
        return str(error)
    names = {name for name, _ in found}
    if problems or not names:  # without tables it is new
        return problems[0] if problems else None
    if names >= _FORMER:
        return EARLIER
    changed = found - _expected_schema()  # what is missing diskcache makes
    return f"its schema is not diskcache's: {min(changed)}" if changed else None


@cache
def _expected_schema() -> frozenset[tuple[str, str]]:
    """What diskcache makes of an empty folder: one flipped bit in a trigger's text is found out by comparison."""
    with TemporaryDirectory(prefix="ragblend-") as folder:
        Index(Path(folder), TIMEOUT_S).close()
        return schema_of(Path(folder, INDEX_NAME), TIMEOUT_S)[1]
