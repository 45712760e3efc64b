"""report.html: all that a run of `bench quality` measured, in one file that loads nothing."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ragblend.app.bench.table import FEWEST_PROMPTS, matrix_table, quality_tables

Row = dict[str, Any]
TEMPLATE = Path(__file__).with_name("report.html")


def report_page(results: Row, pictures: Mapping[str, Path]) -> str:
    """results: as in quality.json; pictures: PNGs by what they are called on the page."""
    from jinja2 import Environment

    rows, what, where = results["rows"], results["settings"], results["environment"]
    tables = quality_tables(rows, results["comparisons"], results["tasks"])
    if results["matrix"]:
        tables.append(matrix_table(results["matrix"]))
    page = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        title=f"{where['model']}: fused against full prefill",
        setting=_setting(where, what),
        warnings=warnings(rows, what),
        pictures={
            label: base64.b64encode(path.read_bytes()).decode("ascii") for label, path in pictures.items()
        },
        tables=tables,
    )


def _setting(where: Row, what: Row) -> str:
    device = where["gpu"] or f"{where['cpu']}, {where['threads']} threads"
    return (
        f"{what['data']}, {what['questions']} questions, answers of up to {what['max_new_tokens']} tokens, seed "
        f"{what['seed']}; {where['dtype']} on {device}, KV stored {where['kv_codec']}. Times to first token are "
        "medians; intervals are 95%, bootstrapped over prompts, in pairs where two methods are compared."
    )


def warnings(rows: Sequence[Row], what: Row) -> list[str]:
    """What a reader of the numbers must know."""
    said = []
    if what["questions"] < FEWEST_PROMPTS:
        said.append(f"{what['questions']} prompts settle nothing; measure {FEWEST_PROMPTS} or more.")
    if what["skipped"]:
        named = "; ".join(each["reason"] for each in what["skipped"][:5])
        more = f" and {len(what['skipped']) - 5} more" if len(what["skipped"]) > 5 else ""
        said.append(f"{len(what['skipped'])} records were left out: {named}{more}.")
    for row in rows:
        spent, name = row["recomputed_fraction"] or 0, row["method"]
        if row["ratio"] is not None and spent > row["ratio"] + 0.01:
            said.append(f"{name} at {row['ratio']:.1%} spent {spent:.1%}: more than it was given.")
        if row["unscored"]:
            said.append(f"{name}: {row['unscored'] / row['calls']:.1%} of its answers came without a score.")
    return said
