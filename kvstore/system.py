"""System calls of the store that systems have by different names: opening, locking, reading at an offset, hints."""

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_IOV_MAX = max(16, os.sysconf("SC_IOV_MAX"))
_CANNOT_ALLOCATE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}  # not supported there: just write


def open_existing(path: Path, writable: bool = False) -> int:
    """Open an existing file; does not follow links or wait for a FIFO's writer. Raises OSError."""
    return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK)


def create_private(path: Path, mode: int) -> int:
    """Create a file with exactly that mode and open it for writing. Raises FileExistsError."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    try:
        os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space before writing, where that is supported (not on macOS). Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_ALLOCATE:
                raise


def read_ahead(fd: int) -> None:
    """Ask the kernel to read the file ahead of its use (not on macOS)."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)


def is_cached(fd: int, offset: int) -> bool:
    """Whether that byte of a file is in the page cache; False where the system cannot tell (macOS)."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        return os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def drop_pages(fd: int) -> None:
    """Drop the file's pages from the page cache (not on macOS)."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_into(fd: int, buffers: Sequence[Any], offset: int) -> int:
    """Fill `buffers` in order from `offset`; bytes read, fewer only at the end of the file."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first, total = 0, 0
    while first < len(views):
        count = os.preadv(fd, views[first : first + _IOV_MAX], offset + total)
        if count == 0:
            break
        total += count
        while first < len(views) and count >= len(views[first]):  # a short read may end anywhere
            count -= len(views[first])
            first += 1
        if count:
            views[first] = views[first][count:]
    return total


def read_at(fd: int, nbytes: int, offset: int) -> bytes:
    """Read bytes from `offset`, fewer only at the end of the file."""
    buffer = bytearray(nbytes)
    return bytes(buffer[: read_into(fd, [buffer], offset)])


def read_beginning(fd: int, nbytes: int) -> bytes:
    """Read at most this many bytes from the beginning of a small file."""
    return os.pread(fd, nbytes, 0)


def overwrite(fd: int, content: bytes) -> None:
    """Replace the file's content in place; a reader may see a mixture for a moment."""
    os.pwrite(fd, content, 0)
    os.ftruncate(fd, len(content))


def try_to_lock(fd: int) -> bool:
    """Lock a file against other processes and other descriptors; False if one of them holds it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock; closing the descriptor does so too."""
    fcntl.flock(fd, fcntl.LOCK_UN)
