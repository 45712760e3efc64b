"""Plots of measured rows, drawn without a display."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.measuring.records import CACHE_LABELS, Row
from ragblend.measuring.variants import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PART_COLOURS = {
    "retrieve": "#c7c7c7",
    "stall": "#d62728",
    "move": "#ff7f0e",
    "select": "#9467bd",
    "compute": "#1f77b4",
    "first_token": "#2ca02c",
}


def plot_quality(rows: Sequence[Row], title: str, path: Path) -> None:
    """Left: KL by method with its interval, the lowest first; right: KL against time to first token."""
    figure = new_figure(14.0, max(5.0, 0.3 * len(rows) + 1.5))
    left, right = figure.subplots(1, 2)
    _draw_divergence(left, sorted(rows, key=lambda row: row["kl"]))
    _draw_trade_off(right, rows)
    set_title(figure, title)
    figure.savefig(path, dpi=120)


def _draw_divergence(axes: "Axes", rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        low, high = row["kl_ci"] or (row["kl"], row["kl"])
        axes.plot([low, high], [place, place], color=colour(row["method"]), linewidth=2)
        axes.plot([row["kl"]], [place], marker="o", color=colour(row["method"]))
    axes.set_yticks(range(len(rows)), [label(row["method"], row["ratio"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("KL(full || method), nats a token, with 95% interval")
    axes.grid(axis="x", alpha=0.3)


def _draw_trade_off(axes: "Axes", rows: Sequence[Row]) -> None:
    # `naive` is so far off that all others would be one spot; the left panel shows it.
    # Full prefill may have been timed in an earlier run.
    rows = [row for row in rows if row["ttft_ms"] is not None]
    rows = [row for row in rows if row["method"] != "naive"] or rows
    front = pareto(rows)
    times, divergences = ([row[name] for row in front] for name in ("ttft_ms", "kl"))
    axes.step(times, divergences, where="post", color="#999999", zorder=1)
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [(row["ttft_ms"], row["kl"]) for row in rows if row["method"] == method]
        axes.scatter(*zip(*points, strict=True), color=colour(method), label=method)
    for row in rows:
        axes.annotate(
            "" if row["ratio"] is None else f"{100 * row['ratio']:g}%",
            (row["ttft_ms"], row["kl"]),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=7,
            color=colour(row["method"]),
            weight="bold" if row in front else "normal",
        )
    axes.set_xlabel("milliseconds to the first token (median)")
    axes.set_ylabel("KL(full || method), nats a token")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The Pareto front: rows that no other row beats in both time and divergence, the fastest first."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["ttft_ms"], row["kl"])):
        if not front or row["kl"] < front[-1]["kl"]:
            front.append(row)
    return front


def plot_ttft(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw one panel per (chunks, tokens, cache): stacked bars of the parts of the time to the first token."""
    cases: dict[tuple[int, int, str], list[Row]] = {}
    for row in rows:
        cases.setdefault((row["chunks"], row["tokens"], row["cache"]), []).append(row)
    figure = new_figure(9.0, 1.2 + sum(0.7 + 0.3 * len(own) for own in cases.values()))
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, (case, own) in zip(panels, cases.items(), strict=True):
        _draw_bars(axes, own)
        axes.set_title(f"{case[0]} chunks of {case[1]} tokens, {CACHE_LABELS[case[2]]}", fontsize=9)
    panels[-1].set_xlabel(
        "milliseconds to the first token (loading overlaps with computing; only the stall counts)"
    )
    panels[0].legend(fontsize=8, ncols=len(PART_COLOURS), loc="lower right", bbox_to_anchor=(1, 1.15))
    set_title(figure, title)
    figure.savefig(path, dpi=120)


def _draw_bars(axes: "Axes", rows: Sequence[Row]) -> None:
    ends = [0.0] * len(rows)
    for part, colour in PART_COLOURS.items():
        widths = [(row["where_ms"] | {"retrieve": row["retrieve_ms"] or 0.0})[part] for row in rows]
        axes.barh(range(len(rows)), widths, left=ends, color=colour, label=part.replace("_", " "))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, row in enumerate(rows):
        text = f" {row['ttft_ms']:.0f} ms" + (f", {row['speedup']:.1f}x" if row["speedup"] else "")
        axes.text(ends[place], place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [label(row["method"], row["ratio"]) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(ends))


def new_figure(width: float, height: float) -> "Figure":
    """A figure with its own canvas; width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # pyplot would keep every figure alive, and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def set_title(figure: "Figure", title: str) -> None:
    """Set a title, wrapped to the figure's width."""
    figure.suptitle(textwrap.fill(title, int(13 * figure.get_figwidth())), fontsize=9)


def colour(method: str) -> Any:
    """A method's colour, which depends on its place in the engine's table and is the same in every plot."""
    from matplotlib import colormaps

    from ragblend.engine.selection import METHODS

    places = {name: place for place, name in enumerate(METHODS)}
    return colormaps["tab20"](places.get(method.partition(":")[0], len(places)) % 20)
