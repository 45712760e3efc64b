"""What one prefill did and when: reads, moves, waits and layers, on the host's threads and on the device's streams.

The recorder is always on: an event costs about two microseconds, and a prefill has a few hundred. Times on a device
are those of its streams, so a trace shows whether copies really ran beside the layers.
"""

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from ragblend.engine.device import TransferStream

HOST = "host"  # the track of the computing thread


@dataclass(frozen=True)
class TraceEvent:
    """One thing that was done.

    part: `lookup` (of stored chunks), `load`, `copy` (to the device, moved), `move`, `stall` (waiting for a load),
    `prepare` (embedding, rotary tables, masks), `compute` (a layer; on the CPU its stall and move lie inside), `probe`
    (the same, of rows that are run to choose), `select` or `head`. start_ms counts from the beginning of the prefill;
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
    """The events of one prefill, in the order of their beginnings."""

    events: tuple[TraceEvent, ...] = ()

    @property
    def tracks(self) -> tuple[str, ...]:
        """Threads and streams, the computing ones first."""
        order = {"device": 0, HOST: 1, "copy": 2}
        return tuple(sorted({event.track for event in self.events}, key=lambda t: (order.get(t, 3), t)))

    def total_ms(self, part: str) -> float:
        """All events of that part, added up over tracks."""
        return sum(event.duration_ms for event in self.events if event.part == part)


class Recorder:
    """Collects the events of one prefill; safe for threads. Made by the computing thread."""

    def __init__(self, transfers: "TransferStream", begun: float | None = None) -> None:
        self._transfers = transfers
        self._begun = time.perf_counter() if begun is None else begun
        self._owner = threading.get_ident()
        self._found: list[tuple[Any, ...]] = []  # appending is atomic
        transfers.begin_clock()

    def part(self, name: str, layer: int | None = None, chunk: int | None = None) -> "_Part":
        """A context manager around work of the host."""
        return _Part(self, name, self._host_track(), False, layer, chunk)

    def device_part(
        self, name: str, track: str, layer: int | None = None, chunk: int | None = None
    ) -> "_Part":
        """Around work that is given to the device, on the stream that is current; on the CPU the same as `part`."""
        streamed = self._transfers.staged
        return _Part(self, name, track if streamed else self._host_track(), streamed, layer, chunk)

    def finish(self) -> Trace:
        """The trace, once the device has done all it was given (`TransferStream.synchronize`)."""
        events = [self._event(*found) for found in self._found]
        return Trace(tuple(sorted(events, key=lambda event: (event.start_ms, -event.duration_ms))))

    def _event(
        self,
        part: str,
        track: str,
        start: Any,
        stop: Any,
        streamed: bool,
        layer: int | None,
        chunk: int | None,
    ) -> TraceEvent:
        if streamed:
            start, stop = self._transfers.time_of(start), self._transfers.time_of(stop)
        return TraceEvent(part, track, (start - self._begun) * 1e3, (stop - start) * 1e3, layer, chunk)

    def _host_track(self) -> str:
        return HOST if threading.get_ident() == self._owner else threading.current_thread().name

    def add(self, *found: Any) -> None:
        self._found.append(found)

    def stamp(self, streamed: bool) -> Any:
        return self._transfers.stamp() if streamed else time.perf_counter()


class _Part:
    """Notes its beginning and its end, also where an exception ends it. Slots, as there are hundreds a prefill."""

    __slots__ = ("_recorder", "_start", "_what")

    def __init__(
        self, recorder: Recorder, name: str, track: str, streamed: bool, layer: int | None, chunk: int | None
    ) -> None:
        self._recorder = recorder
        self._what = (name, track, streamed, layer, chunk)

    def __enter__(self) -> Self:
        self._start = self._recorder.stamp(self._what[2])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        name, track, streamed, layer, chunk = self._what
        stop = self._recorder.stamp(streamed)
        self._recorder.add(name, track, self._start, stop, streamed, layer, chunk)
