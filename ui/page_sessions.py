"""The state of each open page: its running requests, which can be stopped, and the conversations that it shows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gradio as gr

PARTS = CHAT, COMPARISON, MEASUREMENT = "chat", "comparison", "measurement"


def session_of(request: gr.Request, part: str = CHAT) -> str:
    """The session of one part of an open page (by Gradio's session hash): parts are stopped separately."""
    return f"{request.session_hash}/{part}"


class PageRequest:
    """One request of a page. stopped: it should end; is_outdated: a newer one has the page, so it may not draw."""

    def __init__(self, session: str) -> None:
        self.session, self.stopped, self.is_outdated = session, threading.Event(), False
        self._on_stop: Callable[[], None] | None = None

    def stop(self) -> None:
        """Stop it, even if it is not running yet; returns at once."""
        self.stopped.set()
        if (on_stop := self._on_stop) is not None:
            on_stop()

    @contextmanager
    def running(self, on_stop: Callable[[], None]) -> Iterator[None]:
        """Call on_stop() when the request is stopped, at once if it already was, and at the end of the block."""
        self._on_stop = on_stop
        try:
            if self.stopped.is_set():
                on_stop()
            yield
        finally:
            on_stop()
            self._on_stop = None


class PageSessions:
    """The newest request of each session, and the conversation and the list that its page shows. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._newest: dict[str, PageRequest] = {}
        self._shown: dict[str, int | None] = {}
        self._listed: dict[str, tuple[str, int]] = {}

    def begin(self, session: str) -> PageRequest:
        """A new request; the one before is stopped and outdated."""
        newer = PageRequest(session)
        with self._mutex:
            older = self._newest.pop(session, None)
            self._newest[session] = newer
        if older is not None:
            older.is_outdated = True
            older.stop()
        return newer

    def stop(self, session: str) -> None:
        """Stop the session's request; returns at once."""
        if (request := self._newest.get(session)) is not None:
            request.stop()

    def show(self, session: str, chat_id: int | None) -> None:
        """Note which conversation the page shows: answers in others are no longer drawn there."""
        self._shown[session] = chat_id

    def shows(self, session: str, chat_id: int | None) -> bool:
        return self._shown.get(session) == chat_id

    def list_as(self, session: str, search: str, limit: int) -> None:
        """Note what the page searches conversations for, and how many it lists: answers draw the list again."""
        self._listed[session] = search, limit

    def listed(self, session: str) -> tuple[str, int] | None:
        return self._listed.get(session)

    def close(self, session: str) -> None:
        """The page was closed: stop its request, even if that is not running yet."""
        self.stop(session)
        self._shown.pop(session, None)
        self._listed.pop(session, None)
        self._newest.pop(session, None)
