"""report.html: all that a run of `bench quality` measured, in one file that loads nothing."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ragblend.app.bench.html_parts import (
    ReadyCell,
    heading,
    interval,
    number,
    page,
    paragraph,
    picture,
    share,
    table,
)

Row = dict[str, Any]
FEWEST_PROMPTS = 60  # design.md section 8
FIGURES = {
    "attention_deviation": (
        "Attention deviation against ratio (CacheBlend, Figure 6)",
        "How far what the question's last rows look at is from what they look at after full prefill: L2 distance of "
        "a row, mean over layers, heads and rows.",
    ),
    "kv_deviation_quantiles": (
        "Distribution of KV deviation (CacheBlend, Figure 7)",
        "L1 distance of each stored token's keys and values from those that full prefill gives it. The longer the "
        "tail, the more a good selection can gain.",
    ),
    "rank_correlations": (
        "Rank correlation between neighbouring layers (CacheBlend, Figure 8)",
        "Whether the tokens that deviate most in one layer are those of the next: where it is low, a choice made in an "
        "early layer is not good for the later ones.",
    ),
}


def report_page(results: Row, pictures: dict[str, Path], prompts: Sequence[tuple[str, str]]) -> str:
    """results: as in quality.json, with `matrix` and `tasks`; pictures: PNGs by name; prompts: (file, question)."""
    rows, what = results["rows"], results["settings"]
    where = results["environment"]
    title = f"{where['model']}: fused against full prefill"
    body = [
        f"<h1>{escape(title)}</h1>",
        paragraph(_setting(where, what), "note"),
        *_warnings(rows, what),
        heading("Every method, at what it really cost"),
        paragraph(
            "spent: stored tokens that were computed again, selection included, averaged over layers. all work: every "
            "row that was computed, probes and question included, as a share of full prefill. choosing: milliseconds "
            "of selection within the time to first token.",
            "note",
        ),
        _rows_table(rows),
        *_task_part(results["tasks"]),
    ]
    for name, label in (
        ("pareto", "Quality against time, with the Pareto front"),
        ("kl", "KL by method, 95% intervals"),
    ):
        if name in pictures:
            body += [heading(label), picture(pictures[name], label)]
    body += _matrix_part(results["matrix"])
    for name, (label, text) in FIGURES.items():
        if name in pictures:
            body += [heading(label), paragraph(text, "note"), picture(pictures[name], label)]
    body += _prompt_part(prompts)
    return page(title, body)


def _setting(where: Row, what: Row) -> str:
    device = where["gpu"] or f"{where['cpu']}, {where['threads']} threads"
    return (
        f"{what['data']}, {what['questions']} questions, answers of up to {what['max_new_tokens']} tokens, seed "
        f"{what['seed']}; {where['dtype']} on {device}, KV stored {where['kv_codec']}. Times to first token are "
        "medians; intervals are 95%, bootstrapped over prompts, in pairs where two methods are compared."
    )


def _warnings(rows: Sequence[Row], what: Row) -> list[str]:
    said = []
    if what["questions"] < FEWEST_PROMPTS:
        said.append(f"{what['questions']} prompts settle nothing; measure {FEWEST_PROMPTS} or more.")
    if what["skipped"]:
        named = "; ".join(each["reason"] for each in what["skipped"][:5])
        more = f" and {len(what['skipped']) - 5} more" if len(what["skipped"]) > 5 else ""
        said.append(f"{len(what['skipped'])} records were left out: {named}{more}.")
    said += [
        f"{row['method']} at {share(row['ratio'])} spent {share(row['recomputed_fraction'])}: more than it was given."
        for row in rows
        if row["ratio"] is not None and (row["recomputed_fraction"] or 0) > row["ratio"] + 0.01
    ]
    return [paragraph(text, "warn") for text in said]


def _rows_table(rows: Sequence[Row]) -> str:
    head = [
        "method", "ratio", "spent", "all work", "n", "KL", "interval", "top-1", "same answer", "exact", "F1", "ROUGE-L",
        "recovery", "TTFT ms", "choosing ms", "speed-up",
    ]  # fmt: skip
    return table(head, [_row_cells(row) for row in rows])


def _row_cells(row: Row) -> list[str]:
    return [
        row["method"],
        share(row["ratio"]),
        share(row["recomputed_fraction"]),
        share(row["computed_fraction"]),
        str(row["n"]),
        number(row["kl"]),
        interval(row["kl_ci"]),
        share(row["top1"]),
        share(row["exact_match"]),
        share(row["accuracy"]),
        number(row["f1"], 3),
        number(row["rouge_l"], 3),
        share(row["recovery"]),
        number(row["ttft_ms"], 0),
        number(row["select_ms"], 1),
        f"{row['speedup']:.1f}x",
    ]


def _task_part(tasks: Sequence[Row]) -> list[str]:
    if not tasks:
        return []
    names = list(dict.fromkeys(row["task"] for row in tasks))
    methods = list(dict.fromkeys((row["method"], row["ratio"]) for row in tasks))
    found = {(row["task"], row["method"], row["ratio"]): row for row in tasks}
    counts = {name: next(row["n"] for row in tasks if row["task"] == name) for name in names}
    head = ["method", "ratio", *(f"{name} (n={counts[name]})" for name in names)]
    lines = [
        [method, share(ratio), *(_task_cell(found[name, method, ratio]) for name in names)]
        for method, ratio in methods
    ]
    text = "exact: answers that hold all that they must (RULER); found: the share of it; KL beside them."
    return [heading("By task"), paragraph(text, "note"), table(head, lines)]


def _task_cell(row: Row) -> str:
    if row["accuracy"] is None:
        return f"F1 {number(row['f1'], 3)}, KL {number(row['kl'])}"
    return f"{share(row['accuracy'])} exact, {share(row['found'])} found, KL {number(row['kl'])}"


def _matrix_part(matrix: Sequence[Row]) -> list[str]:
    """Each row's method against each column's: mean KL of the first as a part of the second's."""
    if not matrix:
        return []
    found: dict[tuple[Any, Any], Row] = {}
    for row in matrix:
        found[(row["method"], row["ratio"]), (row["against"], row["against_ratio"])] = row
    names = list(dict.fromkeys(name for pair in found for name in pair))
    head = ["KL of row / KL of column", *(_name(name) for name in names)]
    lines = [[_name(row), *(_matrix_cell(found, row, column) for column in names)] for row in names]
    text = (
        "Below 1 the row's method is nearer to full prefill. Green and red: the paired 95% interval of the difference "
        "excludes zero. Grey: the two did not cost the same (mean shares recomputed more than one point apart), so the "
        "comparison is not one at matched cost. Hover over a cell for the interval."
    )
    return [heading("Any two methods, in pairs"), paragraph(text, "note"), table(head, lines)]


