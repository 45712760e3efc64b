"""Joins small pieces of a text stream: twenty updates per second look like fifty, and are less work for a browser."""

import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress

PAUSE_S = 0.05
SILENCE_S = 0.25


def coalesced(pieces: Iterable[str], pause_s: float = PAUSE_S, silence_s: float = SILENCE_S) -> Iterator[str]:
    """Yield the same text in fewer pieces, at least pause_s apart; an empty piece after each silence_s without text.

    The empty ones let the caller notice that the client is gone. An error of the source is raised after the text before
    it. A separate thread reads the source to its end.
    """
    arrived: queue.SimpleQueue[str | BaseException | None] = queue.SimpleQueue()

    def pump() -> None:
        end = None
        try:
            for piece in pieces:
                arrived.put(piece)
        except BaseException as error:
            end = error
        arrived.put(end)

    threading.Thread(target=pump, name="ragblend-page-stream", daemon=True).start()
    item: str | BaseException | None = ""
    while isinstance(item, str):
        text, wait_s, deadline = "", silence_s, math.inf
        with suppress(queue.Empty):
            while isinstance(item := arrived.get(timeout=wait_s), str):
                text, deadline = text + item, min(deadline, time.monotonic() + pause_s)
                wait_s = max(0.0, deadline - time.monotonic())
        if text or isinstance(item, str):
            yield text
    if item is not None:
        raise item
