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
HANDSHAKE_S, POLL_S = 10.0, 0.2


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
    """Run work() in a forked child, which then exits. Returns the child's process id, for `reap`."""
    if child := os.fork():
        return child
    try:
        work()
    finally:
        os._exit(0)


def reap(child: int) -> int:
    """Kill a forked child, unless it has ended. Returns its exit code, or minus the signal that ended it."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def end_process_group(leader: int) -> None:
    """Kill the leader of a process group, and all processes of the group."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)
        return
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(leader)
        for each in (*process.children(recursive=True), process):
            each.kill()


def start_python(code: str, environment: dict[str, str]) -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start an interpreter in its own process group, and connect to it; there `parent_connection` is the other end."""
    command = [sys.executable, "-P", "-c", code]  # -P: do not import from the user's current folder
    options: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    if not CAN_FORK:  # such systems cannot pass a descriptor on either
        return _start_with_port(command, options)
    ours, theirs = Pipe()
    with theirs:
        descriptor = theirs.fileno()
        options |= {"stdin": subprocess.DEVNULL, "pass_fds": [descriptor], "process_group": 0}
        return subprocess.Popen([*command, str(descriptor)], **options), ours


def _start_with_port(
    command: list[str], options: dict[str, Any]
) -> tuple["subprocess.Popen[bytes]", Connection]:
    token, no_window = secrets.token_bytes(TOKEN_BYTES), getattr(subprocess, "CREATE_NO_WINDOW", 0)
    with socket.create_server((LOCALHOST, 0)) as listener:
        listener.settimeout(POLL_S)
        command = [*command, str(listener.getsockname()[1])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, creationflags=no_window, **options)
        assert process.stdin is not None
        with suppress(OSError), process.stdin:
            process.stdin.write(token)
        while process.poll() is None:
            with suppress(OSError):
                connection, _ = listener.accept()
                if _has_token(connection, token, is_server=True):
                    return process, Connection(connection.detach())
                connection.close()
    ours, theirs = Pipe()  # the process has crashed: using a closed connection will show it
    theirs.close()
    return process, ours


def parent_connection() -> Connection:
    """In the interpreter that `start_python` started: the connection to its parent. Raises OSError."""
    port_or_descriptor = int(sys.argv[1])
    if CAN_FORK:
        return Connection(port_or_descriptor)
    connection = socket.create_connection((LOCALHOST, port_or_descriptor), HANDSHAKE_S)
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
    """Let threads share glibc's heaps; else there are dozens, and each keeps the most memory that it ever used."""
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

    Without Unix sockets, listen at a local port instead; the file then holds its number and a token.
    """
    if not hasattr(socket, "AF_UNIX"):
        listener = socket.create_server((LOCALHOST, 0))
        with _closed_on_error(listener):
            replace_durably(folder / name, f"{listener.getsockname()[1]} {secrets.token_hex(TOKEN_BYTES)}")
        return listener
    listener = socket.socket(socket.AF_UNIX)
    with _closed_on_error(listener), _open_folder(folder) as descriptor:
        with suppress(FileNotFoundError):  # left by a killed process
            os.unlink(name, dir_fd=descriptor)
        listener.bind(_address(folder, descriptor, name))
        os.chmod(name, FILE_MODE, dir_fd=descriptor)
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
        with _open_folder(folder) as descriptor:
            found = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            is_private = _is_private(found) and _is_private(os.fstat(descriptor))
            if not (stat.S_ISSOCK(found.st_mode) and is_private):
                raise PermissionError
            connection.settimeout(timeout_s)
            connection.connect(_address(folder, descriptor, name))
        if not is_same_user(connection, folder / name):
            raise PermissionError
    return connection


def is_same_user(connection: socket.socket, path: Path) -> bool:
    """Whether the other end of a connection to this socket belongs to this user, as far as that can be known.

    Linux's kernel tells it; without Unix sockets the token proves it; elsewhere the folder's mode must suffice. Raises
    OSError.
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
    """The port and the token that `listen_in` wrote. Raises OSError."""
    try:
        port, token = path.read_text(encoding="ascii").split()
        return int(port), bytes.fromhex(token)
    except ValueError as error:
        raise OSError(f"{path} has no port and token") from error


def _has_token(connection: socket.socket, token: bytes, is_server: bool) -> bool:
    """Whether the other end knows the token, which neither end sends: each hashes it with the other's random bytes.

    After a process was killed, another program may have its port. Raises OSError.
    """
    connection.settimeout(HANDSHAKE_S)
    roles, random = (b"client", b"server"), secrets.token_bytes(TOKEN_BYTES)
    connection.sendall(random)
    answer = roles[is_server] + _receive_token_bytes(connection)
    connection.sendall(hmac.digest(token, answer, "sha256"))
    expected = hmac.digest(token, roles[not is_server] + random, "sha256")
    is_known = hmac.compare_digest(_receive_token_bytes(connection), expected)
    connection.settimeout(None)
    return is_known


def _receive_token_bytes(connection: socket.socket) -> bytes:
    """The next TOKEN_BYTES bytes; fewer if the connection ends."""
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
def _open_folder(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, which stays valid if the path is renamed or replaced. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _address(folder: Path, descriptor: int, name: str) -> str:
    """The address of a socket in the opened folder, through /proc if it exists, because an address has at most 107
    bytes.
    """
    short = f"/proc/self/fd/{descriptor}"
    return f"{short}/{name}" if os.path.isdir(short) else str(folder / name)


def _is_private(found: os.stat_result) -> bool:
    """Whether a file or folder belongs to this user, and nobody else has any right on it."""
    return found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
