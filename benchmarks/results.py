"""docs/results.md and the README's table, from recorded runs of the benches.

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

from benchmarks.common import DOCS, FIGURES, REPO, between_marks, dumped, markdown, read_json, run

RECORDED, PROGRAMS = FIGURES / "recorded.json", FIGURES / "programs.json"
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
- *`probe-shift` leaves*: its KL divided by that method's at the same ratio, with the paired 95% interval.
- `sure=0`: `probe-shift` without the [second look](methods.md#a-second-look-at-figures).

The runs "MuSiQue, ..." on three models measured a `probe-shift` that did not yet recompute figures as a whole.
"Figures kept: Qwen2.5-Coder-0.5B", "Figures kept at 15%" and "Figures kept at 15% and 25%" have today's second look,
the other runs on figures an earlier one, which read more answers again. In these others and "Figures kept at 15% and
25%", *wrong passage* counts wrong figures of the right passage, too, and full prefill was timed once for eight
questions.
"""
README_RUN = "Figures kept: Qwen2.5-Coder-0.5B"
README_RATIOS = (None, 0.25)
README_METHODS = ("full", "reuse", "cacheblend", "epic", "probe-shift")
KINDS = ("quality", "ttft", "peers")  # of benches, as commands and files call them
# Recorded in recorded.json, and not shown: beside a divergence, and where figures were counted.
UNSEEN_WITH_KL = {"ttft_ms"}
UNSEEN_WITH_FIGURES = {"kl_ci", "exact_match"}
OF_FIGURES = {"figures_kept", "figures_kept_ci", "figures_other", "figure_kl", "read_again"}
FEWEST_FIGURES = 10  # answers with figures; fewer say nothing about them
USUAL = ", 2 cores, bfloat16, torch 2.13.0+cpu"  # as the introduction says
TIMES = "Time to first token"  # titles of runs that share a table
README_COLUMNS = ("method", "figures_kept", "figures_other", "figure_kl", "speedup")


def percent(value: float) -> str:
    return f"{100 * value:.1f}%".replace(".0%", "%")


def times(value: float) -> str:
    return "1" if value == 1 else f"{value:.0f} times" if value >= 10 else f"{value:.1f} times"


def three(value: float) -> str:
    return f"{value:.3f}"


# field of a row: heading, and how a value is written; in the order of the columns
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
    "figure_kl": ("KL at figures", three),
    "kl": ("KL", three),
    "kl_ci": ("95%", lambda ends: f"{ends[0]:.3f} to {ends[1]:.3f}"),
    "left": ("`probe-shift` leaves", str),
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
    """In Markdown, the columns of which any row has a value."""
    kept = list(rows)
    shown = [name for name in columns if any(row.get(name) is not None for row in kept)]
    return markdown(
        [COLUMNS[name][0] for name in shown], [[_cell(row, name) for name in shown] for row in kept]
    )


def _cell(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if name == "left":
        low, high = row["left_ci"]
        return f"{value:.2f} ({low:.2f} to {high:.2f})"
    return COLUMNS[name][1](value)


def section(run: Run) -> str:
    names = {name for row in run["rows"] for name in row}
    rows, unseen = run["rows"], set[str]()
    if "kl" in names:
        rows = [row for row in rows if row.get("method") != "full"]  # the measure of the others
        unseen |= UNSEEN_WITH_KL
    if "figures_kept" in names:
        unseen |= UNSEEN_WITH_FIGURES
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
    return _titled(title, runs[0], markdown(("method", "ratio", *models), rows))


def _titled(title: str, run: Run, shown: str) -> str:
    told = not run.get("n") or run["says"].startswith(f"Full prefill had {run['n']} of")
    count = "" if told else f"{run['n']} questions. "
    about = f"{count}{run['machine'].removesuffix(USUAL)}. {run['says']}"
    command = re.sub(r"(--methods) \S{150,}", r"\1 METHODS", run["command"])
    return f"## {title}\n\n`{command}`\n\n{about}\n\n{shown}"


def _family(run: Run) -> str:
    """What runs that share a table have in common: the title without the model."""
    return run["title"].partition(", ")[0] if run["title"].startswith(TIMES) else run["title"]


def results_page(runs: list[Run]) -> str:
    families: dict[str, list[Run]] = {}
    for each in runs:
        families.setdefault(_family(each), []).append(each)
    shown = [
        side_by_side(alike) if name.startswith(TIMES) else section(alike[0])
        for name, alike in families.items()
    ]
    return "\n".join([INTRODUCTION, *shown])


def readme_table(runs: list[Run]) -> str:
    """The README's methods, at its ratio."""
    rows = next(run["rows"] for run in runs if run["title"] == README_RUN)
    shown = [row for row in rows if row.get("ratio") in README_RATIOS and row["method"] in README_METHODS]
    return table(shown, README_COLUMNS)


def with_table(readme: str, runs: list[Run]) -> str:
    """The README with its table as it is recorded. Raises ValueError where the marks are missing."""
    return between_marks(readme, lambda: readme_table(runs))


def with_programs(text: str, recorded: Mapping[str, Iterable[Row]]) -> str:
    """docs/programs.md with a table of each framework's programs. Raises ValueError where the marks are missing."""
    for framework, rows in recorded.items():
        begin, end = f"<!-- programs of {framework} -->\n", "<!-- end of programs -->"
        before, _, after = text.partition(begin)
        if end not in after:
            raise ValueError(f"{FRAMEWORKS.name} must hold `{begin.strip()}` and, behind it, `{end}`")
        kept = [_of_program(row) for row in rows]
        first = [row["first_cpu"] for row in rows if "first_cpu" in row]
        shown = markdown(list(kept[0]), [list(row.values()) for row in kept])
        shown += f"\n*First question*: {min(first):.2f} to {max(first):.2f}.\n"
        text = before + begin + shown + after[after.index(end) :]
    return text


def _of_program(row: Row) -> dict[str, str]:
    """Its cells, by their headings."""
    return {
        "program": row["program"],
        "of what was retrieved": percent(row["found"] / row["retrieved"]),
    }


def taken(folder: Path, title: str, command: str, says: str) -> Run:
    """What the bench that the command names left in its output folder. Raises ValueError, FileNotFoundError."""
    kinds = [kind for kind in KINDS if kind in command]
    if len(kinds) != 1:
        raise ValueError(f"the command must name one of {', '.join(KINDS)}, and it is: {command}")
    path = folder / f"{kinds[0]}.json"
    if not path.exists():
        raise FileNotFoundError(f"{folder} holds no {path.name}: is it that bench's --output?")
    return _run(read_json(path), title, command, says)


def added(runs: list[Run], run: Run) -> list[Run]:
    """With the run in the place of the one of its title, or behind all."""
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
            if row.get(name) is not None and not (name in OF_FIGURES and row["figures_n"] < FEWEST_FIGURES)
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
        runs = added(runs, taken(add, title, command, says))
    page, readme = results_page(runs), with_table(README.read_text(encoding="utf-8"), runs)
    if add is not None:  # once all can be rendered
        RECORDED.write_text(dumped(runs, 3), encoding="utf-8")
    RESULTS.write_text(page, encoding="utf-8")
    show_programs(read_json(PROGRAMS))
    README.write_text(readme, encoding="utf-8")


def show_programs(recorded: Mapping[str, Iterable[Row]]) -> None:
    """Write them into docs/programs.md."""
    FRAMEWORKS.write_text(with_programs(FRAMEWORKS.read_text(encoding="utf-8"), recorded), encoding="utf-8")


if __name__ == "__main__":
    run(main, __doc__)
