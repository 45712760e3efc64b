"""What each open page is doing: the answer that it waits for, and the conversation that it shows."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gradio as gr

Stop = Callable[[], None]
PARTS = CHAT, COMPARISON, MEASUREMENT = "chat", "comparison", "measurement"


def session_of(request: gr.Request, part: str = CHAT) -> str:
    """By Gradio's session hash, one an open page: its parts are stopped apart, and are closed together."""
    return f"{request.session_hash}/{part}"


class PageSessions:
    """What is asked in a session has a number, and the newest has the page. Safe for threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._numbers = itertools.count(1)
        self._newest: dict[str, int] = {}
        self._running: dict[str, Stop] = {}
        self._shown: dict[str, int | None] = {}
        self._asked_to_stop: set[str] = set()

    def begin(self, session: str) -> int:
        """A question was sent: what was asked before is stopped, also where it does not run yet.

        Returns its number. A stop from now on is for it, even before there is a turn to stop.
        """
        self.stop(session)
        with self._mutex:
            self._newest[session] = number = next(self._numbers)
            self._asked_to_stop.discard(session)
        return number

    @contextmanager
    def running(self, session: str, number: int, stop: Stop) -> Iterator[None]:
        """The page waits for what stop() ends: at once where nobody waits for it any more, and with the block."""
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

    def is_others(self, session: str, number: int) -> bool:
        """Whether something asked later has the page."""
        with self._mutex:
            return self._newest.get(session, number) != number

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
        """Nobody waits for anything any more, nor for what was asked and does not run yet."""
        self.stop(session)
        with self._mutex:
            self._shown.pop(session, None)
            self._newest.pop(session, None)
            self._asked_to_stop.discard(session)
