"""Writer lock: one writer at a time among all threads and processes, by a lock file that names its holder.

Readers never take it. While a process holds the store's lock, a temporary file, or a file without a row, must be left
over from a crash: no other process can be in the middle of a put. Two writing processes silently corrupt Chroma's
files, so every change of the library holds the home's lock.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ragblend.kvstore import system
from ragblend.kvstore.errors import StoreError, StoreLockedError
from ragblend.kvstore.files import Closing, identity, is_same_file, make_private_file, open_file

_POLL_S = 0.005
_SHORTEST_BYTES, _HOLDER_BYTES = 256, 65_536


@dataclass(frozen=True)
class Hold:
    """One holding of the lock. before: the mark that the last writer left, None if it was killed; mark: this one's."""

    before: str | None
    mark: str


class WriterLock(Closing):
    """Re-entrant in one thread; StoreLockedError, with the holder, after `timeout_s`. OSError for a link.

    command: shown to waiting processes, by default this process's command line.
    """

    def __init__(self, path: Path, timeout_s: float = 0.0, command: str = "") -> None:
        make_private_file(path)
        self.path, self.timeout_s = path, timeout_s
        since = datetime.now().astimezone().isoformat(timespec="seconds")
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        self._holder = _encode(holder | {"command": command or " ".join(sys.argv)})
        self.before: dict[str, Any] = {}  # the file's content before the lock was taken
        # Written at the release: the holder's command may name a deleted document, or hold a question.
        self._content_after = _encode({})
        self._thread_lock = threading.RLock()
        self._depth = 0
        self._fd = system.open_existing(path, writable=True)
        self._identity = identity(os.fstat(self._fd))

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock; wait at most `timeout_s` (default: the lock's own)."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if not self._thread_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreLockedError(self._locked_message())
        try:
            if self._fd < 0:
                raise StoreError(f"{self.path} has been closed; open the store again")
            if self._depth == 0:
                self._lock_file(deadline)
            self._depth += 1
            try:
                if self._depth == 1:
                    self.before = _parse(system.read_at(self._fd, _HOLDER_BYTES, 0))
                    self._write(self._holder)
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    try:
                        self._write(self._content_after)
                    finally:
                        system.unlock(self._fd)
        finally:
            self._thread_lock.release()

    def set_content_after(self, value: dict[str, Any]) -> None:
        """Set what the file contains after the release. An error of writing it is ignored, because deleting must work
        on a full disk.
        """
        self._content_after = _encode(value)

    def is_in_place(self) -> bool:
        """Whether the locked file is still the one that other processes would lock; the folder may have been moved."""
        return is_same_file(self.path, self._identity)

    def close(self) -> None:
        with self._thread_lock:
            if self._fd >= 0:
                with suppress(OSError):  # the file is closed anyway, and its content is not important
                    os.close(self._fd)
                self._fd = -1

    def _lock_file(self, deadline: float) -> None:
        while not system.try_to_lock(self._fd):
            if time.monotonic() >= deadline:
                raise StoreLockedError(self._locked_message())
            time.sleep(_POLL_S)

    def _write(self, text: bytes) -> None:
        try:
            system.overwrite(self._fd, text)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, 0)  # without a mark the next writer assumes a kill

    def _locked_message(self) -> str:
        holder = read_holder(self.path)
        who = "another process"
        if holder is not None:
            pid, host, command, since = (holder.get(name) for name in ("pid", "host", "command", "since"))
            who = f"process {pid} on {host} (`{command}`, since {since})"
        return (
            f"Writing to {self.path.parent}: {who} is writing there, and only one process may write to a home "
            "at a time. Wait until it ends, stop it, or use another --home."
        )


@contextmanager
def writer_lock(path: Path, command: str = "") -> Iterator[Hold]:
    """Hold a lock without waiting, and leave a mark. Raises StoreLockedError, with the holder."""
    with WriterLock(path, command=command) as lock, lock.hold():
        hold = Hold(lock.before.get("mark"), secrets.token_hex(8))
        # The file stays: unlinking it would let two processes hold locks on two files of one name.
        lock.set_content_after({"mark": hold.mark})
        yield hold


def read_holder(path: Path) -> dict[str, Any] | None:
    """The process that holds the lock, read from the file; None if there is none."""
    try:
        fd = open_file(path)
        try:
            found = _parse(os.read(fd, _HOLDER_BYTES))
        finally:
            os.close(fd)
    except OSError:
        return None
    return found if "pid" in found else None


def _parse(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _encode(value: dict[str, Any]) -> bytes:
    # Padded, and written in place: a file that was truncated to nothing before writing would be flushed on closing.
    return json.dumps(value).encode().ljust(_SHORTEST_BYTES)
