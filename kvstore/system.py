"""System calls of the store that differ between operating systems: opening, locking, reading at an offset, hints.

Each function uses what the system has. Windows locks single bytes, has one position for all readers of a descriptor,
and neither deletes nor replaces a file that is open.
"""

import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# Whether a file's mode decides who may read it. On Windows the folder's access list decides.
HAS_MODES = hasattr(os, "geteuid")
SHARING_VIOLATION, ACCESS_DENIED = 32, 5  # Windows' errors for deleting, and for replacing, an open file
REPLACE_TIMEOUT_S = 5.0  # for a file that is open
_RETRY_S = 0.01
_IOV_MAX = max(16, os.sysconf("SC_IOV_MAX")) if hasattr(os, "sysconf") else 1
_NO_LINKS_NO_WAIT = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0)
_LOCKED_BYTE = 1 << 30  # beyond the content, because other processes cannot read a byte that Windows locks
_position_locks = tuple(threading.Lock() for _ in range(64))
_CANNOT_RESERVE = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}  # the file system does not support it


def open_existing(path: Path, writable: bool = False) -> int:
    """Open an existing file; does not follow links or wait for a FIFO's writer. Raises OSError."""
    if not hasattr(os, "O_NOFOLLOW") and path.is_symlink():
        raise OSError(errno.ELOOP, "it is a link", str(path))
    return os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | _NO_LINKS_NO_WAIT | _BINARY)


def create_private(path: Path, mode: int) -> int:
    """Create a file with exactly that mode and open it for writing. Raises FileExistsError."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | _BINARY, mode)
    try:
        if hasattr(os, "fchmod"):
            os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def sync_folder(path: Path) -> None:
    """Make renames and new names in `path` survive a power cut, where folders can be synchronised (not on Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def replace(source: Path, target: Path | str) -> None:
    """Rename to `target`, which is replaced; on Windows wait until no process has it open. Raises OSError."""
    deadline = time.monotonic() + REPLACE_TIMEOUT_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError as error:
            is_open = getattr(error, "winerror", None) in (SHARING_VIOLATION, ACCESS_DENIED)
            if not is_open or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def reserve(fd: int, nbytes: int) -> None:
    """Reserve disk space before writing, where that is supported (not on macOS). Raises OSError."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _CANNOT_RESERVE:
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
    """Fill `buffers` in order from `offset`; returns the bytes read, fewer only at the end of the file."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first, total = 0, 0
    while first < len(views):
        count = _read_some(fd, views[first : first + _IOV_MAX], offset + total)
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


def _read_some(fd: int, views: Sequence[memoryview], offset: int) -> int:
    if hasattr(os, "preadv"):
        return os.preadv(fd, views, offset)
    with _position(fd, offset), open(fd, "rb", buffering=0, closefd=False) as file:
        return file.readinto(views[0]) or 0


@contextmanager
def _position(fd: int, offset: int) -> Iterator[None]:
    """Set the descriptor's position, which its threads share; other threads wait meanwhile."""
    with _position_locks[fd % len(_position_locks)]:
        os.lseek(fd, offset, os.SEEK_SET)
        yield


def overwrite(fd: int, content: bytes) -> None:
    """Replace the file's content in place; a reader may see a mixture for a moment."""
    if hasattr(os, "pwrite"):
        os.pwrite(fd, content, 0)
    else:
        with _position(fd, 0):
            os.write(fd, content)
    os.ftruncate(fd, len(content))


def try_to_lock(fd: int) -> bool:
    """Lock a file against other processes and other descriptors; False if one of them holds it."""
    try:
        if fcntl is None:
            _lock_byte(fd, "LK_NBLCK")
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def unlock(fd: int) -> None:
    """Release the lock; closing the descriptor does so too."""
    if fcntl is None:
        _lock_byte(fd, "LK_UNLCK")
    else:
        fcntl.flock(fd, fcntl.LOCK_UN)


def _lock_byte(fd: int, how: str) -> None:
    import msvcrt

    windows: Any = msvcrt
    with _position(fd, _LOCKED_BYTE):
        windows.locking(fd, getattr(windows, how), 1)
