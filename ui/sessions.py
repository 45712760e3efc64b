"""What each open page is doing: the answer that it waits for, and the conversation that it shows."""

import threading
from typing import Protocol


class Stoppable(Protocol):
    def stop(self) -> None: ...


class Sessions:
    """By Gradio's session hash, one an open page. Safe for threads."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._running: dict[str, Stoppable] = {}
        self._shown: dict[str, int | None] = {}
        self._asked_to_stop: set[str] = set()

    def begin(self, session: str) -> None:
        """A question was sent: a stop from now on is for it, even before there is a turn to stop."""
        self.stop(session)
        with self._mutex:
            self._asked_to_stop.discard(session)

    def run(self, session: str, turn: Stoppable) -> None:
        """The page now waits for this turn; one that was asked to stop meanwhile is stopped at once."""
        with self._mutex:
            self._running[session] = turn
            late = session in self._asked_to_stop
        if late:
            turn.stop()

    def end(self, session: str, turn: Stoppable) -> None:
        with self._mutex:
            if self._running.get(session) is turn:
                del self._running[session]

    def stop(self, session: str) -> bool:
        """Ask the page's turn to stop; returns at once, and says whether there was one."""
        with self._mutex:
            turn = self._running.get(session)
            self._asked_to_stop.add(session)
        if turn is not None:
            turn.stop()
        return turn is not None

    def show(self, session: str, chat_id: int | None) -> None:
        """The page shows this conversation: what runs for another one is no longer drawn there."""
        with self._mutex:
            self._shown[session] = chat_id

    def shows(self, session: str, chat_id: int | None) -> bool:
        with self._mutex:
            return self._shown.get(session) == chat_id

    def close(self, session: str) -> None:
        """The page is gone."""
        self.stop(session)
        with self._mutex:
            self._shown.pop(session, None)
            self._asked_to_stop.discard(session)
