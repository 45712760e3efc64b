"""One `bench quality`: questions and engine in; rows, comparisons, JSON, picture and the report out."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench import quality, sources
from ragblend.app.bench.data import Loaded, Question, Skipped
from ragblend.app.bench.environment import check_extra, environment
from ragblend.app.bench.plots import plot_quality
from ragblend.app.bench.prefilling import model_digest
from ragblend.app.bench.records import Journal, make_folder, run_digest, write_json
from ragblend.app.bench.report import report_page
from ragblend.app.bench.summary import by_task, comparison_matrix, summarise
from ragblend.app.bench.variants import Pair, Variant, parse_pairs, parse_variants
from ragblend.app.cli_progress import progress_bar
from ragblend.kvstore.errors import PromptTooLongError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ANSWER_TOKENS = 32  # design.md, section 8
ALL_METHODS = "all"
NOT_COMPARED = ("prefix", "recompute")  # full prefill by other ways: exact


@dataclass(frozen=True)
class QualityRequest:
    """The arguments of `bench quality`; engine: the keyword arguments of `Engine.open`.

    max_new_tokens: None: `ANSWER_TOKENS`, or more where an exact answer needs more; compare: as `parse_pairs` has it.
    """

    source: sources.Source
    engine: dict[str, Any]
    methods: str
    ratios: str
    max_new_tokens: int | None
    output: Path
    fresh: bool
    keep_kv: bool
    compare: tuple[str, ...] = ()

    @property
    def kv_codec(self) -> str:
        """How stored KV is packed: an engine that others use as well takes the one it was opened with last."""
        return self.engine.get("kv_codec") or "raw"

    @property
    def seed(self) -> int:
        return self.source.seed or 0


@dataclass(frozen=True)
class Others:
    """What is measured beside the methods: how each is, and, for the journal's name, what their numbers depend on."""

    variants: Mapping[Variant, quality.Measure] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    code: tuple[Path, ...] = ()


def report_quality(request: QualityRequest, others: Others | None = None) -> dict[str, Any]:
    """Measure what is missing; write `quality.json`, the picture and the report. The results, and `files` by kind.

    The picture is of divergences; where there are none there is no picture.
    """
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO, method_names

    check_extra()
    others = others or Others()
    methods: tuple[Variant, ...] = ()
    if request.methods:
        names = with_all(request.methods, METHODS)
        methods = parse_variants(names, request.ratios, method_names(), WITHOUT_RATIO)
    variants = (*methods, *others.variants)
    pairs = parse_pairs(request.compare, variants)
    loaded = sources.read(request.source)
    folder = make_folder(request.output)
    from ragblend.engine.engine import Engine  # once all that was asked for is known to be possible

    engine = Engine.open(**request.engine)
    most_tokens = answer_tokens(engine, loaded.questions, request.max_new_tokens)
    if request.source.skip:  # else `quality.run` names the first one before it measures anything
        loaded = fitting(engine, loaded, most_tokens)
    journal = _journal(folder, engine, request, most_tokens, others)
    with progress_bar("measuring") as progress:
        quality.run(
            engine,
            loaded.questions,
            variants,
            journal,
            max_new_tokens=most_tokens,
            seed=request.seed,
            keep_kv=request.keep_kv,
            progress=progress,
            others=others.variants,
        )
    results = _results(engine, request, loaded, variants, pairs, journal)
    results["settings"] |= {"max_new_tokens": most_tokens, "modes": others.settings}
    return _write(folder, results)


def with_all(methods: str, known: dict[str, Any]) -> str:
    """The list, with every policy of the engine that there is something to learn about in the place of `all`."""
    every = ",".join(name for name in known if name not in NOT_COMPARED)
    return ",".join(every if item.strip() == ALL_METHODS else item for item in methods.split(","))


def answer_tokens(engine: "Engine", questions: list[Question], asked: int | None) -> int:
    """How long answers may be: what was asked for, else enough for the longest that must be exact."""
    if asked is not None:
        return asked
    longest = max((engine.count_tokens(q.answers[0]) for q in questions if q.required), default=0)
    return max(ANSWER_TOKENS, longest + longest // 2 + 8 if longest else 0)


def fitting(engine: "Engine", loaded: Loaded, max_new_tokens: int) -> Loaded:
    """Without the questions that do not fit the window, which are said. Raises UsageError if none does."""
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


def _journal(
    folder: Path, engine: "Engine", request: QualityRequest, most_tokens: int, others: Others
) -> Journal:
    """The file is named by a digest over what its records depend on and do not say themselves."""
    settings = measured_settings(engine, most_tokens, request.kv_codec)
    if others.settings is not None:
        settings |= {"modes": dict(others.settings)}
    digest = run_digest(settings, (*measured_code(), *others.code))
    return Journal(folder / f"quality-{digest}.jsonl", request.fresh)


def measured_code() -> tuple[Path, ...]:
    """The source files that a number comes from."""
    import ragblend.engine
    import ragblend.kvstore

    return tuple(Path(package.__path__[0]) for package in (ragblend.engine, ragblend.kvstore))


def measured_settings(engine: "Engine", max_new_tokens: int, kv_codec: str) -> dict[str, Any]:
    """What a number depends on beside the question, the method, the ratio and the code."""
    import torch

    return {
        "model": model_digest(engine),
        "device": engine.device,
        "kv_codec": kv_codec,
        "torch": torch.__version__,
        "max_new_tokens": max_new_tokens,
        "instruction": quality.INSTRUCTION,
    }


def _results(
    engine: "Engine",
    request: QualityRequest,
    loaded: Loaded,
    variants: tuple[Variant, ...],
    pairs: tuple[Pair, ...],
    journal: Journal,
) -> dict[str, Any]:
    questions, seed = loaded.questions, request.seed
    rows, comparisons = summarise(journal.records, questions, variants, seed, pairs)
    return {
        "rows": rows,
        "comparisons": comparisons,
        "matrix": comparison_matrix(journal.records, questions, variants, seed),
        "tasks": by_task(journal.records, questions, variants, seed),
        "environment": environment(engine) | {"kv_codec": request.kv_codec},
        "settings": {
            "data": request.source.name,
            "questions": len(questions),
            "seed": request.source.seed,
            "passages": request.source.passages,
            "resumed_records": journal.resumed,
            "instruction": quality.INSTRUCTION,
            "skipped": [dataclasses.asdict(each) for each in loaded.skipped],
        },
    }


def _write(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    files = {"json": folder / "quality.json", "html": folder / "report.html"}
    pictures: dict[str, Path] = {}
    compared = [row for row in results["rows"] if row["kl"] is not None]
    if compared:
        files["png"] = folder / "quality.png"
        plot_quality(compared, _title(results), files["png"])
        pictures["KL by method, with its 95% interval, and against time, with the Pareto front"] = files[
            "png"
        ]
    files["html"].write_text(report_page(results, pictures), encoding="utf-8")
    write_json(files["json"], results)
    return results | {"files": {kind: str(path) for kind, path in files.items()}}


def _title(results: dict[str, Any]) -> str:
    where = results["environment"]
    packed = "" if where["kv_codec"] == "raw" else f", {where['kv_codec']} KV"
    device = where["gpu"] or where["cpu"]
    return f"{where['model']}, {where['dtype']}{packed} on {device}, {results['settings']['questions']} questions"
