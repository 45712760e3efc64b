"""`ragblend tune`: measure which method and ratio this model does best with, and keep that in the settings."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.bench.cli import Moved, engine_arguments
from ragblend.app.cli_common import Cli, command, plural

if TYPE_CHECKING:
    from ragblend.app.bench.sources import Source
    from ragblend.app.bench.tune import Verdict
    from ragblend.app.settings import Settings


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "tune")(tune)


def tune(
    cli: Cli,
    minutes: Annotated[
        float, typer.Option(help="How long to measure, at most; one question may exceed it.")
    ] = 15,
    most_ratio: Annotated[
        float, typer.Option(help="The largest share of stored tokens to compute again.")
    ] = 0.15,
    docs: Annotated[
        str | None, typer.Option(help="Measure on these ingested documents (a folder, a file, or `all`).")
    ] = None,
    data: Annotated[Path | None, typer.Option(help="Measure on a file of questions.")] = None,
    collection: Annotated[str | None, typer.Option(help="Of --docs.")] = None,
    limit: Annotated[int | None, typer.Option(help="How many questions at most.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which questions, and their order.")] = 0,
    save: Annotated[
        bool | None,
        typer.Option(
            "--save/--no-save",
            help="Keep what was found, also where what stands cannot be compared; or only show it "
            "[keep what is shown to be better].",
            show_default=False,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what was measured before.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Take the last choice for this model back.")] = False,
    generate: Moved = None,
) -> None:
    """Find the method and ratio that this model does best with, on your documents, and use them from now on."""
    from ragblend.app.bench.sources import Source
    from ragblend.app.bench.tune import check_request
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    check_request(minutes, limit)
    home = Home.resolve(cli.home).create()
    given = {"model": cli.model, "device": cli.device, "dtype": cli.dtype, "collection": collection}
    settings = Settings.load(home.settings, overrides=given)
    if undo:
        _undo(cli, home.settings, settings.model)
        return
    source = _with_default(Source(data, docs, home.root, settings.collection, limit, seed, skip=True))
    try:
        found = _measure(cli, source, settings, minutes, most_ratio, home.root / "tune", fresh)
    except KeyboardInterrupt:
        cli.note(
            "Stopped. What was measured is kept; run the same command again to go on. Nothing was changed."
        )
        raise typer.Exit(1) from None
    _finish(cli, found, settings, source, home.settings, save)


def _with_default(source: "Source") -> "Source":
    """The user's own documents, or the samples where there are none."""
    from dataclasses import replace

    from ragblend.app.bench.sources import ALL_DOCUMENTS, ingested
    from ragblend.kvstore.errors import UsageError

    if source.data is not None or source.docs is not None:
        return source
    own = replace(source, docs=ALL_DOCUMENTS)
    try:
        ingested(own)
    except UsageError:
        return source
    return own


def _measure(
    cli: Cli,
    source: "Source",
    settings: "Settings",
    minutes: float,
    most_ratio: float,
    folder: Path,
    fresh: bool,
) -> "Verdict":
    from ragblend.app.bench import tune as tuning
    from ragblend.app.bench.environment import check_extra
    from ragblend.app.bench.quality_report import fitting
    from ragblend.app.bench.sources import read
    from ragblend.app.cli_progress import progress_bar
    from ragblend.engine.engine import Engine
    from ragblend.engine.selection import METHODS

    check_extra()
    stands = tuning.standing(settings.method, settings.ratio)
    variants = tuning.candidates(METHODS, most_ratio, stands)
    questions = read(source)
    engine = Engine.open(**engine_arguments(cli))
    loaded = fitting(engine, questions, tuning.ANSWER_TOKENS)
    for skipped in loaded.skipped:
        cli.note(f"left out  {skipped.reason}")
    cli.note(
        f"Measuring {plural(len(variants), 'candidate')} on {source.name}, for {minutes:g} minutes at most ..."
    )
    journal = tuning.tune_journal(engine, folder, fresh, settings.kv_codec)
    with progress_bar("tuning (seconds)") as progress:
        return tuning.find_best(
            engine,
            loaded.questions,
            variants,
            stands,
            most_ratio,
            journal,
            60 * minutes,
            progress,
            seed=source.seed or 0,
        )


