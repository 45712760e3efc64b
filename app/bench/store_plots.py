"""`bench store`'s rows as a picture, drawn without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
# Colour and line, so that a policy looks the same in every panel.
STYLES = {
    "lru": ("#7f7f7f", "-"),
    "lfu": ("#bcbd22", "-"),
    "gdsf": ("#1f77b4", "-"),
    "gdsf-size": ("#17becf", "-"),
    "pgdsf": ("#d62728", "-"),
    "fading": ("#ff7f0e", "-"),
    "fading-hits": ("#9467bd", "-"),
    "oracle": ("#222222", "--"),
}
OTHER_STYLE = ("#2ca02c", "-")


def plot_store(rows: Sequence[Row], title: str, path: Path) -> None:
    """Hit rate against budget, one line a policy with its 95% band; a column of panels a trace, a row a top-k."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys(row["trace"] for row in rows))
    depths = list(dict.fromkeys(row["top_k"] for row in rows))
    figure = Figure(figsize=(3.2 * len(kinds) + 1, 2.7 * len(depths) + 1), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(depths), len(kinds), squeeze=False, sharex=True, sharey=True)
    for down, top_k in enumerate(depths):
        for right, kind in enumerate(kinds):
            axes = panels[down][right]
            _draw(axes, [row for row in rows if (row["trace"], row["top_k"]) == (kind, top_k)])
            axes.set_title(f"{kind}, top-{top_k}", fontsize=9)
    for axes in panels[-1]:
        axes.set_xlabel("budget, % of the corpus")
    for axes in panels[:, 0]:
        axes.set_ylabel("hit rate (documents)")
    panels[0][0].legend(fontsize=7)
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=110)


def _draw(axes: "Axes", rows: Sequence[Row]) -> None:
    for policy in dict.fromkeys(row["policy"] for row in rows):
        points = [row for row in rows if row["policy"] == policy]
        colour, line = STYLES.get(policy, OTHER_STYLE)
        budgets = [row["budget"] for row in points]
        bands = [row["hit_rate_ci"] or (row["hit_rate"], row["hit_rate"]) for row in points]
        axes.plot(budgets, [row["hit_rate"] for row in points], line, color=colour, label=policy, marker=".")
        lower, upper = zip(*bands, strict=True)
        axes.fill_between(budgets, lower, upper, color=colour, alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["budget"] for row in points], [str(row["budget"]) for row in points])
    axes.grid(alpha=0.3)
