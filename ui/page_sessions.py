"""The state of each open page: its running work, which can be stopped, and the conversation that it shows."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gradio as gr

Stop = Callable[[], None]
PARTS = CHAT, COMPARISON, MEASUREMENT = "chat", "comparison", "measurement"


def session_of(request: gr.Request, part: str = CHAT) -> str:
    """The session of one part of an open page (by Gradio's session hash): parts are stopped separately."""
    return f"{request.session_hash}/{part}"


class PageSessions:
    """Numbers the requests of each session; only the newest may draw on its page. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._newest: dict[str, int] = {}
        self._running: dict[str, Stop] = {}
        self._shown: dict[str, int | None] = {}
        self._asked_to_stop: set[str] = set()

    def begin(self, session: str) -> int:
        """Register a new request and stop the one before, even if that is not running yet.

        Returns its number. From now on `stop` means this request, even before it is running.
        """
        self.stop(session)
        with self._mutex:
            self._newest[session] = number = next(self._numbers)
            self._asked_to_stop.discard(session)
        return number

    @contextmanager
    def running(self, session: str, number: int, stop: Stop) -> Iterator[None]:
        """Register how to stop a request while it runs; stop() is called at once if it is no longer wanted, and at the
        end of the block.
        """
        with self._mutex:
            is_wanted = self._newest.get(session) == number and session not in self._asked_to_stop
            if is_wanted:
                self._running[session] = stop
        if not is_wanted:
            stop()
        try:
            yield
        finally:
            stop()
            with self._mutex:
                if self._running.get(session) == stop:
                    del self._running[session]

    def is_outdated(self, session: str, number: int) -> bool:
        """Whether a newer request has the page."""
        with self._mutex:
            return self._newest.get(session, number) != number

    def stop(self, session: str) -> None:
        """Stop the session's request; returns at once."""
        with self._mutex:
            stop = self._running.get(session)
            self._asked_to_stop.add(session)
        if stop is not None:
            stop()

    def show(self, session: str, chat_id: int | None) -> None:
        """Note which conversation the page shows: answers in others are no longer drawn there."""
        with self._mutex:
            self._shown[session] = chat_id

    def shows(self, session: str, chat_id: int | None) -> bool:
        with self._mutex:
            return self._shown.get(session) == chat_id

    def close(self, session: str) -> None:
        """The page was closed: stop its request, even if that is not running yet."""
        self.stop(session)
        with self._mutex:
            self._shown.pop(session, None)
            self._newest.pop(session, None)
            self._asked_to_stop.discard(session)
