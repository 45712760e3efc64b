"""What ran when during one prefill, as a picture: a row a thread or stream, a block an event. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ragblend.ui.render_text import attributes, escape, milliseconds

if TYPE_CHECKING:
    from ragblend.app.hood import Event

PARTS = ("lookup", "prepare", "load", "copy", "compute", "select", "head", "move", "stall")
NESTED = ("stall", "move")  # inside a layer's compute, so they are drawn over it, and lower
WIDTH, ROW, HEAD, LEFT = 380.0, 26.0, 4.0, 60.0
MOST_EVENTS = 3000  # a long context on a deep model has tens of thousands: too many for a page
TICKS = 4


def timeline(events: Sequence["Event"]) -> str:
    """The picture with its legend and, for screen readers, the sums."""
    if not events:
        return '<p class="rb-empty">No timeline: nothing was fused in this answer.</p>'
    shown = longest(events, MOST_EVENTS)
    end = max(event.start_ms + event.duration_ms for event in events)
    tracks = ordered_tracks(events)
    height = HEAD + ROW * len(tracks) + 18
    scale = (WIDTH - LEFT - 8) / max(end, 1e-6)
    rows = "".join(_row(name, number, shown, scale) for number, name in enumerate(tracks))
    label = f"{milliseconds(end)} of prefill. " + "; ".join(sums(events))
    left_out = len(events) - len(shown)
    note = f'<p class="rb-small">{left_out:,} short events are not drawn.</p>' if left_out else ""
    return (
        f'<div class="scroll"><svg class="rb-timeline" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img"'
        f"{attributes(aria_label=label)}>{_axis(end, scale, height)}{rows}</svg></div>{_legend(events)}{note}"
    )


def longest(events: Sequence["Event"], most: int) -> list["Event"]:
    """The longest events, in their order; all of them if they are few enough."""
    if len(events) <= most:
        return list(events)
    least = sorted((event.duration_ms for event in events), reverse=True)[most - 1]
    return [event for event in events if event.duration_ms >= least][:most]


def ordered_tracks(events: Sequence["Event"]) -> list[str]:
    """Threads and streams, the computing ones first."""
    order = {"device": 0, "host": 1, "copy": 2}
    return sorted({event.track for event in events}, key=lambda track: (order.get(track, 3), track))


def sums(events: Sequence["Event"]) -> list[str]:
    """`load 60 ms`, part by part: what all events of a part add up to."""
    totals = {part: sum(e.duration_ms for e in events if e.part == part) for part in PARTS}
    return [f"{part} {milliseconds(total)}" for part, total in totals.items() if total]


def _row(name: str, number: int, events: Sequence["Event"], scale: float) -> str:
    top = HEAD + number * ROW
    own = [event for event in events if event.track == name]
    below = [event for event in own if event.part not in NESTED]
    above = [event for event in own if event.part in NESTED]
    blocks = "".join(_block(event, top, scale) for event in (*below, *above))
    shown = track_label(name)
    return f'<text class="track" x="0" y="{top + 16:.0f}">{escape(shown)}</text>{blocks}'


def track_label(name: str) -> str:
    """The loader's threads by number; others as they are, cut."""
    if name.startswith("ragblend-"):
        name = name.removeprefix("ragblend-").replace("_", " ")
    return name if len(name) <= 9 else name[:8] + "…"


def _block(event: "Event", top: float, scale: float) -> str:
    nested = event.part in NESTED
    height, shift = (8, 7) if nested else (20, 1)
    what = event.part if event.layer is None else f"{event.part}, layer {event.layer}"
    if event.chunk is not None:
        what += f", passage {event.chunk + 1}"
    x, width = LEFT + event.start_ms * scale, max(0.4, event.duration_ms * scale)
    part = event.part if event.part in PARTS else "other"
    return (
        f'<rect class="p-{part}" x="{x:.2f}" y="{top + shift:.0f}" width="{width:.2f}" height="{height}">'
        f"<title>{escape(what)}: {milliseconds(event.duration_ms)}</title></rect>"
    )


def _axis(end: float, scale: float, height: float) -> str:
    made = []
    for tick in range(TICKS + 1):
        at = end * tick / TICKS
        x = LEFT + at * scale
        anchor = "start" if tick == 0 else "end" if tick == TICKS else "middle"
        made.append(
            f'<line class="grid" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height - 16:.0f}"/>'
            f'<text class="tick" x="{x:.1f}" y="{height - 4:.0f}" '
            f'text-anchor="{anchor}">{milliseconds(at) if at else "0"}</text>'
        )
    return "".join(made)


def _legend(events: Sequence["Event"]) -> str:
    present = {event.part for event in events}
    items = "".join(f'<li><i class="p-{part}"></i>{part}</li>' for part in PARTS if part in present)
    return f'<ul class="rb-legend">{items}</ul>'
