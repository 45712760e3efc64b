"""`ragblend bench ...`: arguments in, tables or JSON out; the work is in the `*_report` modules."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.cli_common import Cli, command
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ragblend.app.bench.quality_report import Others, QualityRequest
    from ragblend.app.bench.table import Table
    from ragblend.app.settings import Settings

TTFT_METHODS = "full,prefix,reuse,cacheblend"

bench_app = typer.Typer(
    name="bench",
    help="Measure: does the fused answer agree with full prefill, and how much sooner does it start?",
    no_args_is_help=True,
)


@bench_app.callback()
def bench() -> None:
    """Measure: does the fused answer agree with full prefill, and how much sooner does it start?"""


WAY_OUT = {
    "--generate": "`python -m benchmarks.questions --generate SPEC --out FILE` makes a file for --data",
    "--format": "`python -m benchmarks.questions --data FILE --format NAME --out FILE` makes a file for --data",
    "--inspect": "`python -m benchmarks.figures` looks into prompts",
}


def moved(option: str) -> Any:
    """An option that is a benchmark's now: hidden, and refused with what to do."""

    def refuse(value: Any) -> Any:
        if value:
            raise UsageError(f"{option} has moved: {WAY_OUT[option]}, in a checkout of the sources")
        return value

    return typer.Option(option, hidden=True, callback=refuse)


Moved = Annotated[list[str] | None, moved("--generate")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="A JSON list of {ctxs: [{title, text}], question, answers}; the samples if absent."
    ),
]
Docs = Annotated[
    str | None,
    typer.Option(
        "--docs", help="Questions from ingested documents: those under this folder or file, or `all`."
    ),
]
Collection = Annotated[
    str | None, typer.Option("--collection", help="Of --docs; as in the settings if absent.")
]
Skip = Annotated[
    bool,
    typer.Option(
        "--skip", help="Leave out what cannot be measured (no question, over the window), and say what."
    ),
]
Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare", help="Two methods, A,B or A@0.05,B@0.15: paired bootstrap. May be given several times."
    ),
]
MostTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", min=1, help="How long an answer may be [32, or what an exact one needs]."
    ),
]
Methods = Annotated[str, typer.Option("--methods", help="Methods, separated by commas.")]
AllMethods = Annotated[
    str, typer.Option("--methods", help="Methods, separated by commas, or `all` policies.")
]
Ratios = Annotated[
    str, typer.Option("--ratios", help="Shares of the reused tokens to compute again, by commas.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="How many questions; all if absent.")]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Shuffle the questions with it; the intervals are drawn from it."),
]
Passages = Annotated[
    int | None, typer.Option("--passages", help="The first so many of each question; all if absent.")
]
Output = Annotated[
    Path, typer.Option("--output", help="Folder for the results; a stopped run goes on from it.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what this folder already has.")]
KeepKV = Annotated[bool, typer.Option("--keep-kv", help="Leave the passages' KV in the store.")]
Chunks = Annotated[str, typer.Option("--chunks", help="How many chunks, by commas.")]
Tokens = Annotated[str, typer.Option("--tokens", help="How many tokens a chunk, by commas.")]
Caches = Annotated[
    str, typer.Option("--caches", help="Any of warm, cold (page cache dropped before each prefill), memory.")
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Rounds over all methods, after one to warm up.")
]
Memory = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Measure peak memory, in processes of its own.")
]


@command(bench_app, "quality")
def quality(
    cli: Cli,
    data: Data = None,
    docs: Docs = None,
    collection: Collection = None,
    methods: AllMethods = "all",
    ratios: Ratios = "0.05,0.15,0.3",
    compare: Compare = None,
    limit: Limit = None,
    seed: Seed = None,
    passages: Passages = None,
    skip: Skip = False,
    max_new_tokens: MostTokens = None,
    output: Output = Path("bench-results"),
    fresh: Fresh = False,
    keep_kv: KeepKV = False,
    generate: Moved = None,
    form: Annotated[str | None, moved("--format")] = None,
    inspect: Annotated[str | None, moved("--inspect")] = None,
) -> None:
    """Compare each method's next-token distributions and answers with full prefill's, on the same prompts."""
    from ragblend.app.bench.quality_report import QualityRequest
    from ragblend.app.bench.sources import Source

    engine = engine_arguments(cli)
    chosen = settings_of(cli, collection=collection).collection
    source = Source(data, docs, cli.home, chosen, limit, seed, passages, skip)
    request = QualityRequest(
        source, engine, methods, ratios, max_new_tokens, output, fresh, keep_kv, tuple(compare or ())
    )
    show_quality(cli, request)


