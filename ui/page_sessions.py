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
    """One request of a page. stopped: it should end; is_outdated: a newer one replaced it, so it must not draw."""

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
    """Each session's newest request, and the conversation and the list of conversations that it shows. Thread-safe."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._newest: dict[str, PageRequest] = {}
        self._shown: dict[str, int | None] = {}
        self._listings: dict[str, tuple[str, int]] = {}

    def begin(self, session: str) -> PageRequest:
        """Begin a new request; the previous one is stopped and outdated."""
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

    def set_shown(self, session: str, chat_id: int | None) -> None:
        """Note which conversation the page shows: only answers in this one are drawn."""
        self._shown[session] = chat_id

    def is_shown(self, session: str, chat_id: int | None) -> bool:
        return self._shown.get(session) == chat_id

    def set_listing(self, session: str, search: str, limit: int) -> None:
        """Note what the page searches conversations for, and how many it lists: an answer draws this list again."""
        self._listings[session] = search, limit

    def listing(self, session: str) -> tuple[str, int] | None:
        return self._listings.get(session)

    def close(self, session: str) -> None:
        """The page was closed: stop its request, even if that is not running yet."""
        self.stop(session)
        self._shown.pop(session, None)
        self._listings.pop(session, None)
        self._newest.pop(session, None)
