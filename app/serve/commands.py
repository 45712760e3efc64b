"""The other end of `remote.py`: commands of this user, run by the process that has the home open, over what it has.

Each runs in a thread, by the code that it would run in a process of its own; its terminal is at the other end.
"""

import io
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ragblend import __version__
from ragblend.app.cli.common import Terminal, run_shared
from ragblend.app.remote import NAME, Line, address, folder_of, is_same_user, unpacked
from ragblend.app.services import AppServices
from ragblend.app.settings import TYPES, Settings
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import RagBlendError, UsageError
from ragblend.kvstore.files import FILE_MODE, Closing

log = logging.getLogger("ragblend")
ASKED_S = 10.0
ASKED = {"command", "arguments", "folder", "environment", "shown", "is_terminal"}
ENDING_S = 30.0
PAUSE_S = 0.1  # after a connection that could not be taken, for want of open files, say
TAKEN_S = 60  # a terminal that takes nothing for so long (suspended, say) is gone: it must not keep others from writing
# What a process has once, for all that it does.
SIZES = tuple(name for name in TYPES if name.endswith("_budget_bytes"))
COMMON = ("model", "device", "dtype", "store_policy", "kv_codec", "remote", *SIZES)


class Commands(Closing):
    """Listens in the home from now on. Raises OSError where that cannot be. Only for who holds the home's page lock."""

    def __init__(self, desk: AppServices) -> None:
        self._desk, self._root = desk, desk.workspaces.home.root
        self._closing = threading.Event()
        self._lock, self._running = threading.Lock(), dict["RemoteTerminal", threading.Thread]()
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            with folder_of(self._root) as folder:
                with suppress(FileNotFoundError):  # what a kill has left
                    os.unlink(NAME, dir_fd=folder)
                self._socket.bind(address(self._root, folder))
                os.chmod(NAME, FILE_MODE, dir_fd=folder)
                self._socket.listen(64)
        except OSError:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._accept, name="ragblend-commands", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Interrupt what runs, wait for it, and take the socket away."""
        self._closing.set()
        with suppress(OSError):
            (self._root / NAME).unlink()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        with self._lock:
            running = dict(self._running)
        for terminal in running:
            terminal.leave()
        for thread in running.values():
            thread.join(ENDING_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                self._closing.wait(PAUSE_S)
                continue
            if is_same_user(connection):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", TAKEN_S, 0))
                threading.Thread(target=self._serve, args=(Line(connection),), daemon=True).start()
            else:
                connection.close()

    def _serve(self, line: Line) -> None:
        with line, suppress(OSError):
            line.send(ragblend=__version__, pid=os.getpid())
            line.wait(ASKED_S)
            asked = line.receive()
            if asked is None or asked.keys() != ASKED:
                return
            line.wait(None)
            terminal = RemoteTerminal(line, asked)
            with self._lock:
                self._running[terminal] = threading.current_thread()
            threading.Thread(target=terminal.listen, daemon=True).start()
            try:
                line.send(**self._run(asked, terminal))
            finally:
                with self._lock:
                    del self._running[terminal]

    def _run(self, asked: dict[str, Any], terminal: "RemoteTerminal") -> dict[str, Any]:
        """What the other end is told when it is over."""
        try:
            arguments, shared = unpacked(asked["arguments"]), Shared(self._desk, asked)
            return {"end": run_shared(asked["command"], arguments, terminal, shared)}
        except RagBlendError as error:
            said = (
                f"{error} The process that has the home open is ending." if terminal.is_left else str(error)
            )
            return {"failed": [_named(error), said]}
        except Exception as error:
            log.exception("the command %s failed", asked.get("command"))
            said = (
                f"Something failed that was not foreseen ({type(error).__name__}: {error}); the terminal of process "
                f"{os.getpid()}, which has the home open, says where."
            )
            return {"failed": ["LibraryError", said]}
        except BaseException:  # KeyboardInterrupt, alone or in a group of an event loop's
            return {"failed": ["Cancelled", "Interrupted."]}


def _named(error: RagBlendError) -> str:
    """The nearest class that the other end knows."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == RagBlendError.__module__)