def show_quality(cli: Cli, request: "QualityRequest", others: "Others | None" = None) -> None:
    """Measure, and print the tables, or the JSON list of rows that design.md section 7 fixes."""
    from ragblend.app.bench.quality_report import report_quality
    from ragblend.app.bench.report import warnings
    from ragblend.app.bench.table import quality_tables

    try:
        results = report_quality(request, others)
    except KeyboardInterrupt:
        cli.note("Stopped. What was measured is kept; run the same command again to go on.")
        raise typer.Exit(1) from None
    for skipped in results["settings"]["skipped"]:
        cli.note(f"left out  {skipped['reason']}")
    tables = quality_tables(results["rows"], results["comparisons"], results["tasks"])
    finish(cli, tables, results["rows"], results["files"])
    for text in warnings(results["rows"], results["settings"] | {"skipped": ()}):
        cli.note(text)


@command(bench_app, "ttft")
def ttft(
    cli: Cli,
    data: Data = None,
    methods: Methods = TTFT_METHODS,
    ratios: Ratios = "0.05,0.15,0.3",
    chunks: Chunks = "6",
    tokens: Tokens = "512",
    caches: Caches = "warm,cold",
    repeats: Repeats = 5,
    memory: Memory = True,
    output: Output = Path("bench-results"),
) -> None:
    """Time to the first token, where it went, peak memory and bytes on disk, by method."""
    from ragblend.app.bench.table import ttft_tables
    from ragblend.app.bench.ttft_report import TtftRequest, report_ttft

    engine = engine_arguments(cli)
    request = TtftRequest(data, engine, methods, ratios, chunks, tokens, caches, repeats, memory, output)
    results = report_ttft(request)
    value = {name: results[name] for name in ("rows", "environment")}
    finish(cli, ttft_tables(results["rows"]), value, results["files"])


@bench_app.command(
    "store", hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def store() -> None:
    """Moved to the benchmarks."""
    raise UsageError(
        "`ragblend bench store` is `python -m benchmarks.store` now, run from a checkout of the sources"
    )


def engine_arguments(cli: Cli) -> dict[str, Any]:
    """What `Engine.open` is called with, here and in the child processes: plain JSON values.

    What is not given comes from the settings, as for every other command. The collection is the benches' own: its
    name is in every key, so nothing that a bench stores or removes is the user's.
    """
    from ragblend.app.home import Home
    from ragblend.app.models import check_model

    settings = settings_of(cli)
    check_model(settings.model, Home.resolve(cli.home).models)
    names = ("model", "device", "dtype", "store_budget_bytes", "kv_codec")
    chosen = {name: getattr(settings, name) for name in names}
    return {"home": str(Home.resolve(cli.home).root), "collection": "bench", **chosen}


def settings_of(cli: Cli, **more: Any) -> "Settings":
    """What holds for this command: its options, the environment, the settings file."""
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    overrides = {"model": cli.model, "device": cli.device, "dtype": cli.dtype, **more}
    return Settings.load(Home.resolve(cli.home).settings, overrides=overrides)


def finish(cli: Cli, tables: "Sequence[Table]", value: Any, files: dict[str, str]) -> None:
    """Print the tables, say what was written, and print the value with --json."""
    from rich.console import Console

    from ragblend.app.bench.table import print_tables

    console = Console(stderr=cli.json)
    # In a file or a pipe there is no width to fit, and a table folded to 80 columns is unreadable.
    print_tables(console if console.is_terminal else Console(stderr=cli.json, width=250), tables)
    for name in files.values():
        cli.note(f"wrote {name}")
    if cli.json:
        print(json.dumps(value, ensure_ascii=False), file=cli.out)
