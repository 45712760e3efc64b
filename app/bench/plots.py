"""Rows as pictures, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]
# A method keeps its colour in every picture, whatever else is drawn beside it.
COLOURS = {
    "full": "#222222",
    "prefix": "#7f7f7f",
    "naive": "#bcbd22",
    "reuse": "#8c564b",
    "random": "#9467bd",
    "heads": "#17becf",
    "cacheblend": "#d62728",
    "cacheblend-k": "#ff7f0e",
    "cacheblend-gradual": "#1f77b4",
}
OTHER_COLOUR = "#2ca02c"
WHERE_COLOURS = {
    "retrieve": "#c7c7c7",
    "stall": "#d62728",
    "move": "#ff7f0e",
    "select": "#9467bd",
    "compute": "#1f77b4",
    "first_token": "#2ca02c",
}


def plot_quality(rows: Sequence[Row], title: str, path: Path) -> None:
    """Left: KL by method with intervals; right: KL against speed-up, one line a method through its ratios."""
    figure = _figure(12.0, max(4.0, 0.3 * len(rows) + 1.5))
    left, right = figure.subplots(1, 2)
    _draw_divergence(left, rows)
    _draw_trade_off(right, rows)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_divergence(axes: "Axes", rows: Sequence[Row]) -> None:
    for place, row in enumerate(rows):
        low, high = row["kl_ci"] or (row["kl"], row["kl"])
        axes.plot([low, high], [place, place], color=_colour(row["method"]), linewidth=2)
        axes.plot([row["kl"]], [place], marker="o", color=_colour(row["method"]))
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("KL(full || method), nats a token, with 95% interval")
    axes.grid(axis="x", alpha=0.3)


def _draw_trade_off(axes: "Axes", rows: Sequence[Row]) -> None:
    # Keys left where they lie are so far off that all others would be one spot; the left panel has them.
    rows = [row for row in rows if row["method"] != "naive"] or rows
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [row for row in rows if row["method"] == method]
        axes.plot(
            [row["speedup"] for row in points],
            [row["kl"] for row in points],
            marker="o",
            color=_colour(method),
            label=method,
        )
        for row in points:
            if row["ratio"] is not None:
                place = (row["speedup"], row["kl"])
                axes.annotate(
                    f"{100 * row['ratio']:g}%",
                    place,
                    xytext=(4, 4),
                    textcoords="offset points",
                    fontsize=7,
                    color=_colour(method),
                )
    axes.set_xlabel("speed-up of the first token (median of pairs)")
    axes.set_ylabel("KL(full || method), nats a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def plot_ttft(rows: Sequence[Row], title: str, path: Path) -> None:
    """One panel a (chunks, tokens, cache): stacked bars of where the time to the first token went."""
    cases = list(dict.fromkeys((row["chunks"], row["tokens"], row["cache"]) for row in rows))
    figure = _figure(9.0, 1.2 + sum(0.7 + 0.3 * len(_of_case(rows, case)) for case in cases))
    panels = figure.subplots(len(cases), 1, squeeze=False)[:, 0]
    for axes, case in zip(panels, cases, strict=True):
        _draw_bars(axes, _of_case(rows, case))
        axes.set_title(f"{case[0]} chunks of {case[1]} tokens, {case[2]} disk", fontsize=9)
    panels[-1].set_xlabel(
        "milliseconds to the first token (load runs beside the compute; what it costs is the stall)"
    )
    panels[0].legend(fontsize=8, ncols=len(WHERE_COLOURS), loc="lower right", bbox_to_anchor=(1, 1.15))
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=120)


def _draw_bars(axes: "Axes", rows: Sequence[Row]) -> None:
    ends = [0.0] * len(rows)
    for part, colour in WHERE_COLOURS.items():
        widths = [
            (row["retrieve_ms"] or 0.0) if part == "retrieve" else row["where_ms"][part] for row in rows
        ]
        axes.barh(range(len(rows)), widths, left=ends, color=colour, label=part.replace("_", " "))
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    for place, row in enumerate(rows):
        text = f" {row['ttft_ms']:.0f} ms" + (f", {row['speedup']:.1f}x" if row["speedup"] else "")
        axes.text(ends[place], place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [_label(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(ends))


def _of_case(rows: Sequence[Row], case: tuple[int, int, str]) -> list[Row]:
    return [row for row in rows if (row["chunks"], row["tokens"], row["cache"]) == case]


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A figure of its own canvas: pyplot would keep every figure alive, and look for a display.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _colour(method: str) -> str:
    return COLOURS.get(method, OTHER_COLOUR)


def _label(row: Row) -> str:
    return row["method"] if row["ratio"] is None else f"{row['method']} {100 * row['ratio']:g}%"
