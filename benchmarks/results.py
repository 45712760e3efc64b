"""Renders docs/results.md, docs/programs.md and the README's table from recorded runs of the benches.

    python -m benchmarks.results                                       # render again
    python -m benchmarks.results --add bench-results --title "..." --command "ragblend bench quality ..."

`--add` takes the rows of the bench that `--command` names out of its output folder (`quality.json`, `ttft.json` or
`peers.json`), with the machine that it names, into `recorded.json` beside this file. Figures are never typed into the
documents: a test renders them and compares.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.common import DATA, DOCS, REPO, markdown_table, read_json, replace_marked, run, to_json

RECORDED, PROGRAMS = DATA / "recorded.json", DATA / "programs.json"
RESULTS, README, FRAMEWORKS = DOCS / "results.md", REPO / "README.md", DOCS / "programs.md"
Run = dict[str, Any]
Row = Mapping[str, Any]

INTRODUCTION = """# Results

<!-- Made by `python -m benchmarks.results` from benchmarks/recorded.json: do not edit. -->

How close each method comes to full prefill, and how much faster its first token is. Each run names its command, without
`--home` and `--output`; `FILE` and `FOLDER` are the questions and the model of the title, `METHODS` those of the table.
Unless a run says otherwise, it used two cores, bfloat16 and torch 2.13, often beside other work, so only the ratios of
times count. The Xeon has AMX.

