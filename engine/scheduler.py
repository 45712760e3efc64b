"""The queue before the device: one request at a time, in the order of their coming, and chores when nobody waits."""

import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ragblend.kvstore.errors import Cancelled

log = logging.getLogger("ragblend")
_POLL_S = 0.05
PAUSE_S = 0.05  # a program's next call often comes within it, and would stop what had just begun


_running: "weakref.WeakSet[Any]" = weakref.WeakSet()


def end_at_exit(thing: Any) -> None:
    """Have it ended, by its `end()`, before the interpreter is: torch, stopped in the middle, aborts the process."""
    if not _running:
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    _running.add(thing)


def _end_all() -> None:
    for thing in list(_running):
        thing.end()


class DeviceQueue:
    """A fair lock: first come, first served; a waiting request can be cancelled. Not reentrant.

    Work in the background begins when nobody else has come for PAUSE_S, and asks `wanted` whether somebody did since.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._left_at = -PAUSE_S  # when the last request left

    @contextmanager
    def turn(self, cancel: threading.Event | None = None, background: bool = False) -> Iterator[None]:
        """Hold the device. Raises Cancelled if `cancel` is set before the turn comes."""
        ticket = object()
        with self._changed:
            if background:
                self._await_pause()
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket:
                    if cancel is not None and cancel.is_set():
                        raise Cancelled("the request was cancelled while it waited for the device")
                    self._changed.wait(_POLL_S if cancel is not None else None)
            except BaseException:
                self._leave(ticket)
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave(ticket)
                if not background:
                    self._left_at = time.monotonic()

    def _await_pause(self) -> None:
        while self._waiting or (left := self._left_at + PAUSE_S - time.monotonic()) > 0:
            self._changed.wait(None if self._waiting else left)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits behind the one whose turn it is."""
        return len(self._waiting) > 1

    def _leave(self, ticket: object) -> None:
        self._waiting.remove(ticket)
        self._changed.notify_all()


class Chores:
    """Work for later, in one background thread; a chore that fails is logged and forgotten.

    When the process ends, the chore under way is finished and the others are dropped. hurried: whether somebody waits
    for the end of it all, so that what can be done another time is given up.
    """

    def __init__(self) -> None:
        end_at_exit(self)
        self._changed = threading.Condition()
        self._queue: deque[Callable[[], None]] = deque()
        self._running = False
        self.hurried = False

    def add(self, chore: Callable[[], None]) -> None:
        with self._changed:
            self._queue.append(chore)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="ragblend-chores", daemon=True).start()

    def finish(self, timeout_s: float | None = None, hurried: bool = False) -> bool:
        """Wait until nothing is left to do; False if that took too long."""
        with self._changed:
            self.hurried = hurried
            done = self._changed.wait_for(lambda: not self._running, timeout_s)
            self.hurried = False
            return done

    def end(self) -> None:
        """Forget what has not begun, and wait for what has."""
        with self._changed:
            self._queue.clear()
        self.finish(hurried=True)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._running = False
                    self._changed.notify_all()
                    return
                chore = self._queue.popleft()
            try:
                chore()
            except Exception:
                log.warning("work in the background failed and was dropped", exc_info=True)
