"""One run of `bench quality`: measures the questions, and writes JSON, a picture and an HTML report."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.cli.bars import progress_bar
from ragblend.app.quality import quality, sources
from ragblend.app.quality.data import Loaded, Question, Skipped
from ragblend.app.quality.plots import plot_quality
from ragblend.app.quality.prefilling import check_extra, computed_by, environment, model_digest
from ragblend.app.quality.records import Journal, Row, make_folder, write_json
from ragblend.app.quality.summary import EXACT, by_task, comparison_matrix, fastest_within, summarise
from ragblend.app.quality.table import FEWEST_PROMPTS, matrix_table, quality_tables
from ragblend.app.quality.variants import Variant, parse_pairs, parse_variants
from ragblend.kvstore.errors import PromptTooLongError, UsageError

if TYPE_CHECKING:
    from ragblend.app.quality.requests import QualityRequest
    from ragblend.engine.engine import Engine

ANSWER_TOKENS = 32
FIGURE_ANSWER_TOKENS = 40  # enough for every question of --figures, so that --limit changes no answer
ALL_METHODS = "all"
TEMPLATE = Path(__file__).with_name("report.html")
PICTURE = "KL by method, with its 95% interval, and against time, with the Pareto front"


@dataclass(frozen=True)
class ExtraVariants:
    """Variants that are not methods of the engine. settings, code: what their numbers depend on (`run_digest`)."""

    variants: Mapping[Variant, quality.Measure] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    code: tuple[Path, ...] = ()


def report_quality(
    source: sources.QuestionSource,
    engine_arguments: Row,
    request: "QualityRequest",
    others: ExtraVariants | None = None,
) -> Row:
    """Measure what is missing; write `quality.json`, a picture and a report. Returns the results, and `files` by kind.

    engine_arguments: of `Engine.open`. There is a picture only if there are divergences.
    """
    check_extra()
    others = others or ExtraVariants()
    variants, seed = _variants(source, request, others), source.seed or 0
    pairs = parse_pairs(request.compare or (), variants)
    loaded = sources.read(source)
    folder = make_folder(request.output)
    from ragblend.engine.engine import Engine, loaded_here  # heavy, so only after the arguments were checked

    engine = loaded_here(Engine.open(**engine_arguments), "comparing methods")
    # Not the engine's: a shared engine has the codec that it was opened with last.
    kv_codec = engine_arguments.get("kv_codec") or "raw"
    asked = request.max_new_tokens or (FIGURE_ANSWER_TOKENS if source.figures else None)
    most_tokens = answer_tokens(engine, loaded.questions, asked)
    if source.skip:  # else `quality.run` names the first one before it measures anything
        loaded = fitting(engine, loaded, most_tokens)
    journal = quality_journal(engine, folder, request.fresh, kv_codec, most_tokens, others)
    with progress_bar("measuring") as progress:
        quality.run(
            engine,
            loaded.questions,
            variants,
            journal,
            max_new_tokens=most_tokens,
            seed=seed,
            keep_kv=request.keep_kv,
            progress=progress,
            others=others.variants,
            figures_only=source.figures,
        )
    questions = _answered_rightly(engine, loaded.questions, journal) if source.figures else loaded.questions
    settings = {
        "data": source.name,
        "questions": len(questions),
        "asked": len(loaded.questions),
        "seed": source.seed,
        "passages": source.passages,
        "resumed_records": journal.resumed,
        "instruction": quality.INSTRUCTION,
        "skipped": [asdict(each) for each in loaded.skipped],
        "max_new_tokens": most_tokens,
        "modes": others.settings,
    }
    where = environment(engine) | {"kv_codec": kv_codec}
    measured = journal.records, questions, variants, seed
    rows, comparisons = summarise(*measured, pairs)
    results = {
        "rows": rows,
        "comparisons": comparisons,
        "matrix": comparison_matrix(*measured),
        "tasks": by_task(*measured),
        "within": fastest_within(rows),
        "environment": where,
        "settings": settings,
    }
    return _write(folder, results)


def _variants(
    source: sources.QuestionSource, request: "QualityRequest", others: ExtraVariants
) -> tuple[Variant, ...]:
    """All variants to measure; questions about figures need full prefill among them. Raises UsageError."""
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO, method_names

    methods = tuple[Variant, ...]()
    if request.methods:
        names = with_all(request.methods, METHODS)
        methods = parse_variants(names, request.ratios, method_names(), WITHOUT_RATIO)
    if source.figures and Variant("full") not in methods:
        methods = (Variant("full"), *methods)
    return (*methods, *others.variants)


def _answered_rightly(engine: "Engine", questions: list[Question], journal: Journal) -> list[Question]:
    """The questions whose figures full prefill has right. Raises UsageError if there are none."""
    found = [q for q in questions if journal.records[q.digest, "full", None].figures_kept is not None]
    if not found:
        raise UsageError(
            f"--figures: {engine.model_name} answers none of the {len(questions)} questions rightly by full "
            "prefill, so there is nothing to compare; measure a larger model"
        )
    return found


def with_all(methods: str, known: dict[str, Any]) -> str:
    """Replace `all` in a list of methods by every policy that can differ from full prefill, and `full`."""
    names = [name for name, policy in known.items() if name not in EXACT and not policy.uses_tree]
    every = ",".join(["full", *names])
    return ",".join(every if item.strip() == ALL_METHODS else item for item in methods.split(","))


def answer_tokens(engine: "Engine", questions: list[Question], asked: int | None) -> int:
    """The longest answer in tokens: as asked for, else enough for the longest gold answer that must be exact."""
    if asked is not None:
        return asked
    longest = max((engine.count_tokens(q.answers[0]) for q in questions if q.required), default=0)
    return max(ANSWER_TOKENS, longest + longest // 2 + 8 if longest else 0)


def fitting(engine: "Engine", loaded: Loaded, max_new_tokens: int) -> Loaded:
    """Drop, and report, the questions that do not fit the model's window. Raises UsageError if none fits."""
    kept, skipped = [], list(loaded.skipped)
    for question in loaded.questions:
        try:
            quality.build_prompt(engine, question, max_new_tokens)
            kept.append(question)
        except PromptTooLongError as error:
            skipped.append(Skipped(question.place, str(error)))
    if not kept:
        raise UsageError(
            f"no question is left: {len(skipped)} were skipped, the last because {skipped[-1].reason}"
        )
    return Loaded(kept, tuple(skipped))


