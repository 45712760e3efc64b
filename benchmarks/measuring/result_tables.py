"""Formats rows as tables for the terminal and the HTML report."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import TYPE_CHECKING, Any

from ragblend.measuring.records import CACHE_LABELS, Row
from ragblend.measuring.variants import label

if TYPE_CHECKING:
    from rich.console import Console

MEBIBYTE = 1 << 20
MIN_PROMPTS = 60  # with fewer the report warns that they are too few
UNDEFINED = "–"
TEXT_COLUMNS = ("task", "method", "against", "verdict")


@dataclass(frozen=True)
class Cell:
    """A cell's text and, in the report, its CSS class and tooltip."""

    text: str
    kind: str = ""
    title: str = ""


@dataclass(frozen=True)
class Table:
    """A title, column names, rows of cells, and a note below them."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


Column = tuple[str, Callable[[Row], str]]


def table_of(title: str, columns: Sequence[Column], rows: Iterable[Row], note: str = "") -> Table:
    cells = [[Cell(show(row)) for _, show in columns] for row in rows]
    return Table(title, [name for name, _ in columns], cells, note)


def print_tables(console: "Console", tables: Iterable[Table]) -> None:
    """Print tables to a terminal, each with its note below."""
    from rich import table
    from rich.text import Text

    for each in tables:
        shown = table.Table(title=Text(each.title))
        for name in each.head:
            shown.add_column(Text(name), justify="left" if name in TEXT_COLUMNS else "right")
        for row in each.rows:
            shown.add_row(*(Text(cell.text) for cell in row))
        console.print(shown)
        if each.note:
            console.print(Text(each.note))


def number(name: str, digits: int, unit: str = "") -> Callable[[Row], str]:
    """A column's formatter: the field with so many digits."""
    return lambda row: UNDEFINED if row[name] is None else f"{row[name]:.{digits}f}{unit}"


def share(name: str, undefined: str = UNDEFINED) -> Callable[[Row], str]:
    """A column's formatter: the field in percent."""
    return lambda row: undefined if row[name] is None else f"{100 * row[name]:.1f}%"


def interval(name: str) -> Callable[[Row], str]:
    """A column's formatter: the field as an interval."""
    return lambda row: interval_text(row[name])


def interval_text(value: Sequence[float] | None, digits: int = 4) -> str:
    return UNDEFINED if value is None else f"{value[0]:.{digits}f} to {value[1]:.{digits}f}"


def text(name: str) -> Callable[[Row], str]:
    """A column's formatter: the field as it is."""
    return lambda row: str(row[name])


RATIO: Column = ("ratio", share("ratio", ""))
QUALITY: tuple[Column, ...] = (
    ("method", text("method")), RATIO, ("spent", share("recomputed_fraction")),
    ("all work", share("computed_fraction")), ("n", text("n")), ("KL", number("kl", 4)),
    ("interval", interval("kl_ci")), ("top-1", share("top1")), ("same answer", share("exact_match")),
    ("gold", share("gold_match")), ("exact", share("accuracy")), ("F1", number("f1", 3)),
    ("of full's score", share("score_share")),
    ("ROUGE-L", number("rouge_l", 3)), ("recovery", share("recovery")), ("TTFT ms", number("ttft_ms", 0)),
    ("choosing ms", number("select_ms", 1)),
    ("speed-up", number("speedup", 1, "x")), ("prompt tokens", number("prompt_tokens", 0)),
    ("answer tokens", number("generated_tokens", 0)),
)  # fmt: skip
FIGURES: tuple[Column, ...] = (
    ("method", text("method")), RATIO, ("spent", share("recomputed_fraction")), ("n", text("figures_n")),
    ("figures kept", share("figures_kept")), ("interval", lambda row: interval_text(row["figures_kept_ci"], 3)),
    ("wrong passage", share("figures_other")), ("read again", share("read_again")),
    ("KL at figures", number("figure_kl", 4)),
    ("interval", interval("figure_kl_ci")), ("KL", number("kl", 4)),
)  # fmt: skip
FASTEST_WITHIN: tuple[Column, ...] = (
    ("lost at most", share("loss")), ("method", text("method")), RATIO, ("of full's score", share("score_share")),
    ("interval", lambda row: interval_text(row["score_share_ci"], 3)), ("TTFT ms", number("ttft_ms", 0)),
    ("speed-up", number("speedup", 1, "x")),
)  # fmt: skip
TASKS: tuple[Column, ...] = (
    ("task", text("task")), ("method", text("method")), RATIO, ("n", text("n")), ("KL", number("kl", 4)),
    ("exact", share("accuracy")), ("found", share("found")), ("F1", number("f1", 3)),
    ("figures kept", share("figures_kept")),
)  # fmt: skip
COMPARISONS: tuple[Column, ...] = (
    ("method", text("method")), RATIO, ("against", text("against")), ("ratio", share("against_ratio", "")),
    ("KL difference", lambda row: f"{row['kl_difference']:+.4f}"), ("interval", interval("kl_difference_ci")),
    ("KL ratio", number("kl_ratio", 3)), ("interval", interval("kl_ratio_ci")), ("nearer on", share("nearer_on")),
    ("verdict", lambda row: f"{row['verdict']}{' *' if row['same_cost'] is False else ''}"),
)  # fmt: skip