class Shared:
    """What this process has open, for one command: under the command's own settings."""

    def __init__(self, desk: AppServices, asked: dict[str, Any]) -> None:
        self.desk, self._environment = desk, dict(asked["environment"])
        self.folder = Path(asked["folder"])

    def workspace(self, overrides: dict[str, Any]) -> Workspace:
        """As `Workspace.open` has it. Raises UsageError for what only another process could have."""
        spaces = self.desk.workspaces
        wanted = Settings.load(spaces.home.settings, self._environment, overrides)
        here = {name: getattr(spaces.settings, name) for name in COMMON}
        for name in COMMON:
            if self._meant(name, getattr(wanted, name)) != self._meant(name, here[name], Path.cwd()):
                has, asks = _said(here[name]), _said(getattr(wanted, name))
                raise UsageError(
                    f"Process {os.getpid()} has the home {spaces.home.root} open, with {name} {has}; this command asks "
                    f"for {asks}. Ask without that, or end the process and run this again."
                )
        return spaces.with_settings(wanted.changed(here)).first

    def _meant(self, name: str, value: Any, folder: Path | None = None) -> Any:
        """The same for what is the same: a path from another folder, a device by its name or left out."""
        if name == "model" and value != "default":
            path = os.path.join(folder or self.folder, os.path.expanduser(value))
            return os.path.realpath(path) if os.path.exists(path) else value
        if name in ("device", "dtype") and value is None:
            from ragblend.engine.model.device import pick_device, pick_dtype

            device = pick_device(self.desk.settings.device)
            return str(pick_device(None)) if name == "device" else pick_dtype(device, None)
        return value


def _said(value: Any) -> str:
    return "left to the default" if value is None else repr(value)


class RemoteTerminal(Terminal):
    """The terminal of a command that was sent here. Interrupted or left, whatever the command says next raises."""

    def __init__(self, line: Line, asked: dict[str, Any]) -> None:
        self._line, self._thread = line, threading.get_ident()
        self._changed = threading.Condition()
        self._said: list[str] = []
        self._stops: list[Callable[[], None]] = []
        self._is_interrupted = self._is_gone = self.is_left = False
        is_terminal = bool(asked["is_terminal"])
        out: Any = _Words(self, "out", False)
        err: Any = _Words(self, "err", is_terminal)
        self.out, self.err = out, err
        self.environment = {str(name): str(text) for name, text in asked["shown"].items()}

    # --- from the other end

    def listen(self) -> None:
        """Take what comes, until the line ends."""
        try:
            while (found := self._line.receive()) is not None:
                with self._changed:
                    if "said" in found:
                        self._said.append(found["said"])
                        self._changed.notify_all()
                if "interrupt" in found:
                    self._interrupt()
        except (OSError, ValueError):  # closed under our hands
            pass
        self._is_gone = True
        self._interrupt()

    def leave(self) -> None:
        """This process ends."""
        self.is_left = True
        self._interrupt()

    def _interrupt(self) -> None:
        with self._changed:
            self._is_interrupted = True
            stops = list(self._stops)
            self._changed.notify_all()
        for stop in stops:
            stop()

    # --- from the command

    def check(self) -> bool:
        with self._changed:
            if self._is_interrupted:
                self._is_interrupted = self._is_gone or self.is_left
                raise KeyboardInterrupt
        return False

    def read_line(self) -> str:
        with suppress(OSError):
            self._line.send(read=True)
        with self._changed:
            self._changed.wait_for(lambda: self._said or self._is_interrupted)
            if self._said:
                return self._said.pop(0)
        if self._is_gone or self.is_left:
            return ""
        self.check()
        return ""

    @contextmanager
    def stopping(self, stop: Callable[[], None]) -> Iterator[None]:
        with self._changed:
            self._stops.append(stop)
            is_late = self._is_interrupted
        if is_late:
            stop()
        try:
            yield
        finally:
            with self._changed:
                self._stops.remove(stop)
        self.check()

    def say(self, kind: str, text: str) -> None:
        if threading.get_ident() == self._thread:  # not the one that draws progress
            self.check()
        try:
            self._line.send(**{kind: text})
        except OSError:  # which `listen` then sees as well
            self._line.cut()


class _Words(io.TextIOBase):
    """What is written goes to the other end."""

    encoding = "utf-8"

    def __init__(self, terminal: RemoteTerminal, kind: str, is_terminal: bool) -> None:
        self._terminal, self._kind, self._is_terminal = terminal, kind, is_terminal

    def write(self, text: str) -> int:
        if text:
            self._terminal.say(self._kind, text)
        return len(text)

    def isatty(self) -> bool:
        return self._is_terminal

    def writable(self) -> bool:
        return True
