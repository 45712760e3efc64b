"""Background tasks: one thread runs them by priority while no request needs what they use."""

import atexit
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import thread as executor_threads
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from ragblend.kvstore.errors import Cancelled

log = logging.getLogger("ragblend")
EXIT_S = 5.0  # how long requested KV is still stored when an engine is closed or the process exits
MAX_WAITING = 256  # tasks, above which no named one is added; a later request adds it again

_ending_first: "weakref.WeakSet[Any]" = weakref.WeakSet()
_runtimes: "weakref.WeakSet[Any]" = weakref.WeakSet()


def end_at_exit(thing: Any, ends_first: bool = False) -> None:
    """Call `thing.end()` before the interpreter exits: torch aborts the process if it is stopped in the middle.

    ends_first: it adds background tasks when it ends, so it must end before the engines, which run them.
    """
    if not (_ending_first or _runtimes):
        atexit.unregister(_end_all)
        atexit.register(_end_all)
    (_ending_first if ends_first else _runtimes).add(thing)


def _end_all() -> None:
    for thing in (*_ending_first, *_runtimes):
        thing.end()


class Priority(IntEnum):
    """Priority of a background task; lower numbers are more important."""

    STORE = 0  # KV that was requested and is not stored yet
    PREPARE = 1  # KV that may be requested
    MEASURE = 2


@dataclass(frozen=True)
class _Task:
    name: Hashable
    work: Callable[[], None]
    priority: Priority


class BackgroundTasks:
    """Runs tasks in one thread, by priority and then in order of arrival. A task that fails is logged and dropped.

    A task that raises Cancelled runs again later if it yielded to a more important one, and is dropped otherwise. When
    the engine is closed or the process exits, the running task is finished, tasks that store KV run for at most EXIT_S,
    and the others are dropped. on_unfinished: called with the names of storing tasks that did not run. stopping: a
    caller waits for the tasks to end, so work that can be postponed should stop.
    """

    def __init__(self, on_unfinished: Callable[[Sequence[Hashable]], None] | None = None) -> None:
        self._changed = threading.Condition()
        self._tasks: list[_Task] = []
        self._running = False
        self._on_unfinished, self._stops_at = on_unfinished, math.inf
        self.stopping = False

    def add(
        self, work: Callable[[], None], name: Hashable = None, priority: Priority = Priority.PREPARE
    ) -> None:
        """Queue a task, unless one of that name (or that function) is waiting, or it has a name and too many wait."""
        with self._changed:
            waiting = [task.name for task in self._tasks]
            if (name or work) not in waiting and not (name and len(waiting) >= MAX_WAITING):
                self._tasks.append(_Task(name or work, work, priority))
            self._start()

    def drop(self, matches: Callable[[Hashable], bool]) -> None:
        """Remove the waiting tasks whose names match."""
        with self._changed:
            self._tasks = [task for task in self._tasks if not matches(task.name)]

    def should_stop(self, priority: Priority) -> bool:
        """Whether a running task of that priority should stop, for a more important one or for `close`."""
        with self._changed:
            return self.stopping or any(task.priority < priority for task in self._tasks)

    def finish(self, timeout_s: float | None = None, stopping: bool = False) -> bool:
        """Wait until all tasks are done; False if that took too long or no thread could be started."""
        with self._changed:
            self.stopping = stopping
            self._start()
            done = self._changed.wait_for(lambda: not self._running, timeout_s)
            self.stopping = False
            return done and not self._tasks

    def end(self) -> None:
        """Run the tasks that store KV for at most EXIT_S, and wait for the running one."""
        with self._changed:
            self._tasks = [task for task in self._tasks if task.priority is Priority.STORE]
            self._stops_at = time.monotonic() + EXIT_S
            runs_here = bool(self._tasks) and not self._running
            self._running = self._running or runs_here
        if runs_here:  # no thread can be started while a process exits
            self._run()
        self.finish(stopping=True)
        with self._changed:
            names = [task.name for task in self._tasks if task.priority is Priority.STORE]
            self._tasks, self._stops_at = [], math.inf
        if names and self._on_unfinished is not None:
            self._on_unfinished(names)

    def _start(self) -> None:
        """Start the thread; the caller holds the lock. If no thread can be started, tasks wait for the next call."""
        if self._running or not self._tasks or time.monotonic() >= self._stops_at:
            return
        try:
            threading.Thread(target=self._run, name="ragblend-background", daemon=True).start()
            self._running = True
        except RuntimeError as error:
            log.warning("background tasks wait until a thread can be started: %s", error)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._tasks or time.monotonic() >= self._stops_at:
                    self._running = False
                    self._changed.notify_all()
                    return
                task = min(self._tasks, key=lambda each: each.priority)  # the first of equals
                self._tasks.remove(task)
            try:
                task.work()
            except Cancelled:
                if not self.stopping and self.should_stop(task.priority):
                    self.add(task.work, task.name, task.priority)
            except Exception:
                # While the process exits, a task may fail because thread pools that it needs have ended: no warning.
                if not executor_threads._shutdown:
                    log.warning("a background task failed and was dropped", exc_info=True)