def _finish(
    cli: Cli, found: "Verdict", settings: "Settings", source: "Source", path: Path, save: bool | None
) -> None:
    """Print what was measured, and save it if it is better than what stands, or is asked for all the same."""
    from ragblend.app.tuned import save_choice, tuned_file

    best, saved = found.best, _is_to_be_saved(found, save)
    value = {
        "model": settings.model,
        "method": best.method,
        "ratio": best.ratio,
        "saved": saved,
        "reason": found.reason,
        "data": source.name,
        **{name: part for name, part in asdict(found).items() if name not in ("best", "better", "reason")},
    }
    if saved:
        names = ("reason", "data", "questions", "seconds", "rows", "comparison")
        save_choice(
            tuned_file(path), settings.model, best.method, best.ratio, {name: value[name] for name in names}
        )
    now = settings.load(path, overrides={"model": settings.model})
    in_force = now.method == best.method and best.ratio in (None, now.ratio)
    last = _last_words(found, settings.model, saved, in_force)
    cli.result(value, "\n".join([*_lines(found), *last]))


def _is_to_be_saved(found: "Verdict", save: bool | None) -> bool:
    """save: what the user said, None for nothing."""
    return save is not False and (found.better or (found.on_request and save is True))


def _lines(found: "Verdict") -> list[str]:
    """A line a candidate, the nearest to full prefill first."""
    head = f"{'method':<24}{'ratio':>7}{'KL':>9}{'95% interval':>20}{'TTFT ms':>9}{'questions':>11}"
    rows = sorted([*found.rows, *found.dropped], key=lambda row: row["kl"])
    return [head, *(_line(row) for row in rows)]


def _line(row: dict[str, Any]) -> str:
    ratio = "" if row["ratio"] is None else f"{100 * row['ratio']:g}%"
    ends = "" if row["kl_ci"] is None else f"{row['kl_ci'][0]:.4f} to {row['kl_ci'][1]:.4f}"
    return f"{row['method']:<24}{ratio:>7}{row['kl']:>9.4f}{ends:>20}{row['ttft_ms']:>9.0f}{row['n']:>11}"


def _last_words(found: "Verdict", model: str, saved: bool, in_force: bool) -> list[str]:
    what = f"{found.best} for the model {model!r}"
    questions, minutes = plural(found.questions, "question"), f"{found.seconds / 60:.1f} minutes"
    lines = ["", f"{what}: {found.reason} ({questions}, {minutes})."]
    if saved:
        lines.append(
            "Saved: it is used from now on wherever no method is given. `ragblend tune --undo` takes it back."
        )
        if not in_force:
            lines.append(
                "But a method or ratio in settings.toml or the environment comes first: take it out there to use this."
            )
    elif found.on_request:
        lines.append("Nothing was changed. To use it all the same, run the command again with --save.")
    else:
        lines.append("Nothing was changed.")
    return lines


def _undo(cli: Cli, path: Path, model: str) -> None:
    from ragblend.app.tuned import tuned_file, undo_choice

    undone = undo_choice(tuned_file(path), model)
    if undone is None:
        cli.result(
            {"undone": None}, f"Nothing was tuned for the model {model!r}; there is nothing to take back."
        )
        return
    gone, now = undone
    stands = "the defaults" if now is None else f"{now.method} at {now.ratio} of {now.chosen_at}"
    value = {"undone": {"method": gone.method, "ratio": gone.ratio}}
    value["now"] = None if now is None else {"method": now.method, "ratio": now.ratio}  # type: ignore[assignment]
    cli.result(
        value, f"Taken back: {gone.method} at {gone.ratio}, chosen at {gone.chosen_at}. Now: {stands}."
    )
