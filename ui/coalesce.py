"""Pieces of text, gathered: a page that is told fifty times a second draws badly, and twenty times look the same."""

import queue
import threading
import time
from collections.abc import Iterable, Iterator

PAUSE_S = 0.05
SILENCE_S = 0.25
_END = object()


def coalesced(pieces: Iterable[str], pause_s: float = PAUSE_S, silence_s: float = SILENCE_S) -> Iterator[str]:
    """The same text in fewer pieces, at least pause_s apart; an empty piece where there was none for silence_s.

    The empty ones give the caller a chance to see that nobody listens any more. Errors of the source are raised after
    all that came before them. Read in a thread of its own, which ends with the source.
    """
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    threading.Thread(target=_pump, args=(pieces, arrived), name="ragblend-page-stream", daemon=True).start()
    while True:
        try:
            first = arrived.get(timeout=silence_s)
        except queue.Empty:
            yield ""
            continue
        gathered, end = _gather(first, arrived, time.monotonic() + pause_s)
        if gathered:
            yield gathered
        if end is _END:
            return
        if isinstance(end, BaseException):
            raise end


def _gather(first: object, arrived: "queue.SimpleQueue[object]", until: float) -> tuple[str, object]:
    """Text up to that moment, and what ended it: the end mark, an error, or None."""
    texts: list[str] = []
    item: object = first
    while isinstance(item, str):
        texts.append(item)
        try:
            item = arrived.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return "".join(texts), None
    return "".join(texts), item


def _pump(pieces: Iterable[str], arrived: "queue.SimpleQueue[object]") -> None:
    try:
        for piece in pieces:
            arrived.put(piece)
        arrived.put(_END)
    except BaseException as error:
        arrived.put(error)
