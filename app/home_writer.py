"""One writer at a time among the threads of this process, which is one writer among processes.

Ingest writes for hours, a delete for a moment: who writes long asks `wanted` between two steps, and lets others pass.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ragblend.app.workspaces import Workspaces


class HomeWriter:
    """Turns at a home's writer lock. Safe for threads, not reentrant."""

    def __init__(self, workspaces: Workspaces) -> None:
        from ragblend.engine.scheduler import DeviceQueue

        self._workspaces, self._queue = workspaces, DeviceQueue()
        self._count, self._counting = 0, threading.Lock()
        self._mark: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether somebody waits behind the one whose turn it is."""
        return self._count > 1

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the home. Raises StoreLockedError, naming the process that has it."""
        with self._counting:
            self._count += 1
        try:
            with (
                self._queue.turn(),
                self._workspaces.of(self._workspaces.settings.collection).writing() as hold,
            ):
                if (
                    hold.before != self._mark
                ):  # somebody else wrote: what Chroma has in memory may be out of date
                    self._workspaces.refresh_indexes()
                self._mark = hold.mark
                yield
        finally:
            with self._counting:
                self._count -= 1
