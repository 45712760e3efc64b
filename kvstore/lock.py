"""One change at a time: a lock over threads (RLock) and processes (flock) that a killed holder gives back.

Readers never take it. Whoever holds it knows that a temporary file, or a file without a row, is left over
from a crash, and not another process's put that has yet to commit.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragblend.kvstore.errors import StoreLockedError
from ragblend.kvstore.files import identity, is_same_file, make_private_file

_POLL_S = 0.005


class WriterLock:
    """Re-entrant in one thread; StoreLockedError after `timeout_s`."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        make_private_file(path)
        self.path, self.timeout_s = path, timeout_s
        self._threads = threading.RLock()
        self._depth = 0
        self._fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._identity = identity(os.fstat(self._fd))

    @contextmanager
    def hold(self, timeout_s: float | None = None) -> Iterator[None]:
        """Hold the lock; wait at most `timeout_s` (default: the lock's own)."""
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        if not self._threads.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreLockedError(self._message())
        try:
            if self._depth == 0:
                self._lock_file(deadline)
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def is_in_place(self) -> bool:
        """Whether the locked file is still the one that others would lock: the folder may have been moved."""
        return is_same_file(self.path, self._identity)

    def _lock_file(self, deadline: float) -> None:
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreLockedError(self._message()) from None
                time.sleep(_POLL_S)
        # Only for the message below, and a full disk must still let values be deleted.
        with suppress(OSError):
            os.pwrite(self._fd, f"{os.getpid():<20}".encode(), 0)

    def _message(self) -> str:
        holder = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
        return (
            f"changing the KV store at {self.path.parent} timed out: process {holder} is writing to it. "
            "Try again when it is done, or stop that process."
        )

    def close(self) -> None:
        with self._threads:
            if self._fd >= 0:
                with suppress(
                    OSError
                ):  # nothing was written that matters, and the descriptor is gone either way
                    os.close(self._fd)
                self._fd = -1
