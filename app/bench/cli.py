"""`ragblend bench ...`: arguments in, tables or JSON out; the work is in `quality_report`, `ttft_report`."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

QUALITY_METHODS = "full,naive,reuse,random,heads,cacheblend,cacheblend-k,cacheblend-gradual"
TTFT_METHODS = "full,prefix,reuse,cacheblend"

bench_app = typer.Typer(
    name="bench",
    help="Measure: does the fused answer agree with full prefill, and how much sooner does it start?",
    no_args_is_help=True,
)


@bench_app.callback()
def bench() -> None:
    """Measure: does the fused answer agree with full prefill, and how much sooner does it start?"""


Home = Annotated[Path | None, typer.Option("--home", help="Where data lives (or RAGBLEND_HOME).")]
Model = Annotated[
    str | None, typer.Option("--model", help="default, a hub id, a local folder or a .gguf file.")
]
Device = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda or mps; the best there is if not given.")
]
Dtype = Annotated[str | None, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="A JSON list of {ctxs: [{title, text}], question, answers}; the samples if absent."
    ),
]
Methods = Annotated[str, typer.Option("--methods", help="Methods, separated by commas.")]
Ratios = Annotated[
    str, typer.Option("--ratios", help="Shares of the reused tokens to compute again, by commas.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="How many questions; all if absent.")]
Seed = Annotated[
    int | None, typer.Option("--seed", help="Shuffle the questions with it; the intervals are drawn from it.")
]
Passages = Annotated[
    int | None, typer.Option("--passages", help="The first so many of each question; all if absent.")
]
AnswerTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="How long an answer may be.")]
Output = Annotated[
    Path, typer.Option("--output", help="Folder for the results; a stopped run goes on from it.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure again what this folder already has.")]
KeepKV = Annotated[bool, typer.Option("--keep-kv", help="Leave the passages' KV in the store.")]
Chunks = Annotated[str, typer.Option("--chunks", help="How many chunks, by commas.")]
Tokens = Annotated[str, typer.Option("--tokens", help="How many tokens a chunk, by commas.")]
Caches = Annotated[
    str, typer.Option("--caches", help="warm, cold (page cache dropped before each prefill) or both.")
]
Repeats = Annotated[
    int, typer.Option("--repeats", min=1, help="Rounds over all methods, after one to warm up.")
]
Memory = Annotated[
    bool, typer.Option("--memory/--no-memory", help="Measure peak memory, in processes of its own.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout, everything else on stderr.")]


@bench_app.command()
def quality(
    data: Data = None,
    home: Home = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    methods: Methods = QUALITY_METHODS,
    ratios: Ratios = "0.05,0.15,0.3",
    limit: Limit = None,
    seed: Seed = None,
    passages: Passages = None,
    max_new_tokens: AnswerTokens = 32,
    output: Output = Path("bench-results"),
    fresh: Fresh = False,
    keep_kv: KeepKV = False,
    as_json: Json = False,
) -> None:
    """Compare each method's next-token distributions and answers with full prefill's, on the same prompts."""
    from ragblend.app.bench.quality_report import QualityRequest, report_quality
    from ragblend.app.bench.table import print_quality

    engine = _engine_arguments(model, home, device, dtype)
    request = QualityRequest(
        data, engine, methods, ratios, limit, seed, passages, max_new_tokens, output, fresh, keep_kv
    )
    results = report_quality(request)
    print_quality(_console(as_json), results["rows"], results["comparisons"])
    _finish(results["rows"], results["files"], as_json)


@bench_app.command()
def ttft(
    data: Data = None,
    home: Home = None,
    model: Model = None,
    device: Device = None,
    dtype: Dtype = None,
    methods: Methods = TTFT_METHODS,
    ratios: Ratios = "0.05,0.15,0.3",
    chunks: Chunks = "6",
    tokens: Tokens = "512",
    caches: Caches = "warm,cold",
    repeats: Repeats = 5,
    memory: Memory = True,
    output: Output = Path("bench-results"),
    as_json: Json = False,
) -> None:
    """Time to the first token, where it went, peak memory and bytes on disk, by method."""
    from ragblend.app.bench.table import print_ttft
    from ragblend.app.bench.ttft_report import TtftRequest, report_ttft

    engine = _engine_arguments(model, home, device, dtype)
    request = TtftRequest(data, engine, methods, ratios, chunks, tokens, caches, repeats, memory, output)
    results = report_ttft(request)
    print_ttft(_console(as_json), results["rows"])
    _finish({name: results[name] for name in ("rows", "environment")}, results["files"], as_json)


def _engine_arguments(
    model: str | None, home: Path | None, device: str | None, dtype: str | None
) -> dict[str, Any]:
    """What `Engine.open` is called with, here and in the child processes: plain JSON values.

    What is not given comes from the settings, as for every other command. The collection is the benches' own: its
    name is in every key, so nothing that a bench stores or removes is the user's.
    """
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    found = Home.resolve(home)
    settings = Settings.load(found.settings, overrides={"model": model, "device": device, "dtype": dtype})
    chosen = {name: getattr(settings, name) for name in ("model", "device", "dtype", "store_budget_bytes")}
    return {"home": str(found.root), "collection": "bench", **chosen}


def _console(as_json: bool) -> "Console":
    from rich.console import Console

    # In a file or a pipe there is no width to fit in, and a table folded to 80 columns cannot be read.
    console = Console(stderr=as_json)
    return console if console.is_terminal else Console(stderr=as_json, width=160)


def _finish(value: Any, files: dict[str, str], as_json: bool) -> None:
    for name in files.values():
        typer.echo(f"wrote {name}", err=True)
    if as_json:
        json.dump(value, sys.stdout, ensure_ascii=False)
        sys.stdout.write("\n")
