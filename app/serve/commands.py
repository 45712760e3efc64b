"""Runs commands that this user's other processes forward to this one, because it has the home open.

`app/remote.py` is the client. Each command runs in a thread, with the code that would run it in its own process; its
terminal is the client's, over the connection.
"""

import io
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ragblend import __version__
from ragblend.app.cli.common import CommandHost, Terminal, run_forwarded
from ragblend.app.remote import MAX_BYTES, SOCKET_NAME, JsonChannel
from ragblend.app.services import AppServices
from ragblend.app.system import is_same_user, limit_sending, listen_in
from ragblend.kvstore.errors import RagBlendError
from ragblend.kvstore.files import Closing

log = logging.getLogger("ragblend")
REQUEST_TIMEOUT_S = 10.0
REQUEST_FIELDS = {"command", "arguments", "folder", "environment", "shown", "is_terminal"}
STOP_TIMEOUT_S = 30.0
RETRY_S = 0.1  # after a connection could not be accepted, for example because too many files are open
MAX_CHARACTERS = MAX_BYTES // 16  # of one line: JSON escapes a character in up to 12 bytes
SEND_TIMEOUT_S = 60  # a terminal that reads nothing this long (suspended, say) would block writers: drop it


class CommandListener(Closing):
    """Accepts forwarded commands on a socket in the home. Raises OSError if it cannot listen.

    Only for the process that holds the home's page lock.
    """

    def __init__(self, services: AppServices) -> None:
        self._services, self._root = services, services.workspaces.home.root
        self._closing = threading.Event()
        self._running: dict[RemoteTerminal, threading.Thread] = {}
        self._socket = listen_in(self._root, SOCKET_NAME)
        self._thread = threading.Thread(target=self._accept, name="ragblend-commands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Remove the socket, interrupt the running commands and wait for them."""
        self._closing.set()
        with suppress(OSError):
            (self._root / SOCKET_NAME).unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        running = dict(self._running)
        for terminal in running:
            terminal.shut_down()
        for thread in running.values():
            thread.join(STOP_TIMEOUT_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closing.wait(RETRY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection:
            if not is_same_user(connection, self._root / SOCKET_NAME):
                return
            limit_sending(connection, SEND_TIMEOUT_S)
            self._serve_command(JsonChannel(connection))

    def _serve_command(self, channel: JsonChannel) -> None:
        with channel, suppress(OSError):
            channel.send(ragblend=__version__, pid=os.getpid())
            channel.set_timeout(REQUEST_TIMEOUT_S)
            request = channel.receive()
            if request is None or request.keys() != REQUEST_FIELDS:
                return
            channel.set_timeout(None)
            terminal = RemoteTerminal(channel, request)
            self._running[terminal] = threading.current_thread()
            if self._closing.is_set():  # `close` may have read `_running` before this entry
                terminal.shut_down()
            threading.Thread(target=terminal.listen, daemon=True).start()
            try:
                channel.send(**self._run(request, terminal))
            finally:
                del self._running[terminal]

    def _run(self, request: dict[str, Any], terminal: "RemoteTerminal") -> dict[str, Any]:
        """Run the command, and return the last message to the client: its result or its error."""
        try:
            host = CommandHost(self._services, Path(request["folder"]), dict(request["environment"]))
            return {"end": run_forwarded(request["command"], request["arguments"], terminal, host)}
        except RagBlendError as error:
            message = str(error)
            if terminal.is_shutting_down:
                message += " The process that has the home open is ending."
            # The most specific class that the client knows: one of `kvstore.errors`.
            known_classes = (
                kind for kind in type(error).__mro__ if kind.__module__ == RagBlendError.__module__
            )
            return {"failed": [next(known_classes).__name__, message]}
        except Exception as error:
            log.exception("the command %s failed", request.get("command"))
            message = (
                f"An unexpected error occurred ({type(error).__name__}: {error}); the terminal of process "
                f"{os.getpid()}, which has the home open, shows where."
            )
            return {"failed": ["LibraryError", message]}
        except BaseException:  # KeyboardInterrupt, alone or in an exception group of an event loop
            return {"failed": ["Cancelled", "Interrupted."]}


class RemoteTerminal(Terminal):
    """The terminal of a forwarded command. After an interrupt or a lost connection the command's next output raises."""

    def __init__(self, channel: JsonChannel, request: dict[str, Any]) -> None:
        self._channel, self._thread = channel, threading.get_ident()
        self._changed = threading.Condition()  # of `_input` and `_is_interrupted`
        self._input: list[str] = []
        self._stop_callbacks: list[Callable[[], None]] = []
        self._is_interrupted = self._is_disconnected = self.is_shutting_down = False
        out: Any = _RemoteStream(self, "out", False)
        err: Any = _RemoteStream(self, "err", bool(request["is_terminal"]))
        self.out, self.err = out, err
        self.environment = {str(name): str(text) for name, text in request["shown"].items()}

    # --- called for the client, by other threads than the command's

    def listen(self) -> None:
        """Receive input and interrupts until the connection ends."""
        try:
            while (message := self._channel.receive()) is not None:
                with self._changed:
                    if "said" in message:
                        self._input.append(message["said"])
                        self._changed.notify_all()
                if "interrupt" in message:
                    self._interrupt()
        except (OSError, ValueError):  # closed by another thread
            pass
        self._is_disconnected = True
        self._interrupt()

    def shut_down(self) -> None:
        """Interrupt the command because this process ends."""
        self.is_shutting_down = True
        self._interrupt()

    def _interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()
        for stop in list(self._stop_callbacks):
            stop()

    # --- called by the command

    def check(self) -> bool:
        with self._changed:
            if self._is_interrupted:
                self._is_interrupted = self._is_disconnected or self.is_shutting_down
                raise KeyboardInterrupt
        return False

    def read_line(self) -> str:
        with suppress(OSError):
            self._channel.send(read=True)
        with self._changed:
            self._changed.wait_for(lambda: self._input or self._is_interrupted)
            if self._input:
                return self._input.pop(0)
        if not (self._is_disconnected or self.is_shutting_down):
            self.check()
        return ""

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        self._stop_callbacks.append(stop)
        if self._is_interrupted:  # perhaps before `stop` was in the list
            stop()
        try:
            yield
        finally:
            self._stop_callbacks.remove(stop)
        self.check()

    def send(self, kind: str, text: str) -> None:
        if threading.get_ident() == self._thread:  # not the thread that draws progress
            self.check()
        try:
            self._channel.send(**{kind: text})
        except OSError:  # cut, so that `listen` ends and interrupts the command
            self._channel.cut()


class _RemoteStream(io.TextIOBase):
    """A text stream that is written to the client's terminal."""

    encoding = "utf-8"

    def __init__(self, terminal: RemoteTerminal, kind: str, is_terminal: bool) -> None:
        self._terminal, self._kind, self._is_terminal = terminal, kind, is_terminal

    def write(self, text: str) -> int:
        for start in range(0, len(text), MAX_CHARACTERS):
            self._terminal.send(self._kind, text[start : start + MAX_CHARACTERS])
        return len(text)

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True
