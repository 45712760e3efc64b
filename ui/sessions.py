"""What each open page is doing: the answer that it waits for, and the conversation that it shows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Stop = Callable[[], None]


class Sessions:
    """By Gradio's session hash, one an open page. Safe for threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: dict[str, Stop] = {}
        self._shown: dict[str, int | None] = {}
        self._asked_to_stop: set[str] = set()

    def begin(self, session: str) -> None:
        """A question was sent: a stop from now on is for it, even before there is a turn to stop."""
        self.stop(session)
        with self._mutex:
            self._asked_to_stop.discard(session)

    @contextmanager
    def running(self, session: str, stop: Stop) -> Iterator[None]:
        """The page waits for what stop() ends: at once where it was asked to stop meanwhile, and with the block."""
        with self._mutex:
            self._running[session] = stop
            late = session in self._asked_to_stop
        if late:
            stop()
        try:
            yield
        finally:
            stop()
            with self._mutex:
                if self._running.get(session) == stop:
                    del self._running[session]

    def stop(self, session: str) -> None:
        """Ask what the page waits for to stop; returns at once."""
        with self._mutex:
            stop = self._running.get(session)
            self._asked_to_stop.add(session)
        if stop is not None:
            stop()

    def show(self, session: str, chat_id: int | None) -> None:
        """The page shows this conversation: what runs for another one is no longer drawn there."""
        with self._mutex:
            self._shown[session] = chat_id

    def shows(self, session: str, chat_id: int | None) -> bool:
        with self._mutex:
            return self._shown.get(session) == chat_id

    def close(self, session: str) -> None:
        self.stop(session)
        with self._mutex:
            self._shown.pop(session, None)
            self._asked_to_stop.discard(session)