def quality_journal(
    engine: "Engine",
    folder: Path,
    fresh: bool,
    kv_codec: str,
    max_new_tokens: int,
    others: ExtraVariants = ExtraVariants(),
) -> Journal:
    """Open the journal, whose name is a digest of everything its records depend on and do not contain."""
    settings: Row = {
        "model": model_digest(engine),
        "device": engine.device,
        "kv_codec": kv_codec,
        "max_new_tokens": max_new_tokens,
        "instruction": quality.INSTRUCTION,
    }
    if others.settings is not None:
        settings["modes"] = dict(others.settings)
    return Journal(folder / f"quality-{computed_by(settings, tuple(others.code))}.jsonl", fresh)


def _write(folder: Path, results: Row) -> Row:
    files = {"json": folder / "quality.json", "html": folder / "report.html"}
    pictures: dict[str, Path] = {}
    compared = [row for row in results["rows"] if row["kl"] is not None]
    if compared:
        files["png"] = pictures[PICTURE] = folder / "quality.png"
        plot_quality(compared, _title(results), files["png"])
    files["html"].write_text(report_page(results, pictures), encoding="utf-8")
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
    if what["questions"] < FEWEST_PROMPTS:
        found.append(f"{what['questions']} prompts settle nothing; measure {FEWEST_PROMPTS} or more.")
    if what["skipped"]:
        named = "; ".join(each["reason"] for each in what["skipped"][:5])
        more = f" and {len(what['skipped']) - 5} more" if len(what["skipped"]) > 5 else ""
        found.append(f"{len(what['skipped'])} records were left out: {named}{more}.")
    for row in rows:
        spent, name = row["recomputed_fraction"] or 0, row["method"]
        if row["ratio"] is not None and spent > row["ratio"] + 0.01:
            found.append(f"{name} at {row['ratio']:.1%} recomputed {spent:.1%}, more than its budget.")
        if row["unscored"]:
            found.append(f"{name}: {row['unscored'] / row['calls']:.1%} of its answers have no score.")
    return found
