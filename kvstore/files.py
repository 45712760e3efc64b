"""Private files and folders, written atomically.

KV can be turned back into text, so modes are set by chmod and do not depend on the umask.
"""

import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from ragblend.kvstore import system
from ragblend.kvstore.errors import StoreError, StoreFullError
from ragblend.kvstore.system import sync_folder

FILE_MODE, FOLDER_MODE = 0o600, 0o700
# Errors of opening or reading that mean a damaged value; others, such as too many open files, do not.
DAMAGE = {errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENXIO}
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Closing:
    """Base of context managers that call their `close` at the end."""

    def close(self) -> None:
        """Release the resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def make_private_folder(path: Path) -> None:
    """Create `path` and its missing parents with mode 0700; an existing `path` is set to 0700."""
    if not path.parent.exists():
        make_private_folder(path.parent)
    created = False
    try:
        path.mkdir(FOLDER_MODE)
        created = True
    except FileExistsError:
        if not path.is_dir():
            raise StoreError(f"cannot make the folder {path}: a file is in its place; move it away") from None
    if created or path.stat().st_mode & 0o777 != FOLDER_MODE:
        path.chmod(FOLDER_MODE)
    if created:
        sync_folder(path.parent)


def make_private_file(path: Path) -> None:
    """Make sure that `path` exists with mode 0600, keeping its content; OSError for a link.

    An existing file is not opened: closing its descriptor would drop SQLite's locks in this process, and another
    process could remove the write-ahead log (sqlite.org/howtocorrupt.html, 2.2).
    """
    try:
        os.close(system.create_private(path, FILE_MODE))
    except FileExistsError:
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path)) from None
    if stat.S_IMODE(os.stat(path).st_mode) != FILE_MODE:
        os.chmod(path, FILE_MODE)


def open_file(path: Path) -> int:
    """A descriptor for reading; OSError for a link, a folder, a socket, or a FIFO (opening it would block)."""
    fd = system.open_existing(path)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.ENXIO, "no regular file", str(path))
    return fd


_open_when_deleted: set[Path] = set()


def discard(path: Path) -> None:
    """Delete whatever is at the path, a folder with its content; links are not followed.

    If Windows refuses to delete a value because it is open, here or in another process, its first bytes are erased, so
    that a rebuilt index does not include it. `finish_deleting` deletes it later, so no other file may get its name.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except PermissionError as error:
        if getattr(error, "winerror", None) != system.SHARING_VIOLATION:
            raise
        _open_when_deleted.add(path)
        with suppress(OSError), path.open("r+b") as file:
            file.write(bytes(8))


def finish_deleting() -> None:
    """Delete the files that `discard` could not delete because they were open; called when a reader has closed one."""
    for path in tuple(_open_when_deleted):
        _open_when_deleted.discard(path)
        with suppress(OSError):  # it stays as an orphan, which the next open deletes
            discard(path)


def discard_database(path: Path) -> None:
    """Delete an SQLite file with its log and its shared memory, which may still hold its content."""
    for suffix in ("", "-wal", "-shm"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def identity(status: os.stat_result) -> tuple[int, int]:
    """A file's identity (device and inode), which moving does not change."""
    return status.st_dev, status.st_ino


def is_same_file(path: Path, expected: tuple[int, int]) -> bool:
    """Whether the file that was opened at `path` is still the one at that path."""
    try:
        return identity(os.stat(path)) == expected
    except FileNotFoundError:
        return False


def sync_file(path: Path) -> None:
    """Flush a file that other code has written, so that it survives a power cut."""
    fd = os.open(path, os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, pieces: Iterable[memoryview], nbytes: int) -> None:
    """Write `pieces` to `path`: temporary file in the same folder, fsync, rename, fsync of the folder.

    OSError passes through; then no file is left behind.
    """
    temporary = path.with_suffix(".tmp")
    try:
        _write_new(temporary, pieces, nbytes)
        system.replace(temporary, path)
        sync_folder(path.parent)
    except FileExistsError:  # the temporary file is another process's
        raise
    except BaseException:
        path.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise


def replace_durably(path: Path, text: str) -> None:
    """Replace a private text file atomically. OSError passes through."""
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
    content = text.encode()
    try:
        _write_new(temporary, [memoryview(content)], len(content))
        system.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write_new(path: Path, pieces: Iterable[memoryview], nbytes: int) -> None:
    fd = system.create_private(path, FILE_MODE)
    try:
        system.reserve(fd, nbytes)  # detects a full disk before 70 MB are written
        for piece in pieces:
            while piece:
                piece = piece[os.write(fd, piece) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def write_error(error: OSError, path: Path, nbytes: int) -> StoreError:
    """The named error for an OSError from writing `path`."""
    what = f"storing {nbytes:,} bytes at {path} failed: {error.strerror or error}."
    if error.errno not in {*NO_ROOM, errno.EIO}:
        return StoreError(
            f"{what} Check that the folder exists and can be written to. What was stored before is untouched."
        )
    advice = "Free some disk space, or lower the store's budget and run `ragblend store gc`."
    if error.errno == errno.EIO:
        advice = (
            "The disk reports an input/output error: check it, or move the home (RAGBLEND_HOME) to another."
        )
    return StoreFullError(f"{what} {advice} What was stored before is untouched.")


log = logging.getLogger(__name__)
_MOUNTS = Path("/proc/self/mountinfo")
_KERNEL_TYPES = "nfs nfs4 cifs smb3 smbfs afs ncpfs ceph glusterfs lustre beegfs gpfs 9p"
_FUSE_TYPES = "sshfs glusterfs ceph davfs s3fs rclone gcsfuse smbnetfs"
_NETWORK_TYPES = {*_KERNEL_TYPES.split(), *(f"fuse.{name}" for name in _FUSE_TYPES.split())}
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space in a mount point is \040


def network_file_system(path: Path, mounts: Path = _MOUNTS) -> str | None:
    """The type of the network file system that `path` is on; None for a local one, or if unknown."""
    try:
        lines = mounts.read_text("utf-8", "surrogateescape").splitlines()
    except OSError:
        return None
    resolved = path.resolve()
    folders = {str(folder) for folder in (resolved, *resolved.parents)}
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split()
        point = _ESCAPED.sub(lambda match: chr(int(match[1], 8)), fields[4]) if len(fields) > 4 else ""
        if point in folders and len(point) >= longest:  # a later mount hides an earlier one on the same point
            longest, kind = len(point), after.split(" ")[0]
    return kind if kind in _NETWORK_TYPES else None


@cache
def warn_if_on_network(root: Path) -> None:
    """Log a warning, once per process, if `root` is on a network file system."""
    kind = network_file_system(root)
    if kind is not None:
        log.warning(
            "the KV store at %s is on a network file system (%s), where locks and SQLite's log are not reliable: "
            "use it from one machine and one process at a time, or choose a home on a local disk (RAGBLEND_HOME)",
            root,
            kind,
        )
