"""`ragblend bench ...`: arguments in, tables or JSON out; the work is in `quality_report` and `ttft`."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from ragblend.app.cli.common import Cli, command
from ragblend.app.quality.requests import QualityRequest, TtftRequest
from ragblend.app.quality.sources import QuestionSource
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragblend.app.quality.quality_report import Others
    from ragblend.app.quality.table import Table
    from ragblend.app.settings import Settings

ABOUT = "Measure: does the fused answer agree with full prefill, and how much faster does it start?"
bench_app = typer.Typer(name="bench", help=ABOUT, no_args_is_help=True)
bench_app.callback(help=ABOUT)(lambda: None)


@command(bench_app, "quality")
def quality(cli: Cli, source: QuestionSource, request: QualityRequest) -> None:
    """Compare each method's next-token distributions and answers with full prefill's, on the same prompts."""
    show_quality(cli, source, request)


def show_quality(
    cli: Cli, source: QuestionSource, request: QualityRequest, others: "Others | None" = None
) -> None:
    """Measure, and print the tables, or the JSON list of rows."""
    from ragblend.app.quality.quality_report import report_quality, warnings
    from ragblend.app.quality.table import quality_tables

    engine = engine_arguments(cli)
    collection = settings_of(cli, collection=source.collection).collection
    source = replace(source, home=cli.home, collection=collection)
    try:
        results = report_quality(source, engine, request, others)
    except KeyboardInterrupt:
        cli.note("Stopped. What was measured is kept; run the same command again to go on.")
        raise typer.Exit(1) from None
    for skipped in results["settings"]["skipped"]:
        cli.note(f"left out  {skipped['reason']}")
    tables = quality_tables(results["rows"], results["comparisons"], results["tasks"], results["within"])
    finish(cli, tables, results["rows"], results["files"])
    for text in warnings(results["rows"], results["settings"] | {"skipped": ()}):
        cli.note(text)


@command(bench_app, "ttft")
def ttft(cli: Cli, request: TtftRequest) -> None:
    """Time to the first token, where it went, peak memory and bytes on disk, by method."""
    from ragblend.app.quality.table import ttft_tables
    from ragblend.app.quality.ttft import report_ttft

    results = report_ttft(engine_arguments(cli), request)
    value = {name: results[name] for name in ("rows", "environment")}
    finish(cli, ttft_tables(results["rows"]), value, results["files"])


def engine_arguments(cli: Cli) -> dict[str, Any]:
    """What `Engine.open` is called with, here and in the child processes: plain JSON values.

    What is not given comes from the settings, as for every other command. The collection is the benches' own: its
    name is in every key, so nothing that a bench stores or removes is the user's.
    """
    from ragblend.app.home import Home
    from ragblend.app.models import check_model

    settings, home = settings_of(cli), Home.resolve(cli.home)
    if cli.vllm is not None:
        raise UsageError(
            "What is measured here needs logits, and the device for itself: leave --vllm out. Beside vLLM measures "
            "`python -m benchmarks.measure_vllm`."
        )
    check_model(settings.model, home.models)
    names = ("model", "device", "dtype", "store_budget_bytes", "kv_codec")
    chosen = {name: getattr(settings, name) for name in names}
    return {"home": str(home.root), "collection": "bench", **chosen}


def settings_of(cli: Cli, **more: Any) -> "Settings":
    """What holds for this command: its options, the environment, the settings file."""
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    return Settings.load(Home.resolve(cli.home).settings, overrides=cli.overrides | more)


def finish(cli: Cli, tables: "Sequence[Table]", value: Any, files: dict[str, str]) -> None:
    """Print the tables, say what was written, and print the value with --json."""
    from rich.console import Console

    from ragblend.app.quality.table import print_tables

    console = Console(stderr=cli.json)
    # In a file or a pipe there is no width to fit, and a table folded to 80 columns is unreadable.
    print_tables(console if console.is_terminal else Console(stderr=cli.json, width=250), tables)
    for name in files.values():
        cli.note(f"wrote {name}")
    if cli.json:
        print(json.dumps(value, ensure_ascii=False), file=cli.out)
