"""Looking a whole store over: what check reports, what gc removes, what open mends.

All but `check_files` needs the writer's lock: only then is a file without a row surely a leftover.
"""

import errno
import logging
import sqlite3
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ragblend.kvstore import layout, sqlite
from ragblend.kvstore.blob import BlobDamage, open_verified
from ragblend.kvstore.errors import CorruptBlobError, StoreError
from ragblend.kvstore.files import DAMAGE, discard, make_private_folder, sync_folder, warn_of_network
from ragblend.kvstore.index import FOREIGN, Index
from ragblend.kvstore.keys import ChunkKey
from ragblend.kvstore.layout import ValueFile
from ragblend.kvstore.lock import WriterLock
from ragblend.kvstore.memory import layers_of

log = logging.getLogger(__name__)
TIMEOUT_S = 30.0
_DISKS_FAULT = {sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}


@dataclass(frozen=True)
class Problem:
    """One thing that is not as the store would have left it.

    kind: index, foreign-row, missing-file, bad-length, bad-header, bad-layer, wrong-key, unreadable, out-of-reach,
    orphan-file, temporary-file, foreign-file, open-to-others.
    """

    kind: str
    key: ChunkKey | None
    path: Path
    message: str


# What makes no value unfit for use.
HARMLESS = {"index", "out-of-reach", "orphan-file", "temporary-file", "foreign-file", "open-to-others"}


@dataclass(frozen=True)
class GcReport:
    """What gc removed: files and their bytes."""

    files: int
    bytes: int

    def __add__(self, other: "GcReport") -> "GcReport":
        return GcReport(self.files + other.files, self.bytes + other.bytes)


def check_files(index: Index, files: list[ValueFile], digests: list[str]) -> Iterator[Problem]:
    """Everything wrong in a snapshot of files and keys; reads every byte of every value."""
    for line in index.integrity():
        yield Problem("index", None, index.path, line)
    by_name, named = {file.filename for file in files}, set()
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
            yield from _check_value(index.root / filename, ChunkKey(digest), filename in by_name)
    for file in files:
        yield from _check_file(index.root / file.filename, file, file.filename in named)


def _check_value(path: Path, key: ChunkKey, is_there: bool) -> Iterator[Problem]:
    if not is_there:
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
    except OSError as error:  # too many open files, or another user's, say nothing of the value
        kind = "unreadable" if error.errno in DAMAGE else "out-of-reach"
        yield Problem(kind, key, path, f"reading failed: {error.strerror}")


def _check_file(path: Path, file: ValueFile, has_row: bool) -> Iterator[Problem]:
    key = ChunkKey(file.digest) if file.digest else None
    if key is None:
        yield Problem("foreign-file", None, path, "this store gives no such name; gc leaves it")
    elif file.temporary:
        yield Problem("temporary-file", key, path, "left by an interrupted put; gc removes it")
    elif not has_row:
        yield Problem("orphan-file", key, path, "no row names this file; gc removes it")
    if file.mode & 0o077:
        yield Problem("open-to-others", key, path, f"mode {file.mode:o}, expected 600")


def name_in(index: Index, digest: str) -> str | None:
    """The value's file, below the root; None for none, or a damaged row. StoreError where the index cannot be read:

    what it names is not to be taken for what no row names.
    """
    try:
        return index.filename(digest)
    except CorruptBlobError as error:
        log.warning("%s", error)
        return None


def parent_in(index: Index, digest: str) -> str | None:
    """The node that a value stands behind, as its file says; None for none, or where the file cannot be read."""
    name = name_in(index, digest)
    if name is None:
        return None
    try:
        with open_verified(index.root / name, ChunkKey(digest), None, lambda what: None) as reader:
            return None if reader.header.parent is None else reader.header.parent.digest
    except (CorruptBlobError, OSError):
        return None


def refuse(index: Index, digest: str) -> None:
    """Take a key out of use: its files into the quarantine, its row away."""
    with suppress(OSError):  # then a file is an orphan, and the next open sweeps it
        layout.move_to_quarantine(index.root, digest)
    with index.changing():
        index.delete(digest)


def collect(index: Index, dropped: Collection[str]) -> GcReport:
    """Remove the values of `dropped`, what no row names, temporary files among it, and the quarantine."""
    root = index.root
    named = {root / name for digest in dropped if (name := name_in(index, digest))}
    values = remove_files(named.union(*(layout.files_of(root, digest) for digest in dropped)))
    with index.changing():
        for digest in dropped:
            index.delete(digest)
    kept = {name_in(index, digest) for digest in index.digests()}
    orphans = [
        root / file.filename for file in layout.value_files(root) if file.digest and file.filename not in kept
    ]
    others = remove_files([*orphans, *layout.quarantine_of(root).iterdir()])
    index.truncate_log()
    return values + others


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
    layout.check_format(root)  # before anything is made or tightened in a folder that is not ours
    make_private_folder(root)
    warn_of_network(root)
    return WriterLock(root / layout.LOCK_NAME, TIMEOUT_S)


