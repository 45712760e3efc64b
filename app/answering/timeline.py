"""Writes a prefill's trace to a file: Chrome's trace JSON, or a picture with a bar per thread or stream."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.extras import check_installed
from ragblend.engine.trace import Trace, TraceEvent
from ragblend.kvstore.errors import RagBlendError, UsageError
from ragblend.measuring.plots import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes


SUFFIXES = (".json", ".png")
MICROSECONDS_PER_MS = 1000
PART_COLOURS = {
    "lookup": "#c7c7c7",
    "prepare": "#7f7f7f",
    "load": "#2ca02c",
    "copy": "#17becf",
    "compute": "#1f77b4",
    "probe": "#aec7e8",
    "select": "#9467bd",
    "head": "#8c564b",
    "move": "#ff7f0e",
    "stall": "#d62728",
}
NESTED = (
    "stall",
    "move",
)  # these happen during a layer's `compute` or `probe`, so they are drawn on top of it, less high


class TimelineError(RagBlendError):
    """A trace could not be written."""


def check_timeline(path: Path) -> None:
    """Raise UsageError for an unknown file format or a folder that does not exist, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"a trace is written as .json (open it in ui.perfetto.dev) or .png (a picture), not as {path.name!r}"
        )
    if path.suffix.lower() == ".png":
        check_installed("Pictures", ("matplotlib",), "bench")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"writing the trace to {path}: there is no such folder; name another file")


def write_timeline(trace: Trace, title: str, path: Path) -> None:
    """Write the trace in the format of the file's suffix. Raises UsageError, TimelineError."""
    check_timeline(path)
    try:
        if path.suffix.lower() == ".json":
            path.write_text(json.dumps(chrome_trace(trace)), encoding="utf-8")
        else:
            draw_timeline(trace, title, path)
    except OSError as error:
        raise TimelineError(f"writing the trace to {path}: {error.strerror}; name another file") from error


def chrome_trace(trace: Trace) -> dict[str, Any]:
    """The trace for chrome://tracing and ui.perfetto.dev (Trace Event Format: complete events, in microseconds)."""
    numbers = {track: number for number, track in enumerate(trace.tracks)}
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": track}}
        for track, number in numbers.items()
    ]
    events = [_chrome_event(event, numbers) for event in trace.events]
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _chrome_event(event: TraceEvent, numbers: dict[str, int]) -> dict[str, Any]:
    arguments = {"layer": event.layer, "chunk": event.chunk}
    return {
        "name": event.part if event.layer is None else f"{event.part} {event.layer}",
        "cat": event.part,
        "ph": "X",
        "ts": round(event.start_ms * MICROSECONDS_PER_MS, 1),
        "dur": round(event.duration_ms * MICROSECONDS_PER_MS, 1),
        "pid": 1,
        "tid": numbers[event.track],
        "args": {name: value for name, value in arguments.items() if value is not None},
    }


def draw_timeline(trace: Trace, title: str, path: Path) -> None:
    """Draw a bar per thread or stream with a block per event; layers are numbered where there is room."""
    tracks = trace.tracks
    figure = new_figure(12.0, 1.6 + 0.55 * len(tracks))
    axes = figure.subplots()
    for number, track in enumerate(tracks):
        _draw_track(axes, trace, track, number)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the prefill began; numbers are layers")
    axes.set_title(title, fontsize=10)
    axes.margins(x=0.01)
    handles = [axes.barh([0], [0], color=colour) for colour in PART_COLOURS.values()]
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.28)}
    axes.legend(handles, PART_COLOURS, fontsize=8, ncols=len(PART_COLOURS), **below)
    figure.savefig(path, dpi=120)


def _draw_track(axes: "Axes", trace: Trace, track: str, number: int) -> None:
    for part, colour in PART_COLOURS.items():  # NESTED parts are last, so they are drawn on top
        events = [event for event in trace.events if event.track == track and event.part == part]
        height = 0.35 if part in NESTED else 0.8
        spans = [(event.start_ms, event.duration_ms) for event in events]
        vertical_span = (number - height / 2, height)
        axes.broken_barh(spans, vertical_span, color=colour, edgecolor="white", linewidth=0.3)
    end_ms = max((event.stop_ms for event in trace.events), default=0.0)
    for event in trace.events:
        has_room = event.track == track and event.part == "compute" and event.duration_ms > end_ms / 60
        if has_room and event.layer is not None:
            style: dict[str, Any] = {"fontsize": 6, "color": "white", "ha": "center", "va": "center"}
            axes.text(event.start_ms + event.duration_ms / 2, number - 0.28, str(event.layer), **style)
