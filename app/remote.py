"""Commands that run in the process which has the home open (`ragblend serve`): finding it, and what goes over the line.

It listens at a Unix socket in the home. The folder says who may come, and the kernel who answers, so there is no port
that another program could take and no token that it could be sent. A command sends what it was given, as JSON in
lines; `serve/commands.py` runs it there, and what it says is printed here. No model, no index and no web client is
imported for that.
"""

import io
import json
import os
import signal
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ragblend import __version__
from ragblend.app.home import absolute
from ragblend.kvstore import errors
from ragblend.kvstore.errors import LibraryError, RagBlendError
from ragblend.kvstore.files import Closing
from ragblend.kvstore.places import SECRETS

NAME = "commands.sock"
MOST_BYTES = 16 << 20  # of one line
GREETING_S = 10.0
LEAVING_S = 10.0  # after Ctrl-C, until the command is given up here; there it is ended in any case
SHOWN = ("TERM", "NO_COLOR", "COLORTERM")  # what decides how progress is drawn
_AGAIN = "End it, and start it again."


class Line(Closing):
    """JSON objects over a connected socket, a line each. Safe for several senders and one receiver."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lines = connection, connection.makefile("rb")
        self._sending = threading.RLock()

    def send(self, **value: Any) -> None:
        """Raises OSError where nobody listens."""
        with self._sending:
            self._socket.sendall(json.dumps(value).encode("ascii") + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """The next one; None at the end, and for what is no object. Raises OSError."""
        text = self._lines.readline(MOST_BYTES)
        try:
            found = json.loads(text) if text.endswith(b"\n") else None
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def wait(self, seconds: float | None) -> None:
        """How long to wait for the next one from now on."""
        self._socket.settimeout(seconds)

    def cut(self) -> None:
        """Both ends come to its end; whoever waits for a line has None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._lines.close()
        self._socket.close()


@contextmanager
def folder_of(root: Path) -> Iterator[int]:
    """A descriptor of the home, which stays the same folder whatever becomes of its name. Raises OSError."""
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def address(root: Path, folder: int) -> str:
    """Of the socket. Addresses have 107 bytes at most, which the path of a home may be longer than."""
    through = f"/proc/self/fd/{folder}"
    return f"{through}/{NAME}" if os.path.isdir(through) else str(root / NAME)


def is_same_user(connection: socket.socket) -> bool:
    """Whether who is at the other end is this user, as the kernel says; where it does not, the folder's mode must."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.geteuid())


def connected(root: Path) -> Line | None:
    """A line to the process that has this home open, if it is this user's. Raises LibraryError where it is silent."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        with folder_of(root) as folder:
            if not _is_private(os.fstat(folder), stat.S_ISDIR):
                raise PermissionError
            if not _is_private(os.stat(NAME, dir_fd=folder, follow_symlinks=False), stat.S_ISSOCK):
                raise PermissionError
            connection.settimeout(GREETING_S)
            connection.connect(address(root, folder))
        if not is_same_user(connection):
            raise PermissionError
    except TimeoutError:
        connection.close()
        raise _silent(root) from None
    except OSError:  # nothing there, what a kill has left, somebody else's
        connection.close()
        return None
    return Line(connection)


def _is_private(found: os.stat_result, kind: Callable[[int], bool]) -> bool:
    """Whether it is of that kind, ours, and nobody else's to change."""
    return kind(found.st_mode) and found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077


def _silent(root: Path) -> LibraryError:
    return LibraryError(
        f"The process that has the home {root} open does not answer. Look at its terminal; {_AGAIN.lower()}"
    )


def run(line: Line, root: Path, command: str, arguments: Mapping[str, Any], out: TextIO) -> int:
    """Have a command run over there, and print what it says; its exit code. Raises what it raises.

    KeyboardInterrupt where it does not end after Ctrl-C; a second one is not waited for.
    """
    pid = _greeted(line, root)
    shown = {name: os.environ[name] for name in SHOWN if name in os.environ}
    with suppress(OSError):
        shown["COLUMNS"] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    told = {
        name: text
        for name, text in os.environ.items()
        if name.startswith("RAGBLEND_") and name not in SECRETS
    }
    try:
        line.send(
            command=command, arguments=packed(arguments), folder=os.getcwd(), environment=told, shown=shown,
            is_terminal=sys.stderr.isatty(),
        )  # fmt: skip
        line.wait(None)
        with _interrupts(line):
            return _followed(line, out)
    except TimeoutError:
        raise _silent(root) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LibraryError(
            f"Process {pid}, which had the home {root} open, ended while it worked on this ({error}). What is done is "
            "kept; run the command again."
        ) from None


