"""System calls of the app that not every system has: limits, signals, and sockets for this user only."""

import hmac
import os
import secrets
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from ragblend.kvstore.files import FILE_MODE, replace_durably

try:
    import resource
except ImportError:
    resource = None  # type: ignore[assignment]

CAN_FORK, CAN_LIMIT = hasattr(os, "fork"), resource is not None
M_ARENA_MAX, ARENAS = -8, 2  # M_ARENA_MAX is of glibc's malloc.h
LOCALHOST = "127.0.0.1"
TOKEN_BYTES = 32
HANDSHAKE_S, LOOK_S = 10.0, 0.2


def disable_core_dumps() -> None:
    """Disable core dumps of this process, which would contain the text of documents."""
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_allocations(more_bytes: int) -> None:
    """Limit the memory that this process may allocate in addition to its present memory. Enforced only on Linux."""
    used = getattr(psutil.Process().memory_info(), "data", 0)
    if used and resource is not None:
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
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        for each in (*process.children(recursive=True), process):
            each.kill()


def start_python(code: str, environment: dict[str, str]) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start an interpreter in a group of its own, and connect to it: there `parent_connection` is the other end."""
    command = [sys.executable, "-P", "-c", code]  # -P: do not import from the user's current folder
    how: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    if not CAN_FORK:  # nor can a descriptor be passed on
        return _start_with_port(command, how)
    ours, theirs = Pipe()
    with theirs:
        at = theirs.fileno()
        how |= {"stdin": subprocess.DEVNULL, "pass_fds": [at], "process_group": 0}
        return subprocess.Popen([*command, str(at)], **how), ours


def _start_with_port(command: list[str], how: dict[str, Any]) -> tuple["subprocess.Popen[bytes]", Connection]:
    token, no_window = secrets.token_bytes(TOKEN_BYTES), getattr(subprocess, "CREATE_NO_WINDOW", 0)
    with socket.create_server((LOCALHOST, 0)) as listener:
        listener.settimeout(LOOK_S)
        command = [*command, str(listener.getsockname()[1])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, creationflags=no_window, **how)
        assert process.stdin is not None
        with suppress(OSError), process.stdin:
            process.stdin.write(token)
        while process.poll() is None:
            with suppress(OSError):
                connection, _ = listener.accept()
                if _has_token(connection, token, is_server=True):
                    return process, Connection(connection.detach())
                connection.close()
    ours, theirs = Pipe()  # it has crashed, which the first use shows
    theirs.close()
    return process, ours


def parent_connection() -> Connection:
    """In the interpreter that `start_python` started: the connection to its parent. Raises OSError."""
    at = int(sys.argv[1])
    if CAN_FORK:
        return Connection(at)
    connection = socket.create_connection((LOCALHOST, at), HANDSHAKE_S)
    if not _has_token(connection, sys.stdin.buffer.read(), is_server=False):
        raise PermissionError
    return Connection(connection.detach())


def open_file_limit() -> int:
    """How many files this process may have open."""
    if resource is None:
        return sys.maxsize
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


def raise_open_file_limit(wanted: int) -> None:
    """Raise the limit of open files to this number, or to the most that is allowed without being root."""
    if resource is None:
        return
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit_malloc_arenas() -> None:
    """Let threads share glibc's heaps; else each of dozens keeps the most memory that its thread ever used."""
    import ctypes

    with suppress(AttributeError, TypeError):  # another C library
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
    """Listen at a socket in this folder, for this user only. Raises OSError.

    Without Unix sockets at a port of this machine; the file has its number and a token.
    """
    if not hasattr(socket, "AF_UNIX"):
        listener = socket.create_server((LOCALHOST, 0))
        with _closed_on_error(listener):
            replace_durably(folder / name, f"{listener.getsockname()[1]} {secrets.token_hex(TOKEN_BYTES)}")
        return listener
    listener = socket.socket(socket.AF_UNIX)
    with _closed_on_error(listener), _opened(folder) as at:
        with suppress(FileNotFoundError):  # left by a killed process
            os.unlink(name, dir_fd=at)
        listener.bind(_address(folder, at, name))
        os.chmod(name, FILE_MODE, dir_fd=at)
        listener.listen(64)
    return listener


def connect_in(folder: Path, name: str, timeout_s: float) -> socket.socket:
    """Connect to a socket in this folder. Raises TimeoutError, and OSError if others could have replaced it."""
    if not hasattr(socket, "AF_UNIX"):
        port, token = _port_and_token(folder / name)
        connection = socket.create_connection((LOCALHOST, port), timeout_s)
        with _closed_on_error(connection):
            if not _has_token(connection, token, is_server=False):
                raise PermissionError
            connection.settimeout(timeout_s)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    with _closed_on_error(connection):
        with _opened(folder) as at:
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if not (stat.S_ISSOCK(found.st_mode) and _is_private(found) and _is_private(os.fstat(at))):
                raise PermissionError
            connection.settimeout(timeout_s)
            connection.connect(_address(folder, at, name))
        if not is_same_user(connection, folder / name):
            raise PermissionError
    return connection


def is_same_user(connection: socket.socket, path: Path) -> bool:
    """Whether the other end of a connection to this socket belongs to this user, as far as the system tells.

    On Linux its kernel does, without Unix sockets the token; elsewhere the folder's mode must suffice. Raises OSError.
    """
    if not hasattr(socket, "AF_UNIX"):
        return _has_token(connection, _port_and_token(path)[1], is_server=True)
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def limit_sending(connection: socket.socket, seconds: int) -> None:
    """Let sending fail if the other end reads nothing for this long."""
    is_winsock = hasattr(connection, "share")
    value = struct.pack("L", 1000 * seconds) if is_winsock else struct.pack("ll", seconds, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def _port_and_token(path: Path) -> tuple[int, bytes]:
    """What `listen_in` wrote. Raises OSError."""
    try:
        port, token = path.read_text(encoding="ascii").split()
        return int(port), bytes.fromhex(token)
    except ValueError as error:
        raise OSError(f"{path} has no port and token") from error


def _has_token(connection: socket.socket, token: bytes, is_server: bool) -> bool:
    """Whether the other end knows the token, which neither end sends: each hashes it with the other's random bytes.

    Another program may have the port, of a killed process say. Raises OSError.
    """
    connection.settimeout(HANDSHAKE_S)
    roles, random = (b"client", b"server"), secrets.token_bytes(TOKEN_BYTES)
    connection.sendall(random)
    answer = roles[is_server] + _received(connection)
    connection.sendall(hmac.digest(token, answer, "sha256"))
    expected = hmac.digest(token, roles[not is_server] + random, "sha256")
    is_known = hmac.compare_digest(_received(connection), expected)
    connection.settimeout(None)
    return is_known


def _received(connection: socket.socket) -> bytes:
    found = b""
    while len(found) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(found))):
        found += more
    return found


@contextmanager
def _closed_on_error(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


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
