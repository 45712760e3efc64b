"""One run of each bench: opens the engine, measures, and writes the results into the output folder."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.answering.timeline import SUFFIXES, write_timeline
from ragblend.app.cli.bars import progress_bar
from ragblend.app.extras import check_installed
from ragblend.app.quality import sources
from ragblend.kvstore.errors import UsageError
from ragblend.measuring import quality, ttft
from ragblend.measuring.data import Question, load
from ragblend.measuring.plots import plot_ttft
from ragblend.measuring.prefilling import environment, model_digest
from ragblend.measuring.records import Journal, Row, make_folder, write_json
from ragblend.measuring.report import write_report
from ragblend.measuring.summary import by_task, comparison_matrix, fastest_within, summarise
from ragblend.measuring.variants import (
    Variant,
    expand_all,
    parse_choices,
    parse_counts,
    parse_pairs,
    parse_variants,
)

if TYPE_CHECKING:
    from ragblend.app.quality.requests import QualityRequest, TtftRequest
    from ragblend.engine.engine import Engine
    from ragblend.engine.trace import Trace

FIGURE_ANSWER_TOKENS = 40  # enough for every question of --figures, so that --limit changes no answer
MEMORY_BYTES = 1 << 34


def check_extra() -> None:
    """Raise UsageError if a package of the extra `bench` is missing, before hours of measuring."""
    check_installed("The benches", ("jinja2", "matplotlib", "rouge_score", "scipy"), "bench")


def open_engine(arguments: Mapping[str, Any], purpose: str, **more: Any) -> "Engine":
    """`Engine.open` with these arguments. Raises UsageError for an engine whose model is not in this process."""
    from ragblend.engine.engine import (
        Engine,
        require_local_engine,
    )  # heavy, so only after the arguments were checked

    return require_local_engine(Engine.open(**arguments, **more), purpose)


def report_quality(source: sources.QuestionSource, engine_arguments: Row, request: "QualityRequest") -> Row:
    """Measure what is missing, and write `quality.json`, a picture and a report. Returns the results, and `files`.

    engine_arguments: of `Engine.open`.
    """
    check_extra()
    variants, seed = _variants(source, request), source.seed or 0
    pairs = parse_pairs(request.compare or (), variants)
    loaded = sources.read(source)
    folder = make_folder(request.output)
    engine = open_engine(engine_arguments, "comparing methods")
    # Not the engine's: a shared engine has the codec that it was opened with last.
    kv_codec = engine_arguments.get("kv_codec") or "raw"
    wanted_tokens = request.max_new_tokens or (FIGURE_ANSWER_TOKENS if source.figures else None)
    max_new_tokens = quality.answer_tokens(engine, loaded.questions, wanted_tokens)
    if source.skip:  # else `quality.run` raises for a question that does not fit, before it measures anything
        loaded = quality.fitting(engine, loaded, max_new_tokens)
    journal = quality.open_journal(engine, folder, request.fresh, kv_codec, max_new_tokens)
    with progress_bar("measuring") as progress:
        quality.run(
            engine,
            loaded.questions,
            variants,
            journal,
            max_new_tokens=max_new_tokens,
            seed=seed,
            keep_kv=request.keep_kv,
            progress=progress,
            figures_only=source.figures,
        )
    questions = _answered_rightly(engine, loaded.questions, journal) if source.figures else loaded.questions
    measured = journal.records, questions, variants, seed
    rows, comparisons = summarise(*measured, pairs)
    results = {
        "rows": rows,
        "comparisons": comparisons,
        "matrix": comparison_matrix(*measured),
        "tasks": by_task(*measured),
        "within": fastest_within(rows),
        "environment": environment(engine) | {"kv_codec": kv_codec},
        "settings": {
            "data": source.name,
            "questions": len(questions),
            "asked": len(loaded.questions),
            "seed": source.seed,
            "passages": source.passages,
            "resumed_records": journal.resumed,
            "instruction": quality.INSTRUCTION,
            "skipped": [asdict(each) for each in loaded.skipped],
            "max_new_tokens": max_new_tokens,
        },
    }
    return write_report(folder, results)


def _variants(source: sources.QuestionSource, request: "QualityRequest") -> tuple[Variant, ...]:
    """All variants to measure; questions about figures need full prefill among them. Raises UsageError."""
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO, method_names

    names = expand_all(request.methods, METHODS)
    methods = parse_variants(names, request.ratios, method_names(), WITHOUT_RATIO)
    if source.figures and Variant("full") not in methods:
        methods = (Variant("full"), *methods)
    return methods


def _answered_rightly(engine: "Engine", questions: list[Question], journal: Journal) -> list[Question]:
    """The questions whose figures full prefill has right. Raises UsageError if there are none."""
    found = [q for q in questions if journal.records[q.digest, "full", None].figures_kept is not None]
    if not found:
        raise UsageError(
            f"--figures: {engine.model_name} answers none of the {len(questions)} questions rightly by full "
            "prefill, so there is nothing to compare; measure a larger model"
        )
    return found


def report_ttft(engine_arguments: Row, request: "TtftRequest") -> Row:
    """Measure, and write `ttft.json`, `ttft.png` and a timeline per row. Returns the results, and `files` by kind."""
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO

    check_extra()
    plan = ttft.TtftPlan(
        variants=parse_variants(request.methods, request.ratios, METHODS, WITHOUT_RATIO),
        chunks=parse_counts(request.chunks, "--chunks"),
        tokens=parse_counts(request.tokens, "--tokens"),
        caches=parse_choices(request.caches, "--caches", ttft.CACHES),
        repeats=request.repeats,
    )
    if request.data is None:
        text = sources.sample_text()
    else:
        questions = load(request.data, skip=True).questions
        text = "\n\n".join(passage for question in questions for passage in question.passages)
    folder = make_folder(request.output)
    memory_bytes = MEMORY_BYTES if "memory" in plan.caches else None
    # No tier on the device: copying to it after an answer would be timed with the next one.
    tiers = {"memory_budget_bytes": memory_bytes, "device_budget_bytes": 0}
    engine = open_engine(engine_arguments, "measuring the device", **tiers)
    # The child process has to open the same home and device that this one chose.
    chosen = {"home": str(engine.home), "device": engine.device, "dtype": engine.dtype}
    child = engine_arguments | chosen if request.memory else None
    model_digest(engine)  # raises at once for a model that cannot be fused
    with retriever(engine.home) as retrieve, progress_bar("prefilling") as progress:
        rows = ttft.run(engine, text, plan, retrieve, child, progress, partial(_write_timelines, folder))
    machine = environment(engine)
    title = f"Time to the first token: {machine['model']}, {machine['dtype']} on {machine['gpu'] or machine['cpu']}"
    results = {"rows": rows, "environment": machine}
    write_json(folder / "ttft.json", results)
    plot_ttft(rows, title, folder / "ttft.png")
    return results | {"files": {kind: str(folder / f"ttft.{kind}") for kind in ("json", "png")}}


@contextmanager
def retriever(home: Path) -> Iterator[Callable[[str, int], object] | None]:
    """A function that retrieves from the documents of that home, its models loaded; None if nothing was ingested."""
    from ragblend.app.answering.retrieval import search
    from ragblend.app.workspace import Workspace

    with Workspace.open(home) as workspace:
        if not (
            workspace.home.library.exists()
            and workspace.library.count_passages(workspace.settings.collection)
        ):
            yield None
            return
        workspace.embedder.load()
        yield lambda question, count: search([workspace], question, count)


def _write_timelines(folder: Path, row: Row, trace: "Trace") -> None:
    """Write a row's trace as a picture and for a trace viewer."""
    share = "" if row["ratio"] is None else f"-{100 * row['ratio']:g}"
    case = f"{row['method']}{share}-{row['chunks']}x{row['tokens']}-{row['cache']}"
    title = f"{case}: first token after {row['ttft_ms']:.0f} ms (median of {row['repeats']})"
    for suffix in SUFFIXES:
        write_timeline(trace, title, folder / f"timeline-{case}{suffix}")
