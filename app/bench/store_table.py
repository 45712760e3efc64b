"""`bench store`'s rows as tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]


def print_store(console: Console, results: dict[str, Any]) -> None:
    """A table of outcomes a trace, then how the hit rates compare, then where the milliseconds come from."""
    rows, comparisons = results["rows"], results["comparisons"]
    for trace in dict.fromkeys(row["trace"] for row in rows):
        console.print(_outcomes(trace, [row for row in rows if row["trace"] == trace]))
    for policy in dict.fromkeys(row["policy"] for row in comparisons):
        console.print(_comparisons(policy, [row for row in comparisons if row["policy"] == policy]))
    console.print(f"Times are simulated. Prefill: {results['settings']['profile']['about']}.")


def print_overhead(console: Console, row: Row) -> None:
    """What `bench store --overhead` measured; what misses its target is red."""
    from ragblend.app.bench.store_overhead import TARGETS

    title = f"{row['chunks']:,} chunks, {row['requests']} requests of 6: median, 99th percentile, target"
    table = Table(title=title, title_justify="left")
    for name in ("what", "median", "p99", "target"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for name, found in row.items():
        if isinstance(found, dict):
            median, target = found["median"], TARGETS.get(name)
            cell = f"{median:,}" if target is None or median <= target else f"[red]{median:,}[/red]"
            table.add_row(name, cell, f"{found['p99']:,}", "" if target is None else f"{target:,}")
    table.add_row("index_mb", f"{row['index_mb']}", "", f"{TARGETS['index_mb']}")
    console.print(table)


def _outcomes(trace: str, rows: Sequence[Row]) -> Table:
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    table = Table(title=f"{trace}: hit rate, byte hit rate, simulated mean TTFT in ms", title_justify="left")
    for name in ("top-k", "budget", *policies):
        table.add_column(name, justify="right")
    for case in dict.fromkeys((row["top_k"], row["budget"]) for row in rows):
        found = {row["policy"]: row for row in rows if (row["top_k"], row["budget"]) == case}
        cells = [_outcome(found[policy]) if policy in found else "" for policy in policies]
        table.add_row(str(case[0]), f"{case[1]}%", *cells)
    return table


def _outcome(row: Row) -> str:
    return f"{100 * row['hit_rate']:.1f} {100 * row['byte_hit_rate']:.1f} {row['ttft_ms']:.0f}"


def _comparisons(policy: str, rows: Sequence[Row]) -> Table:
    """Columns: against which; rows: traces and budgets. What misses its target is red."""
    against = {row["against"]: row["target"] for row in rows}
    table = Table(
        title=f"{policy}: hit rate as a multiple, mean and 95% interval over top-k and seeds",
        title_justify="left",
    )
    for name in ("trace", "budget", *(f"of {name} (target {target:g})" for name, target in against.items())):
        table.add_column(name, justify="right")
    for case in dict.fromkeys((row["trace"], row["budget"]) for row in rows):
        found = {row["against"]: row for row in rows if (row["trace"], row["budget"]) == case}
        table.add_row(case[0], f"{case[1]}%", *(_ratio(found[name]) for name in against))
    return table


def _ratio(row: Row) -> str:
    interval = row["ratio_ci"]
    text = f"{row['ratio']:.3f}" + (f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else "")
    return text if row["holds"] else f"[red]{text}[/red]"
