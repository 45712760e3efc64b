"""The layout of a store's folder, and operations on its files.

FORMAT        one line: the format version of the folder
index/        diskcache's: cache.db (and -wal, -shm while it is open), the index and the ledger
write.lock    the writer lock
values/ab/    <key digest>-<16 hex>.kv, one file per value; .tmp while it is written
quarantine/   damaged files, the newest few; gc empties it
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ragblend.kvstore import files
from ragblend.kvstore.blob import Blob
from ragblend.kvstore.errors import StoreFormatError
from ragblend.kvstore.keys import FORMAT_VERSION
from ragblend.kvstore.system import sync_folder

log = logging.getLogger(__name__)
INDEX_NAME = "index/cache.db"  # diskcache's own name for the file
LOCK_NAME = "write.lock"
VALUES_FOLDER = "values"
QUARANTINE_FOLDER = "quarantine"
_MAX_QUARANTINE_FILES = 4  # limited, so that damaged files of a failing disk do not fill it up
_FILENAME = re.compile(r"values/([0-9a-f]{2})/(\1[0-9a-f]{62})-[0-9a-f]{16}\.(?:kv|tmp)")
_FORMAT_NAME = "FORMAT"
_FORMAT_LINE = f"ragblend kv {FORMAT_VERSION}\n".encode()
_BEFORE_FORMAT = {LOCK_NAME, "FORMAT.tmp"}  # may exist before FORMAT, if an open was interrupted


class ValueFile(NamedTuple):
    """A file below values/; digest is None if the name is not ours."""

    filename: str
    digest: str | None
    nbytes: int
    mode: int

    @property
    def is_temporary(self) -> bool:
        return self.filename.endswith(".tmp")


def check_format(root: Path) -> bool:
    """True if the store exists, False if the folder is empty or absent; else StoreFormatError."""
    line = _format_line(root)
    if line is None:
        foreign = {path.name for path in root.iterdir()} - _BEFORE_FORMAT if root.is_dir() else set()
        if not foreign:
            return False
        # Read again: another process may have just created the store, whose first file is FORMAT.
        line = _format_line(root) or f"no FORMAT file, but {sorted(foreign)[0]!r}".encode()
    if line != _FORMAT_LINE:
        raise StoreFormatError(
            f"opening the KV store at {root}: expected {_FORMAT_LINE.decode().strip()!r}, "
            f"found {line.decode('utf-8', 'replace').strip()!r}. Another version made it, or it is no store. "
            "If it is RAGBlend's, remove that folder and run `ragblend store repair`, which rebuilds the KV."
        )
    return True


def _format_line(root: Path) -> bytes | None:
    try:
        return (root / _FORMAT_NAME).read_bytes()[:200]
    except FileNotFoundError:
        return None


def prepare(root: Path) -> None:
    """Create the files and folders that must exist before the index is opened, with private modes.

    SQLite's logs inherit the mode of cache.db.
    """
    if not check_format(root):  # first, because a non-empty folder without FORMAT is not ours
        (root / "FORMAT.tmp").unlink(missing_ok=True)
        files.write_durably(root / _FORMAT_NAME, [memoryview(_FORMAT_LINE)], len(_FORMAT_LINE))
    files.make_private_folder(root / VALUES_FOLDER)
    quarantine_folder(root)
    for path in root.glob(f"{INDEX_NAME}*"):
        with suppress(FileNotFoundError):  # the last process to close the index removes its logs
            if path.exists():
                files.make_private_file(path)


def quarantine_folder(root: Path) -> Path:
    """The quarantine folder. A link in its place is replaced, because it may point to the user's files."""
    folder = root / QUARANTINE_FOLDER
    if folder.is_symlink():
        log.warning("the quarantine of the KV store at %s was a link and was replaced by a folder", root)
        folder.unlink()
    files.make_private_folder(folder)
    return folder


def value_names(root: Path) -> Iterator[str]:
    """The names of all files below values/, without a stat of each: there may be a hundred thousand."""
    for folder in os.scandir(root / VALUES_FOLDER):
        if not folder.is_dir(follow_symlinks=False):
            yield f"{VALUES_FOLDER}/{folder.name}"
            continue
        for name in os.listdir(folder):
            yield f"{VALUES_FOLDER}/{folder.name}/{name}"


def value_files(root: Path) -> Iterator[ValueFile]:
    """Every file below values/, sorted by name."""
    for folder in sorted(os.scandir(root / VALUES_FOLDER), key=lambda entry: entry.name):
        inside = list(os.scandir(folder)) if folder.is_dir(follow_symlinks=False) else [folder]
        for entry in sorted(inside, key=lambda entry: entry.name):
            filename = f"{VALUES_FOLDER}/{'' if entry is folder else folder.name + '/'}{entry.name}"
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield ValueFile(filename, digest_in(filename), status.st_size, status.st_mode & 0o777)


def write_value(root: Path, blob: Blob) -> ValueFile:
    """Write a new file durably. Raises StoreError; then no file is left behind."""
    digest = blob.header.key.digest
    filename = value_name(digest, os.urandom(8))
    path = root / filename
    try:
        files.make_private_folder(path.parent)
        files.write_durably(path, blob.pieces(), blob.nbytes)
    except OSError as error:
        raise files.write_error(error, path, blob.nbytes) from error
    return ValueFile(filename, digest, blob.nbytes, 0o600)


def remove_values(root: Path, filenames: Iterable[str]) -> None:
    """Delete value files; one that cannot be deleted stays as an orphan, which check() reports and gc() deletes."""
    for filename in filenames:
        with suppress(OSError):
            files.discard(root / filename)


def value_name(digest: str, suffix: bytes) -> str:
    """The file of a value, below the root. suffix: 8 random bytes, so that a replaced value gets another file."""
    return f"{VALUES_FOLDER}/{digest[:2]}/{digest}-{suffix.hex()}.kv"


def files_of(root: Path, digest: str) -> list[Path]:
    """Every file of one key, the quarantine included."""
    return sorted([*_values_of(root, digest), *quarantine_folder(root).glob(f"{digest}-*")])


def _values_of(root: Path, digest: str) -> Iterator[Path]:
    return (root / VALUES_FOLDER / digest[:2]).glob(f"{digest}-*")


def move_to_quarantine(root: Path, digest: str) -> None:
    """Move a key's files to the quarantine, which keeps the newest few; a file that cannot be moved is deleted."""
    folder = quarantine_folder(root)
    for path in list(_values_of(root, digest)):
        try:
            path.rename(folder / path.name)
        except OSError:
            files.discard(path)
    found = [(path.lstat().st_mtime_ns, path) for path in folder.iterdir()]
    for _, path in sorted(found)[:-_MAX_QUARANTINE_FILES]:
        files.discard(path)


def remove_index(root: Path) -> None:
    """Remove a damaged index, its log and its shared memory, which would still hold the keys of deleted values."""
    files.discard_database(root / INDEX_NAME)
    sync_folder((root / INDEX_NAME).parent)


def digest_in(filename: str) -> str | None:
    """The key digest in a value file's name; None if the name is not ours."""
    match = _FILENAME.fullmatch(filename)
    return match[2] if match else None