def open_index(root: Path) -> tuple[Index, str | None]:
    """The index, and why it had to be made anew from the values. StoreError."""
    layout.prepare(root)
    untrusted = _why_untrusted(root)
    try:
        with ExitStack() as opened:
            if untrusted is None:
                index = opened.enter_context(Index(root, TIMEOUT_S))
                untrusted = _why_of_no_use(index)
            if untrusted is None:
                opened.pop_all()
                return index, None
    except CorruptBlobError as error:
        untrusted = str(error)
    return made_anew(root, untrusted), untrusted


def _why_of_no_use(index: Index) -> str | None:
    digests = index.digests()
    if FOREIGN in digests:
        return "it holds rows that this store did not write"
    if not digests and any(file.digest and not file.temporary for file in layout.value_files(index.root)):
        return EMPTY
    return None


def made_anew(root: Path, why: str) -> Index:
    """Make an index of the values that are there: of all, or, when killed, of none, and the next open begins again.

    Only headers are read: layers are checked at every use anyway. A deleted value cannot come back this way, because
    delete unlinks the file before the row.
    """
    log.warning("the KV index at %s is made anew from the values that are there: %s", root, why)
    layout.remove_index(root)
    layout.prepare(root)
    index = Index(root, TIMEOUT_S)
    try:
        with index.changing():
            for file in layout.value_files(root):
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


def sweep(index: Index, expected: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Remove leftovers of killed puts; take out of use what has no file, or one that was cut.

    expected: by digest, the bytes at which a file need not be looked into. Returns the bytes of every value, in the
    order they came, and how many were refused.
    """
    files: dict[str, list[ValueFile]] = {}
    for file in layout.value_files(index.root):
        if file.digest is not None:
            files.setdefault(file.digest, []).append(file)
    stored, refused = {}, 0
    for digest in index.digests():
        # Others than the one that is named: of a put that was killed, or of one that a power cut took out of the index.
        named, several = name_in(index, digest), files.pop(digest, [])
        found = [file for file in several if file.filename == named]
        files[digest] = [file for file in several if file.filename != named]
        if found and _may_be_used(index.root, found[0], expected):
            stored[digest] = found[0].nbytes
        else:
            refuse(index, digest)
            refused += 1
    for leftover in (file for several in files.values() for file in several):
        discard(index.root / leftover.filename)
    index.recount(len(stored), sum(stored.values()))
    return stored, refused


def _may_be_used(root: Path, file: ValueFile, expected: Mapping[str, int]) -> bool:
    """Of other than the expected bytes, its header decides: the ledger may not have heard of the newest value."""
    if file.temporary:
        return False
    if expected.get(file.digest or "", file.nbytes) == file.nbytes:
        return True
    try:
        return _is_sound(root, file)
    except OSError:  # too many open files, or another user's: its use will judge it
        return True


EMPTY = "the values have yet to be entered"
NO_DAMAGE = {None, EMPTY}


def _why_untrusted(root: Path) -> str | None:
    """What is wrong with the index; None when it is sound, or new and empty like the rest."""
    path = root / layout.INDEX_NAME
    try:
        with closing(sqlite.connect(path, TIMEOUT_S)) as sql:
            sql.text_factory = sqlite.lenient_text
            if problems := sqlite.integrity(sql, 1):
                return problems[0]
            found = sqlite.schema_of(sql)
    except sqlite.SQL_ERRORS as error:
        if sqlite.error_code(error) in _DISKS_FAULT | sqlite.BUSY:
            raise sqlite.index_failed(error, path) from error  # or another program's
        return str(error)
    others = found.items() - _expected_schema().items()  # what is missing diskcache makes
    return f"its schema is not diskcache's: {min(others)}" if others else None


@cache
def _expected_schema() -> dict[str, str]:
    """What diskcache makes of an empty folder: one flipped bit in a trigger's text is found out by comparison."""
    with TemporaryDirectory(prefix="ragblend-") as folder:
        Index(Path(folder), TIMEOUT_S).close()
        with closing(sqlite.connect(Path(folder, layout.INDEX_NAME))) as sql:
            return sqlite.schema_of(sql)
