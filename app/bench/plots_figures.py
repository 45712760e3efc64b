"""CacheBlend's Figures 6 to 8 (EuroSys'25, section 4) from this model's own measurements."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.plots import colour, entitle, figure_of
from ragblend.app.cli_common import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Numbers = dict[str, Any]
FIRST_LAYER = 1  # layer 0 sees the token alone, so nothing deviates there but by rounding


def plot_figures(numbers: Numbers, title: str, folder: Path) -> dict[str, Path]:
    """One PNG for each figure that there are numbers for; its path by its name."""
    draw: dict[str, Callable[[Axes, Any], None]] = {
        "attention_deviation": _attention_deviation,
        "kv_deviation_quantiles": _kv_deviation,
        "rank_correlations": _rank_correlation,
    }
    written = {}
    for name, drawn in draw.items():
        if numbers.get(name):
            written[name] = folder / f"{name.removesuffix('s').removesuffix('_quantile')}.png"
            figure = figure_of(7.0, 4.2)
            drawn(figure.subplots(), numbers[name])
            entitle(figure, f"{title}, {plural(numbers['prompts'], 'prompt')}")
            figure.savefig(written[name], dpi=120)
    return written


def _attention_deviation(axes: "Axes", points: Sequence[Numbers]) -> None:
    """Figure 6: it falls as more is recomputed, fastest where the right tokens are."""
    levels = [point for point in points if point["ratio"] is None]
    for method in dict.fromkeys(point["method"] for point in points if point["ratio"] is not None):
        own = [(p["ratio"], p["value"]) for p in points if p["method"] == method]
        axes.plot(*zip(*sorted(own), strict=True), marker="o", color=colour(method), label=method)
    for point in levels:
        style = {"color": colour(point["method"]), "linestyle": "--", "label": point["method"]}
        axes.axhline(point["value"], **style)
    axes.set_xlabel("share of the stored tokens that is recomputed, selection included")
    axes.set_ylabel("attention deviation of the last rows")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _kv_deviation(axes: "Axes", quantiles: dict[str, Sequence[float]]) -> None:
    """Figure 7: most tokens deviate little, a few a lot."""
    for layer, values in quantiles.items():
        parts = [place / (len(values) - 1) for place in range(len(values))]
        axes.plot(values, parts, label=f"layer {layer}")
    axes.set_xlabel("KV deviation of a token, relative to the layer's mean")
    axes.set_ylabel("share of the tokens below it")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _rank_correlation(axes: "Axes", prompts: Sequence[Sequence[float | None]]) -> None:
    """Figure 8: a token that deviates much in one layer does so in the next."""
    for number, values in enumerate(prompts):
        points = [(place, value) for place, value in enumerate(values) if value is not None]
        label = "one prompt" if number == 0 else None
        axes.plot(*zip(*points, strict=True), color="#1f77b4", alpha=0.35, linewidth=1, label=label)
    columns = [[value for value in column if value is not None] for column in zip(*prompts, strict=True)]
    places = [place for place, column in enumerate(columns) if column]
    means = [sum(columns[place]) / len(columns[place]) for place in places]
    axes.plot(places, means, color="#d62728", marker="o", markersize=3, label="mean")
    count = len(columns)
    shown = list(range(0, count, max(1, -(-count // 8))))
    axes.set_xticks(shown, [f"{FIRST_LAYER + place}–{FIRST_LAYER + place + 1}" for place in shown])
    axes.set_xlabel("neighbouring layers")
    axes.set_ylabel("Spearman's rank correlation of KV deviation")
    axes.set_ylim(top=1)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
