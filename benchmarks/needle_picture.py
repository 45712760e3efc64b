"""Plots needle results by depth and length: figures kept, and KL at them, with a panel per method.

    python -m benchmarks.generate_questions single_needle,tokens=2000,depth=50,n=4 ... --out made.json
    ragblend bench quality --data made.json --output needles
    python -m benchmarks.needle_picture --results needles --out docs/pictures/needle.png

Green is full prefill: all figures kept, and no divergence at them.
"""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from benchmarks.common import read_json, run
from ragblend.measuring.plots import new_figure
from ragblend.measuring.variants import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TASK = re.compile(r"^\w+ ([\d,]+) at (\d+)%$")
MAX_KL = 0.2  # the reddest colour, in nats
Row = dict[str, Any]
Cells = dict[tuple[int, int], Row]  # by tokens and depth


def panels(tasks: list[Row]) -> dict[str, Cells]:
    """The cells by method and ratio, without full prefill. Raises ValueError if no task has a depth."""
    found: dict[str, Cells] = {}
    for row in tasks:
        place = TASK.match(row["task"])
        if place is None or row["method"] == "full" or not row["figures_n"]:
            continue
        name = label(row["method"], row["ratio"])
        tokens, depth = (int(each.replace(",", "")) for each in place.groups())
        found.setdefault(name, {})[tokens, depth] = row
    if not found:
        raise ValueError(
            "these results have no task such as `single_needle 2,000 at 50%` that full prefill does"
        )
    return found


def draw(title: str, found: dict[str, Cells]) -> "Figure":
    """Draw a panel per method: lengths from left to right, depths from top to bottom."""
    lengths = sorted({tokens for cells in found.values() for tokens, _ in cells})
    depths = sorted({depth for cells in found.values() for _, depth in cells})
    columns = min(len(found), 4)
    lines = -(-len(found) // columns)
    figure = new_figure(2.6 * columns, 0.6 + 2.3 * lines)
    axes = figure.subplots(lines, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axis in axes[len(found) :]:
        axis.set_visible(False)
    for axis, (name, cells) in zip(axes, found.items(), strict=False):
        _draw_panel(axis, cells, lengths, depths)
        axis.set_title(name, fontsize=9)
    figure.supxlabel("tokens of the passages", fontsize=8)
    figure.supylabel("depth of the needle, %", fontsize=8)
    figure.suptitle(title, fontsize=9)
    return figure


def _draw_panel(axis: "Axes", cells: Cells, lengths: list[int], depths: list[int]) -> None:
    colours = [
        [cells[at]["figure_kl"] if (at := (length, depth)) in cells else float("nan") for length in lengths]
        for depth in depths
    ]
    axis.imshow(colours, cmap="RdYlGn_r", vmin=0, vmax=MAX_KL, aspect="auto")
    for (length, depth), row in cells.items():
        kept = f"{round(row['figures_kept'] * row['figures_n'])}/{row['figures_n']}"
        axis.text(lengths.index(length), depths.index(depth), kept, ha="center", va="center", fontsize=7)
    axis.set_xticks(range(len(lengths)), [f"{each:,}" for each in lengths], fontsize=7)
    axis.set_yticks(range(len(depths)), [str(each) for each in depths], fontsize=7)


def main(
    results: Annotated[Path, typer.Option(help="The bench's output folder.")],
    out: Annotated[Path, typer.Option(help="The picture to write.")],
) -> None:
    """Draw the results of one run of the bench."""
    found = read_json(results / "quality.json")
    model = Path(found["environment"]["model"]).name
    title = f"{model}: figures kept of those full prefill gives, coloured by KL at them"
    draw(title, panels(found["tasks"])).savefig(out, dpi=100, metadata={"Software": None})


if __name__ == "__main__":
    run(main, __doc__)
