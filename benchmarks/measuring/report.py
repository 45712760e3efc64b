"""The files of a quality run: its results as JSON, a picture, and an HTML report that loads nothing."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

from ragblend.measuring.plots import plot_quality
from ragblend.measuring.records import Row, write_json
from ragblend.measuring.result_tables import MIN_PROMPTS, matrix_table, quality_tables

TEMPLATE = Path(__file__).with_name("report.html")
FILES = {"json": "quality.json", "png": "quality.png", "html": "report.html"}
PICTURE = "KL by method, with its 95% interval, and against time, with the Pareto front"


def write_report(folder: Path, results: Row) -> Row:
    """Write `quality.json`, `quality.png` and `report.html`; adds `files` by kind."""
    files = {kind: folder / name for kind, name in FILES.items()}
    plot_quality(results["rows"], _title(results), files["png"])
    files["html"].write_text(report_page(results, {PICTURE: files["png"]}), encoding="utf-8")
    write_json(files["json"], results)
    return results | {"files": {kind: str(path) for kind, path in files.items()}}


def _title(results: Row) -> str:
    where = results["environment"]
    packed = "" if where["kv_codec"] == "raw" else f", {where['kv_codec']} KV"
    device = where["gpu"] or where["cpu"]
    return f"{where['model']}, {where['dtype']}{packed} on {device}, {results['settings']['questions']} questions"


def report_page(results: Row, pictures: Mapping[str, Path]) -> str:
    """The HTML report: all results in one self-contained file.

    results: as in quality.json; pictures: PNG files by their captions.
    """
    from jinja2 import Environment

    rows, what, where = results["rows"], results["settings"], results["environment"]
    tables = quality_tables(rows, results["comparisons"], results["tasks"], results["within"])
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
    """Warnings for readers of the numbers."""
    found = []
    if what["questions"] < MIN_PROMPTS:
        found.append(
            f"{what['questions']} prompts are too few to compare methods; measure {MIN_PROMPTS} or more."
        )
    if what["skipped"]:
        named = "; ".join(each["reason"] for each in what["skipped"][:5])
        more = f" and {len(what['skipped']) - 5} more" if len(what["skipped"]) > 5 else ""
        found.append(f"{len(what['skipped'])} records were left out: {named}{more}.")
    for row in rows:
        spent, name = row["recomputed_fraction"], row["method"]
        if row["ratio"] is not None and spent > row["ratio"] + 0.01:
            found.append(f"{name} at {row['ratio']:.1%} recomputed {spent:.1%}, more than its budget.")
    return found
