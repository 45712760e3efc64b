"""One `bench quality`: questions and engine in; rows, comparisons, JSON, pictures and the report out."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench import modes, quality, sources
from ragblend.app.bench.data import Loaded, Question, Skipped
from ragblend.app.bench.environment import check_extra, environment
from ragblend.app.bench.pairs import Pair, parse_pairs
from ragblend.app.bench.prefilling import model_digest
from ragblend.app.bench.progress import progress_bar
from ragblend.app.bench.records import Journal, run_digest
from ragblend.app.bench.report_files import Report, write_report
from ragblend.app.bench.results import make_folder, write_json
from ragblend.app.bench.summary import by_task, comparison_matrix, summarise
from ragblend.app.bench.variants import MODES, Variant, parse_variants
from ragblend.kvstore.errors import PromptTooLongError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ANSWER_TOKENS = 32  # design.md, section 8
ALL_METHODS = "all"
NOT_COMPARED = ("prefix", "recompute")  # full prefill by other ways: exact


@dataclass(frozen=True)
class QualityRequest:
    """The arguments of `bench quality`; engine: the keyword arguments of `Engine.open`.

    max_new_tokens: None for `ANSWER_TOKENS`, or more where an exact answer needs more; compare: pairs as in `pairs.py`;
    inspect: how many prompts the report shows token by token.
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
    inspect: int = 0

    @property
    def kv_codec(self) -> str:
        """How stored KV is packed: an engine that others use as well takes the one it was opened with last."""
        return self.engine.get("kv_codec") or "raw"

    @property
    def seed(self) -> int:
        return self.source.seed or 0


def report_quality(request: QualityRequest) -> dict[str, Any]:
    """Measure what is missing; write `quality.json`, the pictures and the report. The results, and `files` by kind.

    The pictures are of divergences; where nothing but modes was measured there are none.
    """
    from ragblend.engine.engine import Engine
    from ragblend.engine.selection import METHODS, ORACLES, WITHOUT_RATIO

    check_extra()
    names = with_all(request.methods, METHODS)
    variants = parse_variants(names, request.ratios, METHODS | ORACLES, WITHOUT_RATIO, MODES)
    pairs = parse_pairs(request.compare, variants)
    if any(variant.mode is not None for variant in variants):
        modes.check_packages(variants)
    make = sources.prepare(request.source)
    folder = make_folder(request.output)
    engine = Engine.open(**request.engine)
    loaded = make(engine)
    request = dataclasses.replace(
        request, max_new_tokens=answer_tokens(engine, loaded.questions, request.max_new_tokens)
    )
    if request.source.skip:  # else `quality.run` names the first one before it measures anything
        loaded = fitting(engine, loaded, request.max_new_tokens or ANSWER_TOKENS)
    journal = _journal(folder, engine, request, variants)
    with progress_bar("measuring") as progress:
        quality.run(
            engine,
            loaded.questions,
            variants,
            journal,
            max_new_tokens=request.max_new_tokens or ANSWER_TOKENS,
            seed=request.seed,
            keep_kv=request.keep_kv,
            progress=progress,
        )
    results = _results(engine, request, loaded, variants, pairs, journal)
    return _write(folder, engine, request, Report(results, loaded.questions, variants, journal))


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
    folder: Path, engine: "Engine", request: QualityRequest, variants: tuple[Variant, ...]
) -> Journal:
    """Each file is named by a digest over what its records depend on and do not say themselves."""
    import ragblend.integrations

    settings = measured_settings(engine, request.max_new_tokens or ANSWER_TOKENS, request.kv_codec)
    code = measured_code()
    path = folder / f"quality-{run_digest(settings, code)}.jsonl"
    if not any(variant.mode is not None for variant in variants):
        return Journal(path, request.fresh)
    settings |= {"modes": modes.settings()}
    code += (Path(ragblend.integrations.__path__[0]),)
    return Journal(path, request.fresh, folder / f"modes-{run_digest(settings, code)}.jsonl")


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
            "max_new_tokens": request.max_new_tokens,
            "seed": request.source.seed,
            "passages": request.source.passages,
            "resumed_records": journal.resumed,
            "instruction": quality.INSTRUCTION,
            "modes": modes.settings() if any(variant.mode is not None for variant in variants) else None,
            "skipped": [dataclasses.asdict(each) for each in loaded.skipped],
        },
    }


def _write(folder: Path, engine: "Engine", request: QualityRequest, report: Report) -> dict[str, Any]:
    files = write_report(
        folder, engine, report, request.inspect, request.fresh, request.max_new_tokens or ANSWER_TOKENS
    )
    write_json(folder / "quality.json", report.results)
    return report.results | {"files": {"json": str(folder / "quality.json"), **files}}
