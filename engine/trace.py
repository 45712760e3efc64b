"""Traces a prefill: the times of reading, rotating, waiting and computing, on host threads and device streams.

The recorder is always on: an event costs a few microseconds, and a prefill has a few hundred. Device times are taken on
its streams, so a trace shows whether copies really ran in parallel with the layers.
"""

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import starmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragblend.engine.model.device import TransferStream

HOST = "host"  # the track of the computing thread


@dataclass(frozen=True)
class TraceEvent:
    """One step of a prefill.

    part: `lookup` (of stored chunks), `load`, `copy` (to the device, rotated), `move` (rotating), `stall` (waiting),
    `prepare` (embedding, rotary tables, masks), `compute` (a layer; on the CPU its stall and move are inside), `probe`
    (a layer of the probe), `select` or `head`. start_ms counts from the beginning of the prefill;
    chunk is its number in the prompt, from 0.
    """

    part: str
    track: str
    start_ms: float
    duration_ms: float
    layer: int | None = None
    chunk: int | None = None

    @property
    def stop_ms(self) -> float:
        return self.start_ms + self.duration_ms


@dataclass(frozen=True)
class Trace:
    """The events of one prefill, by start time."""

    events: tuple[TraceEvent, ...] = ()

    @property
    def tracks(self) -> tuple[str, ...]:
        """Threads and streams, those that compute first."""
        order = {"device": 0, HOST: 1, "copy": 2}
        return tuple(sorted({event.track for event in self.events}, key=lambda t: (order.get(t, 3), t)))

    def total_ms(self, part: str) -> float:
        """The time of all events of that part, on all tracks."""
        return sum(event.duration_ms for event in self.events if event.part == part)

    def busy_ms(self, *parts: str) -> float:
        """The time in which at least one event of these parts was running."""
        total, reached = 0.0, -math.inf
        for event in self.events:  # by start
            if event.part in parts:
                total += max(0.0, event.stop_ms - max(event.start_ms, reached))
                reached = max(reached, event.stop_ms)
        return total


class Recorder:
    """Collects the events of one prefill; safe for threads. Create it in the computing thread."""

    def __init__(self, transfers: "TransferStream", begun: float | None = None) -> None:
        self._transfers = transfers
        self._begun = time.perf_counter() if begun is None else begun
        self._owner = threading.get_ident()
        self._found: list[tuple[bool, TraceEvent]] = []  # times are stamps; appending is atomic
        transfers.begin_clock()

    @contextmanager
    def part(
        self, name: str, layer: int | None = None, chunk: int | None = None, stream: str = ""
    ) -> Iterator[None]:
        """Record work of the host; stream: work that is queued on that stream of the device, if it has streams."""
        streamed = bool(stream) and self._transfers.staged
        host = HOST if threading.get_ident() == self._owner else threading.current_thread().name
        start = self._stamp(streamed)
        try:
            yield
        finally:
            event = TraceEvent(name, stream if streamed else host, start, self._stamp(streamed), layer, chunk)
            self._found.append((streamed, event))

    def finish(self) -> Trace:
        """The trace; call it after `TransferStream.synchronize`."""
        events = sorted(
            starmap(self._timed, self._found), key=lambda event: (event.start_ms, -event.duration_ms)
        )
        return Trace(tuple(events))

    def _timed(self, streamed: bool, event: TraceEvent) -> TraceEvent:
        """The event with its stamps in milliseconds."""
        start, stop = event.start_ms, event.duration_ms
        if streamed:
            start, stop = self._transfers.time_of(start), self._transfers.time_of(stop)
        return replace(event, start_ms=(start - self._begun) * 1e3, duration_ms=(stop - start) * 1e3)

    def _stamp(self, streamed: bool) -> Any:
        return self._transfers.stamp() if streamed else time.perf_counter()