def _name(variant: tuple[str, float | None]) -> str:
    return variant[0] if variant[1] is None else f"{variant[0]} {100 * variant[1]:g}%"


def _matrix_cell(found: dict[tuple[Any, Any], Row], row: Any, column: Any) -> str:
    forward, backward = found.get((row, column)), found.get((column, row))
    cell = forward or backward
    if cell is None or cell["kl_ratio"] is None or (forward is None and cell["kl_ratio"] <= 0):
        return "–"
    ratio, ends = cell["kl_ratio"], cell["kl_ratio_ci"]
    said = cell["verdict"]
    if forward is None:
        ratio, ends = 1 / ratio, None if ends is None or min(ends) <= 0 else (1 / ends[1], 1 / ends[0])
        said = {"better": "worse", "worse": "better"}.get(said, said)
    kind = f"{said if said != 'undecided' else ''} {'' if cell['same_cost'] else 'other'}".strip()
    title = escape(f"{said}; {interval(ends, 3)}")
    return ReadyCell(f'<td class="{kind}" title="{title}">{ratio:.2f}</td>')


def _prompt_part(prompts: Sequence[tuple[str, str]]) -> list[str]:
    if not prompts:
        return []
    links = "".join(f'<li><a href="{escape(name)}">{escape(text)}</a></li>' for name, text in prompts)
    return [heading("Prompts, token by token"), f"<ol>{links}</ol>"]
