"""System calls of the app that not every system has: limits, signals, and sockets for this user only."""

import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from ragblend.kvstore.files import FILE_MODE

M_ARENA_MAX, ARENAS = -8, 2  # M_ARENA_MAX is of glibc's malloc.h


def disable_core_dumps() -> None:
    """Disable core dumps of this process, which would contain the text of documents."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_allocations(more_bytes: int) -> None:
    """Limit the memory that this process may allocate in addition to its present memory. Enforced only on Linux."""
    if used := getattr(psutil.Process().memory_info(), "data", 0):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + more_bytes, hard))


def fork(work: Callable[[], None]) -> int:
    """Run work() in a copy of this process, which ends with it. Returns the copy's id; `reap` it."""
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def reap(child: int) -> int:
    """Kill a copy of this process, unless it has ended. Returns its exit code, or minus the signal that ended it."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def end_process_group(leader: int) -> None:
    """Kill a process that began a group, and all in the group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def open_file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_file_limit(wanted: int) -> None:
    """Raise the limit of open files to this number, or to the most that is allowed without being root."""
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_malloc_arenas() -> None:
    """Let threads share glibc's heaps; else each of dozens keeps the most memory that its thread ever used."""
    import ctypes

    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, ARENAS)


@contextmanager
def on_signal(number: int, handle: Callable[..., None]) -> Iterator[None]:
    """Call handle() for this signal within the block."""
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def listen_in(folder: Path, name: str) -> socket.socket:
    """Listen at a socket in this folder, for this user only. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with _opened(folder) as at:
            with suppress(FileNotFoundError):  # left by a killed process
                os.unlink(name, dir_fd=at)
            listener.bind(_address(folder, at, name))
            os.chmod(name, FILE_MODE, dir_fd=at)
            listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def connect_in(folder: Path, name: str, timeout_s: float) -> socket.socket:
    """Connect to a socket in this folder. Raises TimeoutError, and OSError if others could have replaced it."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with _opened(folder) as at:
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if not (stat.S_ISSOCK(found.st_mode) and _is_private(found) and _is_private(os.fstat(at))):
                raise PermissionError
            connection.settimeout(timeout_s)
            connection.connect(_address(folder, at, name))
        if not is_same_user(connection):
            raise PermissionError
    except OSError:
        connection.close()
        raise
    return connection


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other end belongs to this user. Known only on Linux; elsewhere the folder's mode must suffice."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def limit_sending(connection: socket.socket, seconds: int) -> None:
    """Let sending fail if the other end reads nothing for this long."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, which stays valid if the path is renamed or replaced. Raises OSError."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield at
    finally:
        os.close(at)


def _address(folder: Path, at: int, name: str) -> str:
    """The address of a socket in the opened folder, through /proc if it exists, because an address has at most 107
    bytes.
    """
    through = f"/proc/self/fd/{at}"
    return f"{through}/{name}" if os.path.isdir(through) else str(folder / name)


def _is_private(found: os.stat_result) -> bool:
    """Whether it belongs to this user, and nobody else may change it."""
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
