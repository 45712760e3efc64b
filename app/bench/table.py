"""Rows as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
MEBIBYTE = 1 << 20
FEWEST_PROMPTS = 60  # design.md section 8
UNDEFINED = "–"


def print_quality(
    console: Console, rows: Sequence[Row], comparisons: Sequence[Row], tasks: Sequence[Row] = ()
) -> None:
    """The rows, the tasks, the comparisons, and a warning where there are too few prompts to settle anything."""
    console.print(_quality_table(rows))
    if tasks:
        console.print(_task_table(tasks))
    if comparisons:
        console.print(_comparison_table(comparisons))
        if any(row["same_cost"] is False for row in comparisons):
            console.print(
                "* not at one cost: their mean shares of recomputed tokens are more than a point apart"
            )
    for row in rows:
        if row["unscored"]:
            share = _share(row["unscored"] / row["calls"])
            console.print(f"[yellow]{row['method']}: {share} of its answers came without a score.[/yellow]")
    count = min((row["n"] for row in rows), default=0)
    if count < FEWEST_PROMPTS:
        console.print(f"[yellow]{count} prompts settle nothing; measure {FEWEST_PROMPTS} or more.[/yellow]")


def _quality_table(rows: Sequence[Row]) -> Table:
    table = _table(
        "Quality against full prefill (intervals: 95%)",
        [
            "method",
            "ratio",
            "n",
            "KL",
            "interval",
            "top-1",
            "same answer",
            "gold",
            "exact",
            "F1",
            "ROUGE-L",
            "recovery",
        ],
    )
    for name in ("TTFT ms", "speed-up", "spent", "tokens read", "said"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["method"],
            _share(row["ratio"]),
            str(row["n"]),
            _number(row["kl"], 4),
            _interval(row["kl_ci"]) or UNDEFINED,
            *(_share(row[name]) or UNDEFINED for name in ("top1", "exact_match", "gold_match", "accuracy")),
            *(_number(row[name], 3) for name in ("f1", "rouge_l")),
            _share(row["recovery"]) or UNDEFINED,
            _number(row["ttft_ms"], 0),
            f"{row['speedup']:.1f}x",
            _share(row["recomputed_fraction"]) or UNDEFINED,
            *(_number(row[name], 0) for name in ("prompt_tokens", "generated_tokens")),
        )
    return table


def _task_table(tasks: Sequence[Row]) -> Table:
    table = _table("By task", ["task", "method", "ratio", "n", "KL", "exact", "found", "F1"])
    for row in tasks:
        table.add_row(
            row["task"],
            row["method"],
            _share(row["ratio"]),
            str(row["n"]),
            _number(row["kl"], 4),
            *(_share(row[name]) or UNDEFINED for name in ("accuracy", "found")),
            _number(row["f1"], 3),
        )
    return table


def _comparison_table(comparisons: Sequence[Row]) -> Table:
    table = _table(
        "In pairs, on the same prompts (a negative KL difference is better)",
        [
            "method",
            "ratio",
            "against",
            "ratio",
            "KL difference",
            "interval",
            "KL ratio",
            "interval",
            "nearer on",
            "verdict",
        ],
    )
    for row in comparisons:
        table.add_row(
            row["method"],
            _share(row["ratio"]),
            row["against"],
            _share(row["against_ratio"]),
            f"{row['kl_difference']:+.4f}",
            _interval(row["kl_difference_ci"]),
            _number(row["kl_ratio"], 3),
            _interval(row["kl_ratio_ci"]),
            _share(row["nearer_on"]),
            f"{row['verdict']}{' *' if row['same_cost'] is False else ''}",
        )
    return table


PLACES = {"warm": "warm disk", "cold": "cold disk", "memory": "KV in memory"}


def print_ttft(console: Console, rows: Sequence[Row]) -> None:
    """One table a (chunks, tokens, cache): the medians, and where the time went."""
    for case in dict.fromkeys((row["chunks"], row["tokens"], row["cache"]) for row in rows):
        chunks, tokens, cache = case
        console.print(
            _ttft_table(
                f"{chunks} chunks of {tokens} tokens, {PLACES[cache]} (milliseconds, medians)",
                [row for row in rows if (row["chunks"], row["tokens"], row["cache"]) == case],
            )
        )


def _ttft_table(title: str, rows: Sequence[Row]) -> Table:
    columns = [
        "method",
        "ratio",
        "TTFT",
        "predicted",
        "speed-up",
        "retrieve",
        "load",
        "stall",
        "move",
        "select",
        "compute",
    ]
    table = _table(title, [*columns, "first token", "peak MiB", "of fused KV"])
    for row in rows:
        where = row["where_ms"]
        table.add_row(
            row["method"],
            _share(row["ratio"]),
            f"{row['ttft_ms']:.0f}",
            "" if row.get("predicted_ttft_ms") is None else f"{row['predicted_ttft_ms']:.0f}",
            "" if row["speedup"] is None else f"{row['speedup']:.1f}x",
            "" if row["retrieve_ms"] is None else f"{row['retrieve_ms']:.1f}",
            f"{row['load_ms']:.1f}",
            *(f"{where[name]:.1f}" for name in ("stall", "move", "select", "compute", "first_token")),
            "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / MEBIBYTE:.0f}",
            "" if row["peak_of_fused_kv"] is None else f"{row['peak_of_fused_kv']:.2f}x",
        )
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for name in columns:
        table.add_column(
            name, justify="left" if name in ("task", "method", "against", "verdict") else "right"
        )
    return table


def _number(value: float | None, digits: int) -> str:
    return UNDEFINED if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}%"


def _interval(value: tuple[float, float] | None) -> str:
    return "" if value is None else f"{value[0]:.4f} to {value[1]:.4f}"
