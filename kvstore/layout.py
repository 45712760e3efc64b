"""What lies where in a store's folder, and the few moves between those places.

FORMAT        one line: which format everything here has
cache.db      diskcache's index (and -wal, -shm while it is open)
write.lock    held by whoever changes something
values/ab/    <key digest>-<16 hex>.kv, one file a value; .tmp while it is written
quarantine/   what was found damaged, the newest few; gc empties it
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ragblend.kvstore.disk import INDEX_NAME, VALUES_FOLDER, digest_in
from ragblend.kvstore.errors import StoreFormatError
from ragblend.kvstore.files import make_private_file, make_private_folder, sync_folder, write_durably
from ragblend.kvstore.keys import FORMAT_VERSION

LOCK_NAME = "write.lock"
QUARANTINE_FOLDER = "quarantine"
_QUARANTINE_FILES = 4  # a failing disk must not fill itself with evidence
_FORMAT_NAME = "FORMAT"
_FORMAT_LINE = f"ragblend kv {FORMAT_VERSION}\n".encode()
_BEFORE_FORMAT = {LOCK_NAME, "FORMAT.tmp"}  # may be there before FORMAT is, when an open was interrupted


@dataclass(frozen=True)
class ValueFile:
    """A file below values/; digest is None when it has no name of ours."""

    filename: str
    digest: str | None
    nbytes: int
    mode: int

    @property
    def temporary(self) -> bool:
        return self.filename.endswith(".tmp")


def check_format(root: Path) -> bool:
    """True when the store is there, False when the folder is empty or absent; else StoreFormatError."""
    line = _format_line(root)
    if line is None:
        others = {path.name for path in root.iterdir()} - _BEFORE_FORMAT if root.is_dir() else set()
        if not others:
            return False
        # Read again: another process may have begun the store in between, and FORMAT is what it makes first.
        line = _format_line(root) or f"no FORMAT file, but {sorted(others)[0]!r}".encode()
    if line != _FORMAT_LINE:
        raise StoreFormatError(
            f"opening the KV store at {root}: expected {_FORMAT_LINE.decode().strip()!r}, "
            f"found {line.decode('utf-8', 'replace').strip()!r}. Another version made it, or it is no store. "
            "If it is RAGBlend's, remove that folder and run `ragblend store repair`, which builds KV anew."
        )
    return True


def _format_line(root: Path) -> bytes | None:
    try:
        return (root / _FORMAT_NAME).read_bytes()[:200]
    except FileNotFoundError:
        return None


def prepare(root: Path) -> None:
    """Make or tighten all that must exist before SQLite opens; it gives its logs the mode of cache.db."""
    if not check_format(root):  # first of all: a folder with anything else in it and no FORMAT is not ours
        (root / "FORMAT.tmp").unlink(missing_ok=True)
        write_durably(root / _FORMAT_NAME, [memoryview(_FORMAT_LINE)], len(_FORMAT_LINE))
    for folder in (root / VALUES_FOLDER, root / QUARANTINE_FOLDER):
        make_private_folder(folder)
    make_private_file(root / INDEX_NAME)
    for suffix in ("-wal", "-shm"):
        if (root / (INDEX_NAME + suffix)).exists():
            make_private_file(root / (INDEX_NAME + suffix))


def value_files(root: Path) -> Iterator[ValueFile]:
    """Every file below values/, by name."""
    for folder in sorted(os.scandir(root / VALUES_FOLDER), key=lambda entry: entry.name):
        inside = list(os.scandir(folder)) if folder.is_dir(follow_symlinks=False) else [folder]
        for entry in sorted(inside, key=lambda entry: entry.name):
            filename = f"{VALUES_FOLDER}/{'' if entry is folder else folder.name + '/'}{entry.name}"
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield ValueFile(filename, digest_in(filename), status.st_size, status.st_mode & 0o777)


def value_sizes(root: Path) -> set[tuple[bytes, int]]:
    """Name and size of everything in the folders below values/; whose name it is is not looked at."""
    sizes = set()
    for folder in os.scandir(os.fsencode(root / VALUES_FOLDER)):
        within = VALUES_FOLDER.encode() + b"/" + folder.name + b"/"
        for entry in os.scandir(folder.path) if folder.is_dir(follow_symlinks=False) else ():
            try:
                sizes.add((within + entry.name, entry.stat(follow_symlinks=False).st_size))
            except FileNotFoundError:
                continue
    return sizes


def files_of(root: Path, digest: str) -> list[Path]:
    """Every file that holds something of one key, the quarantine included."""
    values = (root / VALUES_FOLDER / digest[:2]).glob(f"{digest}-*")
    return sorted([*values, *(root / QUARANTINE_FOLDER).glob(f"{digest}-*")])


def move_to_quarantine(root: Path, filename: str) -> None:
    """Take a value file out of use; one that cannot be moved is unlinked, one that is gone is fine."""
    path, folder = root / filename, root / QUARANTINE_FOLDER
    try:
        path.rename(folder / path.name)
    except FileNotFoundError:
        return
    except OSError:
        path.unlink(missing_ok=True)
    trim_quarantine(root)


def keep_evidence(root: Path, inline: bytes) -> None:
    """Put what a refused row held inline into the quarantine."""
    name = f"row-{os.urandom(8).hex()}.bin"
    write_durably(root / QUARANTINE_FOLDER / name, [memoryview(inline)], len(inline))
    trim_quarantine(root)


def set_index_aside(root: Path) -> None:
    """Move a damaged index, its log and its shared memory out of the way."""
    token = os.urandom(8).hex()
    for suffix in ("", "-wal", "-shm"):
        try:
            (root / (INDEX_NAME + suffix)).rename(root / QUARANTINE_FOLDER / f"index-{token}.db{suffix}")
        except FileNotFoundError:
            continue
    sync_folder(root)
    trim_quarantine(root)


def trim_quarantine(root: Path) -> None:
    """Keep only the newest few damaged files."""
    found = [(path.lstat().st_mtime_ns, path) for path in (root / QUARANTINE_FOLDER).iterdir()]
    for _, path in sorted(found)[:-_QUARANTINE_FILES]:
        path.unlink(missing_ok=True)
