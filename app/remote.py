"""Forwards a command to the process that has the home open (`ragblend serve`), and prints its output.

That process listens at a Unix socket in the home. The folder's mode decides who may connect, and the kernel identifies
the other end, so there is no port that another program could take, and no token. Without Unix sockets (on Windows) it
listens at a port, and both ends prove that they know the token in the home. The command's arguments are sent as lines
of JSON; `serve/commands.py` runs it there. No model, index or web client is imported here.
"""

import io
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from ragblend import __version__
from ragblend.app.home import absolute
from ragblend.app.system import connect_in, on_signal
from ragblend.kvstore import errors
from ragblend.kvstore.errors import LibraryError, RagBlendError
from ragblend.kvstore.files import Closing
from ragblend.kvstore.lock import read_holder
from ragblend.kvstore.places import SECRETS

SOCKET_NAME = "commands.sock"
# Held by the page or server that has the home open: a second one would ingest the files of the first one again.
OWNER_LOCK = "ui-page.lock"
MAX_BYTES = 16 << 20  # of one line
GREETING_S = 10.0
INTERRUPTED_S = 10.0  # after Ctrl-C, until this process exits; the other one ends the command anyway
DISPLAY_VARIABLES = ("TERM", "NO_COLOR", "COLORTERM")  # they decide how progress is drawn
RESTART = "End it, and start it again."


class JsonChannel(Closing):
    """JSON objects over a connected socket, one per line. Safe for several senders and one receiver."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lines = connection, connection.makefile("rb")
        self._sending = threading.RLock()

    def send(self, **value: Any) -> None:
        """Send an object, with absolute paths, because the other process is in another folder. Raises OSError."""
        with self._sending:
            text = json.dumps(value, default=lambda path: {"path": str(absolute(path))})
            try:
                self._socket.sendall(text.encode("ascii") + b"\n")
            except BrokenPipeError as error:  # callers would conclude that nobody reads the standard output
                raise ConnectionResetError(*error.args) from None

    def receive(self) -> dict[str, Any] | None:
        """The next object; None at the end, and for anything that is no object. Raises OSError."""
        text = self._lines.readline(MAX_BYTES)
        try:
            found = json.loads(text, object_hook=_with_paths) if text.endswith(b"\n") else None
        except (ValueError, TypeError):
            return None
        return found if isinstance(found, dict) else None

    def set_timeout(self, seconds: float | None) -> None:
        """Set the timeout of sending and receiving."""
        self._socket.settimeout(seconds)

    def cut(self) -> None:
        """End the connection for both ends; a waiting `receive` returns None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._lines.close()
        self._socket.close()


def _with_paths(value: dict[str, Any]) -> Any:
    return Path(value["path"]) if value.keys() == {"path"} else value


def connect(root: Path) -> JsonChannel | None:
    """Connect to the process of this user that has the home open; None if there is none. Raises LibraryError."""
    try:
        return JsonChannel(connect_in(root, SOCKET_NAME, GREETING_S))
    except TimeoutError:
        raise _no_answer(root) from None
    except OSError:  # no socket, or one of a killed process or of another user
        return None


def _no_answer(root: Path) -> LibraryError:
    pid = (read_holder(root / OWNER_LOCK) or {}).get("pid", "unknown")
    return LibraryError(
        f"Process {pid}, which has the home {root} open, does not answer. Look at its terminal; {RESTART.lower()}"
    )