[Measuring quality](quality.md#columns) explains the columns. Here also:

- `full` is not shown where its divergence would be 0.
- *Identical*: answers equal to full prefill's word for word. *Faster*: the median of full prefill's time to first token
  divided by the method's.
- `sure=0`: `probe-shift` without the [second look](methods.md#a-second-look-at-figures).

"Figures kept: Qwen2.5-Coder-0.5B", "Figures kept by all methods", "Figures kept at 15%" and "Figures kept at 15% and
25%" have today's second look, the other runs on figures an earlier one, which read more answers again. In these others
and "Figures kept at 15% and 25%", *wrong passage* counts wrong figures of the right passage, too, and full prefill was
timed once for eight questions.
"""
README_RUN = "Figures kept: Qwen2.5-Coder-0.5B"
README_RATIOS = (None, 0.25)
README_METHODS = ("full", "reuse", "cacheblend", "epic", "probe-shift")
BENCHES = ("quality", "ttft", "peers")  # as in commands and in names of files
# Columns that are recorded and not shown in tables with a divergence, and in tables with counted figures.
HIDDEN_WITH_KL = {"ttft_ms"}
HIDDEN_WITH_FIGURES = {"kl_ci", "exact_match"}
FIGURE_COLUMNS = {"figures_kept", "figures_kept_ci", "figures_other", "figure_kl", "read_again"}
MIN_FIGURES = 10  # answers with figures; the columns about figures of fewer are not recorded
USUAL_MACHINE = (
    ", 2 cores, bfloat16, torch 2.13.0+cpu"  # the introduction says it, so sections do not repeat it
)
TTFT_TITLE = "Time to first token"  # runs whose titles begin so share a table
README_COLUMNS = ("method", "figures_kept", "figures_other", "figure_kl", "speedup")


def percent(value: float) -> str:
    return f"{100 * value:.1f}%".replace(".0%", "%")


def times(value: float) -> str:
    return "1" if value == 1 else f"{value:.0f} times" if value >= 10 else f"{value:.1f} times"


def three_digits(value: float) -> str:
    return f"{value:.3f}"


# Field of a row -> its heading, and a function that formats its value; in the order of the columns.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "case": ("", str),
    "method": ("method", lambda name: f"`{name}`"),
    "ratio": ("ratio", percent),
    "prompt": ("prompt", str),
    "own": ("its own LLM", str),
    "fused": ("RAGBlend", str),
    "figures_kept": ("figures kept", percent),
    "figures_kept_ci": ("95%", lambda ends: f"{percent(ends[0])} to {percent(ends[1])}"),
    "figures_other": ("wrong passage", percent),
    "read_again": ("read again", percent),
    "figure_kl": ("KL at figures", three_digits),
    "kl": ("KL", three_digits),
    "kl_ci": ("95%", lambda ends: f"{ends[0]:.3f} to {ends[1]:.3f}"),
    "exact_match": ("identical", percent),
    "ttft_ms": ("TTFT, ms", lambda ms: f"{ms:,.0f}"),
    "speedup": ("faster", times),
    "speedup_range": ("range", str),
    "last_ms": ("100th token, ms", lambda ms: f"{ms:,.0f}"),
    "tokens_per_s": ("tokens/s", lambda rate: f"{rate:.1f}"),
    "ingest_tokens": ("passages' tokens/s, first time", lambda rate: f"{rate:,.0f}"),
    "peak_mb": ("peak memory, MB", lambda size: f"{size:,.0f}"),
    "disk_mb": ("disk, MB", lambda size: f"{size:,.0f}"),
}


def table(rows: Iterable[Row], columns: Iterable[str] = tuple(COLUMNS)) -> str:
    """A Markdown table of the columns for which any row has a value."""
    kept = list(rows)
    shown = [name for name in columns if any(row.get(name) is not None for row in kept)]
    return markdown_table(
        [COLUMNS[name][0] for name in shown], [[_cell(row, name) for name in shown] for row in kept]
    )


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    return "" if value is None else COLUMNS[name][1](value)


def section(run: Run) -> str:
    names = {name for row in run["rows"] for name in row}
    rows, unseen = run["rows"], set[str]()
    if "kl" in names:
        rows = [row for row in rows if row.get("method") != "full"]  # the reference diverges by 0
        unseen |= HIDDEN_WITH_KL
    if "figures_kept" in names:
        unseen |= HIDDEN_WITH_FIGURES
    return _titled(run["title"], run, table(rows, [name for name in COLUMNS if name not in unseen]))


def side_by_side(runs: list[Run]) -> str:
    """Times to first token of one machine: a column for each model."""
    title = _family(runs[0])
    models = [each["title"].removeprefix(f"{title}, ") for each in runs]
    cells: dict[tuple[str, float | None], dict[str, str]] = {}
    for model, each in zip(models, runs, strict=True):
        for row in each["rows"]:
            text = f"{row['ttft_ms']:,.0f} ms ({times(row['speedup'])})"
            cells.setdefault((row["method"], row.get("ratio")), {})[model] = text
    rows = [
        (f"`{method}`", percent(ratio) if ratio else "", *(found.get(model, "") for model in models))
        for (method, ratio), found in cells.items()
    ]
    return _titled(title, runs[0], markdown_table(("method", "ratio", *models), rows))


def _titled(title: str, run: Run, shown: str) -> str:
    omits_count = not run.get("n") or run["says"].startswith(f"Full prefill had {run['n']} of")
    count = "" if omits_count else f"{run['n']} questions. "
    about = f"{count}{run['machine'].removesuffix(USUAL_MACHINE)}. {run['says']}"
    command = re.sub(r"(--methods) \S{150,}", r"\1 METHODS", run["command"])
    return f"## {title}\n\n`{command}`\n\n{about}\n\n{shown}"


def _family(run: Run) -> str:
    """The title under which a run is shown; for runs that share a table, their titles without the model."""
    return run["title"].partition(", ")[0] if run["title"].startswith(TTFT_TITLE) else run["title"]


def results_page(runs: list[Run]) -> str:
    families: dict[str, list[Run]] = {}
    for each in runs:
        families.setdefault(_family(each), []).append(each)
    shown = [
        side_by_side(family) if name.startswith(TTFT_TITLE) else section(family[0])
        for name, family in families.items()
    ]
    return "\n".join([INTRODUCTION, *shown])


def readme_table(runs: list[Run]) -> str:
    """The README's methods, at its ratio."""
    rows = next(run["rows"] for run in runs if run["title"] == README_RUN)
    shown = [row for row in rows if row.get("ratio") in README_RATIOS and row["method"] in README_METHODS]
    return table(shown, README_COLUMNS)


def render_readme(readme: str, runs: list[Run]) -> str:
    """The README with its recorded table. Raises ValueError if the marks are missing."""
    return replace_marked(readme, lambda: readme_table(runs))


def render_programs(text: str, recorded: Mapping[str, Iterable[Row]]) -> str:
    """docs/programs.md with a table of each framework's programs. Raises ValueError if the marks are missing."""
    for framework, rows in recorded.items():
        begin, end = f"<!-- programs of {framework} -->\n", "<!-- end of programs -->"
        before, _, after = text.partition(begin)
        if end not in after:
            raise ValueError(f"{FRAMEWORKS.name} must hold `{begin.strip()}` and, behind it, `{end}`")
        kept = [_program_cells(row) for row in rows]
        first = [row["first_cpu"] for row in rows if "first_cpu" in row]
        shown = markdown_table(list(kept[0]), [list(row.values()) for row in kept])
        shown += f"\n*First question*: {min(first):.2f} to {max(first):.2f}.\n"
        text = before + begin + shown + after[after.index(end) :]
    return text


def _program_cells(row: Row) -> dict[str, str]:
    """A program's cells, by their headings."""
    return {
        "program": row["program"],
        "of what was retrieved": percent(row["found"] / row["retrieved"]),
    }


def read_run(folder: Path, title: str, command: str, says: str) -> Run:
    """The run that the command's bench has saved in its output folder. Raises ValueError, FileNotFoundError."""
    kinds = [kind for kind in BENCHES if kind in command]
    if len(kinds) != 1:
        raise ValueError(f"the command must name one of {', '.join(BENCHES)}, and it is: {command}")
    path = folder / f"{kinds[0]}.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {path.name}: is it that bench's --output?")
    return _run(read_json(path), title, command, says)


def with_run(runs: list[Run], run: Run) -> list[Run]:
    """The runs with this one, which replaces the run of the same title or is added at the end."""
    places = [place for place, each in enumerate(runs) if each["title"] == run["title"]]
    at = places[0] if places else len(runs)
    return [*runs[:at], run, *runs[at + 1 :]]


def _run(report: Run, title: str, command: str, says: str) -> Run:
    at = report["environment"]
    machine = f"{at['gpu'] or at['cpu']}, {at['cpu_cores']} cores, {at['dtype']}, torch {at['torch']}"
    rows = [
        {
            name: _rounded(row[name])
            for name in COLUMNS
            if row.get(name) is not None and not (name in FIGURE_COLUMNS and row["figures_n"] < MIN_FIGURES)
        }
        for row in report["rows"]
    ]
    settings = report.get("settings", {})
    count = settings.get("questions")
    if settings.get("asked", count) != count:
        says = f"Full prefill had {count} of {settings['asked']} right. {says}".strip()
    return {"title": title, "command": command, "machine": machine, "n": count, "says": says, "rows": rows}


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def main(
    add: Annotated[Path | None, typer.Option(help="A bench's output folder.")] = None,
    title: Annotated[str, typer.Option(help="Replaces the recorded run of that title.")] = "",
    command: Annotated[str, typer.Option(help="What was run.")] = "",
    says: Annotated[str, typer.Option(help="What a reader must know beside the figures.")] = "",
) -> None:
    """Record a run, if one is named, and write the documents."""
    runs: list[Run] = read_json(RECORDED)
    if add is not None:
        if not title or not command:
            raise typer.BadParameter("--add needs --title and --command")
        runs = with_run(runs, read_run(add, title, command, says))
    page, readme = results_page(runs), render_readme(README.read_text(encoding="utf-8"), runs)
    if add is not None:  # only if everything can be rendered
        RECORDED.write_text(to_json(runs, 3), encoding="utf-8")
    RESULTS.write_text(page, encoding="utf-8")
    write_programs(read_json(PROGRAMS))
    README.write_text(readme, encoding="utf-8")


def write_programs(recorded: Mapping[str, Iterable[Row]]) -> None:
    """Write the recorded programs into docs/programs.md."""
    FRAMEWORKS.write_text(render_programs(FRAMEWORKS.read_text(encoding="utf-8"), recorded), encoding="utf-8")


if __name__ == "__main__":
    run(main, __doc__)