def quality_tables(
    rows: Sequence[Row], comparisons: Sequence[Row], tasks: Sequence[Row] = (), within: Sequence[Row] = ()
) -> list[Table]:
    """The tables of a run: figures kept, quality, the fastest within a loss, tasks and comparisons, if they exist."""
    costs = (
        "spent: share of stored tokens that were recomputed, selection included, averaged over layers. all work: all "
        "computed rows, as a share of full prefill's. choosing: selection within the time to first token."
    )
    found = [table_of("Quality against full prefill (intervals: 95%)", QUALITY, rows, costs)]
    figures = [row for row in rows if row["figures_n"]]
    if figures:
        note = (
            "Of the answers whose figures full prefill has right: the share in which the method has them too."
        )
        found.insert(0, table_of("Figures kept (intervals: 95%)", FIGURES, figures, note))
    if within:
        note = "With few prompts the interval reaches far below the tolerated loss."
        found.append(table_of("The fastest method that keeps the task score", FASTEST_WITHIN, within, note))
    if tasks:
        found.append(table_of("By task", TASKS, tasks))
    if comparisons:
        unlike = any(row["same_cost"] is False for row in comparisons)
        note = "* not at the same cost: their mean shares of recomputed tokens differ by more than a point"
        title = "Paired comparisons on the same prompts (a negative KL difference is better)"
        found.append(table_of(title, COMPARISONS, comparisons, note if unlike else ""))
    return found


def matrix_table(matrix: Sequence[Row]) -> Table:
    """Each row's method against each column's: the ratio of their mean KL."""
    found = {((row["method"], row["ratio"]), (row["against"], row["against_ratio"])): row for row in matrix}
    names = list(dict.fromkeys(name for pair in found for name in pair))
    head = ["KL of row / KL of column", *starmap(label, names)]
    lines = [[Cell(label(*row)), *(_matrix_cell(found, row, column) for column in names)] for row in names]
    note = (
        "Below 1 the row's method is closer to full prefill. Green and red: the paired 95% interval of the difference "
        "excludes zero. Grey: the two did not cost the same (mean recomputed shares differ by more than one point). "
        "Hover over a cell for the interval."
    )
    return Table("Paired comparison of any two methods", head, lines, note)


def _matrix_cell(found: dict[tuple[Any, Any], Row], row: Any, column: Any) -> Cell:
    forward = found.get((row, column))
    cell = forward or found.get((column, row))
    if cell is None or cell["kl_ratio"] is None or (forward is None and cell["kl_ratio"] <= 0):
        return Cell(UNDEFINED)
    ratio, around, verdict = cell["kl_ratio"], cell["kl_ratio_ci"], cell["verdict"]
    if forward is None:
        ratio, around = 1 / ratio, None if not around or min(around) <= 0 else (1 / around[1], 1 / around[0])
        verdict = {"better": "worse", "worse": "better"}.get(verdict, verdict)
    kind = f"{verdict if verdict != 'undecided' else ''} {'' if cell['same_cost'] else 'other'}".strip()
    return Cell(f"{ratio:.2f}", kind, f"{verdict}; {interval_text(around, 3)}")


def _where(part: str) -> Column:
    return part.replace("_", " "), lambda row: f"{row['where_ms'][part]:.1f}"


TTFT: tuple[Column, ...] = (
    ("method", text("method")), RATIO, ("TTFT", number("ttft_ms", 0)), ("predicted", number("predicted_ttft_ms", 0)),
    ("speed-up", number("speedup", 1, "x")), ("retrieve", number("retrieve_ms", 1)), ("load", number("load_ms", 1)),
    *map(_where, ("stall", "move", "select", "compute", "first_token")),
    ("peak MiB", lambda row: UNDEFINED if row["peak_bytes"] is None else f"{row['peak_bytes'] / MEBIBYTE:.0f}"),
    ("of fused KV", number("peak_of_fused_kv", 2, "x")),
)  # fmt: skip


def ttft_tables(rows: Sequence[Row]) -> list[Table]:
    """One table per (chunks, tokens, cache): medians of the time to first token and of its parts."""
    cases: dict[str, list[Row]] = {}
    for row in rows:
        where = CACHE_LABELS[row["cache"]]
        title = f"{row['chunks']} chunks of {row['tokens']} tokens, {where} (milliseconds, medians)"
        cases.setdefault(title, []).append(row)
    return [table_of(title, TTFT, own) for title, own in cases.items()]