def run(channel: JsonChannel, root: Path, command: str, arguments: Mapping[str, Any], out: TextIO) -> int:
    """Run a command in the other process and print its output; returns its exit code, and raises its errors.

    KeyboardInterrupt if it does not end after Ctrl-C, and at once after a second Ctrl-C.
    """
    pid = _check_greeting(channel, root)
    shown = {name: os.environ[name] for name in DISPLAY_VARIABLES if name in os.environ}
    with suppress(OSError):
        shown["COLUMNS"] = str(os.get_terminal_size(sys.stderr.fileno()).columns)
    named = {name for name in os.environ if name.startswith("RAGBLEND_")} - {*SECRETS}
    environment = {name: os.environ[name] for name in named}
    try:
        channel.send(
            command=command, arguments=arguments, folder=os.getcwd(), environment=environment, shown=shown,
            is_terminal=sys.stderr.isatty(),
        )  # fmt: skip
        channel.set_timeout(None)
        with _forwarded_interrupts(channel):
            return _print_output(channel, out)
    except TimeoutError:
        raise _no_answer(root) from None
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LibraryError(
            f"Process {pid}, which had the home {root} open, ended while it worked on this ({error}). What is done is "
            "kept; run the command again."
        ) from None


def _check_greeting(channel: JsonChannel, root: Path) -> int:
    """Read the greeting; returns the other process's id. Raises LibraryError if it is not this version of RAGBlend."""
    found: dict[str, Any] = {}
    try:
        found = channel.receive() or found
    except TimeoutError:
        raise _no_answer(root) from None
    except OSError:
        pass
    version, pid = found.get("ragblend"), found.get("pid")
    if version is None or not isinstance(pid, int):
        raise LibraryError(
            f"The program that answers at {root / SOCKET_NAME} is not RAGBlend. Remove that file."
        )
    if version != __version__:
        raise LibraryError(
            f"Process {pid} has the home {root} open: it is RAGBlend {version}, and this is {__version__}. {RESTART}"
        )
    return pid


def _print_output(channel: JsonChannel, out: TextIO) -> int:
    """Print what the command prints, and send it the input that it asks for, until it ends with an exit code."""
    stdin = _InputLines(channel)
    while (found := channel.receive()) is not None:
        if "out" in found:
            out.write(found["out"])
            out.flush()
        elif "err" in found:
            with suppress(BrokenPipeError):  # the result may still be read
                sys.stderr.write(found["err"])
                sys.stderr.flush()
        elif "read" in found:
            stdin.send_next()
        elif "failed" in found:
            kind, message = found["failed"]
            error_class = getattr(errors, kind, LibraryError)
            assert issubclass(error_class, RagBlendError)
            raise error_class(message)
        else:
            return int(found["end"])
    raise ConnectionResetError("the connection was closed")


class _InputLines:
    """Sends standard input line by line, each when it is asked for, in a thread that does not delay the exit."""

    def __init__(self, channel: JsonChannel) -> None:
        self._channel, self._is_reading = channel, False
        self._lines: Any = io.BytesIO()
        with suppress(AttributeError, OSError, ValueError):
            # Not `sys.stdin` itself: the interpreter would wait for its lock at exit.
            self._lines = os.fdopen(sys.stdin.fileno(), "rb", closefd=False)

    def send_next(self) -> None:
        if not self._is_reading:  # else the line that is being read will be sent for this request
            self._is_reading = True
            threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        text = b""
        with suppress(OSError):
            text = self._lines.readline()
        self._is_reading = False
        with suppress(OSError):
            self._channel.send(said=text.decode("utf-8", "surrogateescape"))


@contextmanager
def _forwarded_interrupts(channel: JsonChannel) -> Iterator[None]:
    """Forward Ctrl-C; if the command does not end within INTERRUPTED_S, or after a second Ctrl-C, raise
    KeyboardInterrupt.

    The time limit is a timer that ends the connection: if a socket timeout is set during a read, Python reads on for
    ever and ignores signals.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # ignored in a background process
        yield
        return
    is_interrupted, timeout = False, threading.Timer(INTERRUPTED_S, channel.cut)
    timeout.daemon = True

    def forward(*_: Any) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            raise KeyboardInterrupt
        is_interrupted = True
        timeout.start()
        with suppress(OSError):
            channel.send(interrupt=True)

    try:
        with on_signal(signal.SIGINT, forward):
            yield
    except ConnectionResetError:
        if is_interrupted:
            raise KeyboardInterrupt from None
        raise
    finally:
        timeout.cancel()
