"""`ragblend bench quality` and `bench ttft`: parse options, print tables or JSON."""

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

    from ragblend.app.settings import Settings
    from ragblend.measuring.result_tables import Table

ABOUT = "Measure how close fused answers are to full prefill's, and how much faster they start."
bench_app = typer.Typer(name="bench", help=ABOUT, no_args_is_help=True)
bench_app.callback(help=ABOUT)(lambda: None)


@command(bench_app, "quality")
def quality(cli: Cli, source: QuestionSource, request: QualityRequest) -> None:
    """Compare each method's next-token distributions and answers with full prefill's, on the same prompts."""
    from ragblend.app.quality.runs import report_quality
    from ragblend.measuring.report import warnings
    from ragblend.measuring.result_tables import quality_tables

    engine = engine_arguments(cli)
    collection = settings_of(cli, collection=source.collection).collection
    source = replace(source, home=cli.home, collection=collection)
    try:
        results = report_quality(source, engine, request)
    except KeyboardInterrupt:
        cli.note("Stopped. Measurements are kept; run the same command again to continue.")
        raise typer.Exit(1) from None
    for skipped in results["settings"]["skipped"]:
        cli.note(f"left out  {skipped['reason']}")
    tables = quality_tables(results["rows"], results["comparisons"], results["tasks"], results["within"])
    print_results(cli, tables, results["rows"], results["files"])
    for text in warnings(results["rows"], results["settings"] | {"skipped": ()}):
        cli.note(text)


@command(bench_app, "ttft")
def ttft(cli: Cli, request: TtftRequest) -> None:
    """Measure the time to the first token, its parts, peak memory and bytes on disk, by method."""
    from ragblend.app.quality.runs import report_ttft
    from ragblend.measuring.result_tables import ttft_tables

    results = report_ttft(engine_arguments(cli), request)
    value = {name: results[name] for name in ("rows", "environment")}
    print_results(cli, ttft_tables(results["rows"]), value, results["files"])


def engine_arguments(cli: Cli) -> dict[str, Any]:
    """The arguments of `Engine.open`, here and in child processes, as plain JSON values.

    Options that are not given come from the settings. The benches have their own collection: its name is in every key,
    so a bench never touches the user's KV. All stored KV is loaded, so that results do not depend on the disk's speed.
    """
    from ragblend.app.home import Home
    from ragblend.app.models import check_model

    settings, home = settings_of(cli), Home.resolve(cli.home)
    if cli.vllm is not None:
        raise UsageError(
            "This bench needs logits and the device for itself: leave --vllm out. `python -m benchmarks.measure_vllm` "
            "compares with vLLM."
        )
    if cli.remote is not None:
        raise UsageError("The benches measure this machine's own store: leave --remote out.")
    check_model(settings.model, home.models)
    names = ("model", "device", "dtype", "store_budget_bytes", "kv_codec", "fuse")
    chosen = {name: getattr(settings, name) for name in names}
    return {"home": str(home.root), "collection": "bench", "load": "all", **chosen}


def settings_of(cli: Cli, **more: Any) -> "Settings":
    """The settings for this command: its options, the environment, the settings file."""
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    return Settings.read(Home.resolve(cli.home).settings, overrides=cli.overrides | more)


def print_results(cli: Cli, tables: "Sequence[Table]", value: Any, files: dict[str, str]) -> None:
    """Print the tables, name the written files, and print the value with --json."""
    from rich.console import Console

    from ragblend.measuring.result_tables import print_tables

    console = Console(stderr=cli.json)
    # A file or pipe has no width, and a table wrapped at 80 columns is unreadable.
    print_tables(console if console.is_terminal else Console(stderr=cli.json, width=250), tables)
    for name in files.values():
        cli.note(f"wrote {name}")
    if cli.json:
        print(json.dumps(value, ensure_ascii=False), file=cli.out)
