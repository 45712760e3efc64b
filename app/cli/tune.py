"""`ragblend tune`: measure which method and ratio suit this model best, and use them from then on."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ragblend.app.cli.common import Cli, option
from ragblend.app.quality.cli import engine_arguments, settings_of
from ragblend.app.quality.sources import ALL_DOCUMENTS, QuestionSource, ingested, read
from ragblend.app.tuned import save_choice, tuned_file, undo_choice
from ragblend.app.words import plural
from ragblend.engine.config import DEFAULT_RATIO
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.app.settings import Settings
    from ragblend.measuring.tune import TuneResult


@dataclass(frozen=True)
class TuneOptions:
    """What to measure, and whether to save the result. save None: only if it is shown to be better."""

    minutes: float = option(15, "Longest time to measure; the question under way is finished.")
    most_ratio: float = option(DEFAULT_RATIO, "The largest share of stored tokens to recompute.")
    docs: str | None = option(None, "Measure on these ingested documents (a folder, a file, or `all`).")
    data: Path | None = option(None, "Measure on a file of questions.")
    collection: str | None = option(None, "Collection of --docs.")
    limit: int | None = option(None, "How many questions at most.", advanced=True)
    seed: int = option(0, "Seed that chooses and orders the questions.", min=0, advanced=True)
    save: bool | None = option(
        None,
        "Save the result even if it cannot be compared with the present setting, or only show it "
        "(default: save it if it is shown to be better).",
        "--save/--no-save",
        show_default=False,
    )
    fresh: bool = option(False, "Discard earlier measurements.", "--fresh", advanced=True)
    undo: bool = option(False, "Undo the last choice for this model.", "--undo")


def tune(cli: Cli, options: TuneOptions) -> None:
    """Find the method and ratio that suit this model best, on your documents, and use them from now on."""
    from ragblend.measuring.tune import check_request

    check_request(options.minutes, options.limit)
    home = cli.create_home()
    settings = settings_of(cli, collection=options.collection)
    if options.undo:
        _undo(cli, home.settings, settings.model)
        return
    source = _documents_or_samples(
        QuestionSource(
            data=options.data,
            docs=options.docs,
            collection=settings.collection,
            limit=options.limit,
            seed=options.seed,
            skip=True,
            home=home.root,
        )
    )
    try:
        found = _measure(cli, source, settings, options, home.root / "tune")
    except KeyboardInterrupt:
        cli.note(
            "Stopped. Measurements are kept; run the same command again to continue. Nothing was changed."
        )
        raise typer.Exit(1) from None
    _finish(cli, found, settings, source, home.settings, options.save)


def _documents_or_samples(source: QuestionSource) -> QuestionSource:
    """The user's own documents, or the samples if there are none."""
    if source.data is not None or source.docs is not None:
        return source
    own = replace(source, docs=ALL_DOCUMENTS)
    try:
        ingested(own)
    except UsageError:
        return source
    return own


def _measure(
    cli: Cli, source: QuestionSource, settings: "Settings", options: TuneOptions, folder: Path
) -> "TuneResult":
    from ragblend.app.cli.bars import progress_bar
    from ragblend.app.quality.runs import check_extra, open_engine
    from ragblend.engine.selection import METHODS
    from ragblend.measuring import tune as tuning
    from ragblend.measuring.quality import fitting, open_journal

    check_extra()
    current = tuning.current_variant(settings.method, settings.ratio)
    variants = tuning.candidates(METHODS, options.most_ratio, current)
    questions = read(source)
    engine = open_engine(engine_arguments(cli), "comparing methods")
    loaded = fitting(engine, questions, tuning.ANSWER_TOKENS)
    for skipped in loaded.skipped:
        cli.note(f"left out  {skipped.reason}")
    cli.note(
        f"Measuring {plural(len(variants), 'candidate')} on {source.name}, for {options.minutes:g} minutes at most ..."
    )
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    journal = open_journal(engine, folder, options.fresh, settings.kv_codec, tuning.ANSWER_TOKENS)
    with progress_bar("tuning (seconds)") as progress:
        return tuning.find_best(
            engine,
            loaded.questions,
            variants,
            current,
            options.most_ratio,
            journal,
            60 * options.minutes,
            progress,
            seed=options.seed,
        )


def _finish(
    cli: Cli, found: "TuneResult", settings: "Settings", source: QuestionSource, path: Path, save: bool | None
) -> None:
    """Save the result if it is better than the present setting, or if the user insists; then print it."""
    best = found.best
    saved = save is not False and (found.better or (found.on_request and save is True))
    value = asdict(found) | {"model": settings.model, "saved": saved, "data": source.name, **asdict(best)}
    del value["best"], value["better"]
    if saved:
        names = ("reason", "data", "questions", "seconds", "rows", "comparison")
        measured = {name: value[name] for name in names}
        save_choice(tuned_file(path), settings.model, best.method, best.ratio, measured)
    now = settings.read(path, overrides={"model": settings.model})
    in_force = now.method == best.method and best.ratio in (None, now.ratio)
    conclusion = _conclusion(found, settings.model, saved, in_force)
    cli.result(value, "\n".join([*_table(found), *conclusion]))


def _table(found: "TuneResult") -> list[str]:
    head = f"{'method':<24}{'ratio':>7}{'KL':>9}{'95% interval':>20}{'TTFT ms':>9}{'questions':>11}"
    rows = sorted([*found.rows, *found.dropped], key=lambda row: row["kl"])
    return [head, *(_table_row(row) for row in rows)]


def _table_row(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None else f"{100 * row['ratio']:g}%"
    interval = "" if row["kl_ci"] is None else f"{row['kl_ci'][0]:.4f} to {row['kl_ci'][1]:.4f}"
    return f"{row['method']:<24}{ratio:>7}{row['kl']:>9.4f}{interval:>20}{row['ttft_ms']:>9.0f}{row['n']:>11}"


def _conclusion(found: "TuneResult", model: str, saved: bool, in_force: bool) -> list[str]:
    what = f"{found.best} for the model {model!r}"
    questions, minutes = plural(found.questions, "question"), f"{found.seconds / 60:.1f} minutes"
    lines = ["", f"{what}: {found.reason} ({questions}, {minutes})."]
    if saved:
        lines.append(
            "Saved: it is used from now on wherever no method is given. `ragblend tune --undo` reverts it."
        )
        if not in_force:
            lines.append(
                "But a method or ratio in settings.toml or the environment takes precedence: remove it there."
            )
    elif found.on_request:
        lines.append("Nothing was changed. To use it all the same, run the command again with --save.")
    else:
        lines.append("Nothing was changed.")
    return lines


def _undo(cli: Cli, path: Path, model: str) -> None:
    undone = undo_choice(tuned_file(path), model)
    if undone is None:
        cli.result({"undone": None}, f"Nothing was tuned for the model {model!r}; there is nothing to undo.")
        return
    from ragblend.measuring.variants import Variant

    removed, now = undone
    variant = Variant(removed.method, removed.ratio)
    current = "the defaults" if now is None else f"{Variant(now.method, now.ratio)} of {now.chosen_at}"
    value = {
        "undone": {"method": removed.method, "ratio": removed.ratio},
        "now": None if now is None else {"method": now.method, "ratio": now.ratio},
    }
    cli.result(value, f"Undone: {variant}, chosen at {removed.chosen_at}. Now: {current}.")