def _greeted(line: Line, root: Path) -> int:
    """The other one's process id. Raises LibraryError where it is not this version of RAGBlend."""
    try:
        found = line.receive() or {}
    except TimeoutError:
        raise _silent(root) from None
    except OSError:
        found = {}
    version, pid = found.get("ragblend"), found.get("pid")
    if version is None or not isinstance(pid, int):
        raise LibraryError(f"What answers at {root / NAME} is not RAGBlend. Remove that file.")
    if version != __version__:
        raise LibraryError(
            f"Process {pid} has the home {root} open: it is RAGBlend {version}, and this is {__version__}. {_AGAIN}"
        )
    return pid


def _followed(line: Line, out: TextIO) -> int:
    said = _Said(line)
    while (found := line.receive()) is not None:
        if "out" in found:
            out.write(found["out"])
            out.flush()
        elif "err" in found:
            with suppress(BrokenPipeError):  # who reads no notes may still read the result
                sys.stderr.write(found["err"])
                sys.stderr.flush()
        elif "read" in found:
            said.next()
        elif "failed" in found:
            kind, message = found["failed"]
            named = getattr(errors, kind, LibraryError)
            assert issubclass(named, RagBlendError)
            raise named(message)
        else:
            return int(found["end"])
    raise ConnectionResetError("the line was cut")


class _Said:
    """Standard input, a line when it is asked for. Whoever waits for one does not keep the process from ending."""

    def __init__(self, line: Line) -> None:
        self._line, self._rest, self._is_reading = line, b"", False

    def next(self) -> None:
        if not self._is_reading:  # else the one that comes is the answer
            self._is_reading = True
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        text = self._read().decode("utf-8", "surrogateescape")
        self._is_reading = False
        with suppress(OSError):
            self._line.send(said=text)

    def _read(self) -> bytes:
        """Past Python's own buffer, whose lock would be held while the interpreter ends."""
        try:
            descriptor = sys.stdin.fileno()
        except (AttributeError, io.UnsupportedOperation, ValueError):
            return b""
        while b"\n" not in self._rest:
            try:
                more = os.read(descriptor, 1 << 16)
            except OSError:
                more = b""
            if not more:
                found, self._rest = self._rest, b""
                return found
            self._rest += more
        found, newline, self._rest = self._rest.partition(b"\n")
        return found + newline


@contextmanager
def _interrupts(line: Line) -> Iterator[None]:
    """Ctrl-C is handed on, and the command has some seconds to end; their end, or a second one, ends it here.

    The socket stays without a timeout: one that it is given while it is read from makes Python read on for ever, deaf
    to signals.
    """
    asked, giving_up = False, threading.Timer(LEAVING_S, line.cut)
    giving_up.daemon = True

    def hand_on(*_: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        giving_up.start()
        with suppress(OSError):
            line.send(interrupt=True)

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # the shell has it ignored, say
        yield
        return
    signal.signal(signal.SIGINT, hand_on)
    try:
        yield
    except ConnectionResetError:
        if asked:
            raise KeyboardInterrupt from None
        raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        giving_up.cancel()


def packed(value: Any) -> Any:
    """Arguments as JSON; paths are absolute, as the other process is in another folder."""
    if isinstance(value, Path):
        return {"path": str(absolute(value))}
    if isinstance(value, Mapping):
        return {name: packed(part) for name, part in value.items()}
    return [packed(part) for part in value] if isinstance(value, list | tuple) else value


def unpacked(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"path"}:
            return Path(value["path"])
        return {name: unpacked(part) for name, part in value.items()}
    return [unpacked(part) for part in value] if isinstance(value, list) else value
