"""Files and folders that only their owner can read, written whole or not at all.

KV can be inverted to text: modes are set by chmod, because a umask must not decide about secrets.
"""

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ragblend.kvstore.errors import StoreError, StoreFullError

FILE_MODE, FOLDER_MODE = 0o600, 0o700
# What opening or reading a damaged value may say; too many open files, say, are not the value's fault.
DAMAGE = {errno.EIO, errno.ELOOP, errno.EISDIR, errno.ENOTDIR}
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_CANNOT_ALLOCATE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}  # a file system without it: write, and see


def make_private_folder(path: Path) -> None:
    """Make `path` and its missing parents 0700; an existing `path` is tightened to 0700."""
    if _is_private_folder(path):
        return
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


def _is_private_folder(path: Path) -> bool:
    try:
        return os.stat(path).st_mode == stat.S_IFDIR | FOLDER_MODE
    except OSError:
        return False


def make_private_file(path: Path) -> None:
    """Make sure that `path` exists with mode 0600, keeping what is in it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        os.fchmod(fd, FILE_MODE)
    finally:
        os.close(fd)


def identity(status: os.stat_result) -> tuple[int, int]:
    """What stays the same for one file wherever it is moved."""
    return status.st_dev, status.st_ino


def is_same_file(path: Path, expected: tuple[int, int]) -> bool:
    """Whether the file that was opened at `path` is still there."""
    try:
        return identity(os.stat(path)) == expected
    except FileNotFoundError:
        return False


def sync_folder(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: Path, pieces: Iterable[memoryview], nbytes: int) -> None:
    """Write `pieces` to `path`: temporary file beside it, fsync, rename, fsync of the folder.

    OSError passes through, with no trace of the file left.
    """
    temporary = path.with_suffix(".tmp")
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    try:
        try:
            os.fchmod(fd, FILE_MODE)
            _write_all(fd, pieces, nbytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)
        raise


def _write_all(fd: int, pieces: Iterable[memoryview], nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)  # a full disk says so before 70 MB are written, not after
    except OSError as error:
        if error.errno not in _CANNOT_ALLOCATE:
            raise
    written = 0
    for piece in pieces:
        while piece:
            count = os.write(fd, piece)
            written, piece = written + count, piece[count:]
    assert written == nbytes, (written, nbytes)


def write_failed(error: OSError, path: Path, nbytes: int) -> StoreError:
    """The named error for an OSError met while writing `path`."""
    doing = f"storing {nbytes:,} bytes at {path} failed: {error.strerror or error}."
    if error.errno in _NO_ROOM:
        advice = "Free some disk space, or lower the store's budget and run `ragblend store gc`."
    elif error.errno == errno.EIO:
        advice = (
            "The disk reports an input/output error: check it, or move the home (RAGBLEND_HOME) to another."
        )
    else:
        return StoreError(
            f"{doing} Check that the folder exists and can be written to. The rest is untouched."
        )
    return StoreFullError(f"{doing} {advice} What was stored before is untouched.")
