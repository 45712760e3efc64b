"""The report folder: pictures, report.html, and a page for each prompt that was looked into."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench import quality
from ragblend.app.bench.data import Question
from ragblend.app.bench.inspecting import Notebook, figures, inspect
from ragblend.app.bench.plots import plot_kl, plot_pareto, plot_quality
from ragblend.app.bench.plots_figures import plot_figures
from ragblend.app.bench.progress import progress_bar
from ragblend.app.bench.prompt_page import prompt_page
from ragblend.app.bench.records import Journal
from ragblend.app.bench.report_page import report_page
from ragblend.app.bench.variants import Variant

if TYPE_CHECKING:
    from ragblend.app.bench.inspecting import Look
    from ragblend.engine.engine import Engine

SHOWN_CHARACTERS = 120  # of a question, in the list of prompts


@dataclass(frozen=True)
class Report:
    """What a run has to say. results: as in quality.json; the figures' numbers are added to it."""

    results: dict[str, Any]
    questions: Sequence[Question]
    variants: Sequence[Variant]
    journal: Journal


def write_report(
    folder: Path, engine: "Engine", report: Report, prompts: int, fresh: bool, max_new_tokens: int
) -> dict[str, str]:
    """Write everything that a person looks at; the paths by kind. prompts: how many are looked into, 0 for none."""
    pictures = _pictures(folder, report)
    looks: list[Look] = []
    if prompts:
        looks, found = _looked_into(engine, report, prompts, fresh, max_new_tokens)
        report.results["figures"] = found
        pictures |= plot_figures(found, _title(report), folder)
    links = [_write_prompt(folder, number, look, report) for number, look in enumerate(looks, start=1)]
    page = folder / "report.html"
    page.write_text(report_page(report.results, pictures, links), encoding="utf-8")
    written = {"png": pictures["quality"]} if "quality" in pictures else {}
    return {name: str(path) for name, path in {**written, "html": page}.items()}


def _title(report: Report) -> str:
    where = report.results["environment"]
    device = where["gpu"] or where["cpu"]
    packed = "" if where["kv_codec"] == "raw" else f", {where['kv_codec']} KV"
    return f"{where['model']}, {where['dtype']}{packed} on {device}"


def _pictures(folder: Path, report: Report) -> dict[str, Path]:
    compared = [row for row in report.results["rows"] if row["kl"] is not None]
    if not compared:
        return {}
    title = f"{_title(report)}, {len(report.questions)} questions"
    draw = {"quality": plot_quality, "kl": plot_kl, "pareto": plot_pareto}
    written = {name: folder / f"{name}.png" for name in draw}
    for name, drawn in draw.items():
        drawn(compared, title, written[name])
    return written


def _looked_into(
    engine: "Engine", report: Report, prompts: int, fresh: bool, max_new_tokens: int
) -> "tuple[list[Look], dict[str, Any]]":
    """The first so many questions; the notebook is named as the journal is, and depends on the same things."""
    path = report.journal.path
    notebook = Notebook(path.with_name(path.name.replace("quality-", "inspected-")), fresh)
    chosen = report.questions[:prompts]
    with progress_bar("looking into prompts") as progress:
        looks = inspect(
            engine,
            chosen,
            report.variants,
            notebook,
            lambda question: quality.build_prompt(engine, question, max_new_tokens),
            progress,
        )
    return looks, figures(chosen, report.variants, notebook)


def _write_prompt(folder: Path, number: int, look: "Look", report: Report) -> tuple[str, str]:
    """The page's file name, and the question as its link says it."""
    records = [
        report.journal.records[look.question.digest, variant.method, variant.ratio]
        for variant in report.variants
    ]
    name = f"prompt-{number}.html"
    (folder / name).write_text(prompt_page(look, records), encoding="utf-8")
    text = " ".join(look.question.text.split())
    return name, text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
