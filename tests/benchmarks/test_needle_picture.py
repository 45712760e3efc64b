"""The needle picture: a panel per method, a cell per length and depth."""

import pytest

from benchmarks.needle_picture import draw, panels


def row(method, task, kept=1.0, kl=0.1, ratio=None, n=4):
    return {
        "method": method, "ratio": ratio, "task": task, "figures_n": n, "figures_kept": kept, "figure_kl": kl,
    }  # fmt: skip


def test_one_panel_per_method_and_one_cell_per_place() -> None:
    tasks = [
        row("full", "single_needle 1,000 at 0%"),
        row("epic", "single_needle 1,000 at 0%", 0.75, ratio=0.15),
        row("epic", "single_needle 2,000 at 50%", ratio=0.15),
        row("reuse", "single_needle 2,000 at 50%"),
        row("reuse", "multi_key 2,000"),
        row("reuse", "single_needle 2,000 at 100%", n=0),
    ]
    found = panels(tasks)
    assert {name: sorted(cells) for name, cells in found.items()} == {
        "epic 15%": [(1000, 0), (2000, 50)],
        "reuse": [(2000, 50)],
    }
    figure = draw("a title", found)
    words = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert sorted(words) == ["3/4", "4/4", "4/4"]


def test_results_without_depths_are_refused() -> None:
    with pytest.raises(ValueError, match="no task such as"):
        panels([row("epic", "multi_key 2,000", ratio=0.15)])
