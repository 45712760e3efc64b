"""One `bench quality`: questions and engine in; rows, comparisons, JSON and picture out."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench import modes, quality
from ragblend.app.bench.data import Question, choose, load_questions
from ragblend.app.bench.environment import check_extra, environment
from ragblend.app.bench.plots import plot_quality
from ragblend.app.bench.prefilling import model_digest
from ragblend.app.bench.progress import progress_bar
from ragblend.app.bench.records import Journal, run_digest
from ragblend.app.bench.results import make_folder, write_json
from ragblend.app.bench.summary import summarise
from ragblend.app.bench.variants import MODES, Variant, parse_variants

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine


@dataclass(frozen=True)
class QualityRequest:
    """The arguments of `bench quality`; engine: the keyword arguments of `Engine.open`."""

    data: Path | None
    engine: dict[str, Any]
    methods: str
    ratios: str
    limit: int | None
    seed: int | None
    passages: int | None
    max_new_tokens: int
    output: Path
    fresh: bool
    keep_kv: bool


def report_quality(request: QualityRequest) -> dict[str, Any]:
    """Measure what is missing; write `quality.json` and `quality.png`. The results, and `files` by kind.

    The picture is of divergences; where nothing but modes was measured there is none.
    """
    from ragblend.engine.engine import Engine
    from ragblend.engine.selection import METHODS, ORACLES, WITHOUT_RATIO

    check_extra()
    variants = parse_variants(request.methods, request.ratios, METHODS | ORACLES, WITHOUT_RATIO, MODES)
    if any(variant.mode is not None for variant in variants):
        modes.check_packages()
    questions = choose(_questions(request.data), request.limit, request.seed, request.passages)
    folder = make_folder(request.output)
    engine = Engine.open(**request.engine)
    journal = _journal(folder, engine, request, variants)
    with progress_bar("measuring") as progress:
        quality.run(
            engine,
            questions,
            variants,
            journal,
            max_new_tokens=request.max_new_tokens,
            seed=request.seed or 0,
            keep_kv=request.keep_kv,
            progress=progress,
        )
    return _write(folder, request, _results(engine, request, questions, variants, journal))


def _questions(data: Path | None) -> list[Question]:
    if data is not None:
        return load_questions(data)
    from ragblend.app.bench.samples_data import sample_questions

    return sample_questions()


def _journal(
    folder: Path, engine: "Engine", request: QualityRequest, variants: tuple[Variant, ...]
) -> Journal:
    """Each file is named by a digest over what its records depend on and do not say themselves."""
    import ragblend.engine
    import ragblend.integrations
    import ragblend.kvstore

    settings = _settings(engine, request)
    code = tuple(Path(package.__path__[0]) for package in (ragblend.engine, ragblend.kvstore))
    path = folder / f"quality-{run_digest(settings, code)}.jsonl"
    if not any(variant.mode is not None for variant in variants):
        return Journal(path, request.fresh)
    settings |= {"modes": modes.settings()}
    code += (Path(ragblend.integrations.__path__[0]),)
    return Journal(path, request.fresh, folder / f"modes-{run_digest(settings, code)}.jsonl")


def _settings(engine: "Engine", request: QualityRequest) -> dict[str, Any]:
    import torch

    return {
        "model": model_digest(engine),
        "device": engine.device,
        "torch": torch.__version__,
        "max_new_tokens": request.max_new_tokens,
        "instruction": quality.INSTRUCTION,
    }


def _results(
    engine: "Engine",
    request: QualityRequest,
    questions: list[Question],
    variants: tuple[Variant, ...],
    journal: Journal,
) -> dict[str, Any]:
    rows, comparisons = summarise(journal.records, questions, variants, request.seed or 0)
    return {
        "rows": rows,
        "comparisons": comparisons,
        "environment": environment(engine),
        "settings": {
            "data": "samples" if request.data is None else request.data.name,
            "questions": len(questions),
            "max_new_tokens": request.max_new_tokens,
            "seed": request.seed,
            "passages": request.passages,
            "resumed_records": journal.resumed,
            "instruction": quality.INSTRUCTION,
            "modes": modes.settings() if any(variant.mode is not None for variant in variants) else None,
        },
    }


def _write(folder: Path, request: QualityRequest, results: dict[str, Any]) -> dict[str, Any]:
    where, what = results["environment"], results["settings"]
    title = (
        f"{where['model']}, {where['dtype']} on {where['gpu'] or where['cpu']}, {what['questions']} questions"
    )
    write_json(folder / "quality.json", results)
    compared = [row for row in results["rows"] if row["kl"] is not None]
    if compared:
        plot_quality(compared, title, folder / "quality.png")
    kinds = ("json", "png") if compared else ("json",)
    return results | {"files": {kind: str(folder / f"quality.{kind}") for kind in kinds}}
