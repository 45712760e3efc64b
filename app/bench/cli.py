"""`ragblend bench ...`: arguments in, tables or JSON out; the work is in the `*_report` modules."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ragblend.app.cli_common import Cli, command

if TYPE_CHECKING:
    from rich.console import Console

    from ragblend.app.settings import Settings

STORE_POLICIES = "lru,lfu,gdsf,gdsf-size,pgdsf,fading,fading-hits"
TTFT_METHODS = "full,prefix,reuse,cacheblend"

bench_app = typer.Typer(
    name="bench",
    help="Measure: does the fused answer agree with full prefill, and how much sooner does it start?",
    no_args_is_help=True,
)


@bench_app.callback()
def bench() -> None:
    """Measure: does the fused answer agree with full prefill, and how much sooner does it start?"""


Data = Annotated[
    Path | None,
    typer.Option(
        "--data", help="A JSON list of {ctxs: [{title, text}], question, answers}; the samples if absent."
    ),
]
QuestionFile = Annotated[
    Path | None,
    typer.Option(
        "--data", help="A file of questions; what it may be: see --format. The samples if nothing is given."
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format", help="cacheblend, longbench, samsum or squad; found out by its fields if absent."
    ),
]
Generate = Annotated[
    list[str] | None,
    typer.Option(
        "--generate",
        help="Made-up questions with exact answers: `ruler:multi_value,tokens=4000,n=20`; `ruler` for all of its "
        "tasks, or `two_hop`. More settings: chunk, seed, items, hops, chains. May be given several times.",
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
Inspect = Annotated[
    int,
    typer.Option("--inspect", min=0, help="How many prompts the report shows token by token, with figures."),
]
MostTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", min=1, help="How long an answer may be [32, or what an exact one needs]."
    ),
]
Methods = Annotated[str, typer.Option("--methods", help="Methods, separated by commas.")]
MethodsAndModes = Annotated[
    str,
    typer.Option(
        "--methods",
        help="Methods, separated by commas, or `all` policies; also LangChain's map_reduce, map_rerank and refine, and "
        "LlamaIndex's llama-tree_summarize and llama-refine; as in refine+cacheblend, with calls read by a method.",
    ),
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
AnswerTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="How long an answer may be.")]
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


Traces = Annotated[str, typer.Option("--traces", help="mmlu, drift, zipf:EXPONENT, by commas.")]
TopK = Annotated[str, typer.Option("--top-k", help="How many documents a request, by commas.")]
Budgets = Annotated[str, typer.Option("--budgets", help="Percent of the corpus that fits, by commas.")]
Policies = Annotated[str, typer.Option("--policies", help="Eviction policies, by commas.")]
Lengths = Annotated[
    str, typer.Option("--lengths", help="documents (like articles) or passages (cut at 512).")
]
Reuse = Annotated[
    str, typer.Option("--reuse", help="Where stored KV serves: anywhere, or behind the same prefix only.")
]
Documents = Annotated[int, typer.Option("--documents", min=10, help="How many there are.")]
Retrievals = Annotated[int, typer.Option("--retrievals", min=40, help="Documents retrieved in all requests.")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="How many traces of each kind.")]
HalfLife = Annotated[float, typer.Option("--half-life", min=1, help="Retrievals until one counts half.")]
Profile = Annotated[
    Path | None, typer.Option("--profile", help="Measured prefill times, JSON; an estimate if absent.")
]
TokenBytes = Annotated[int, typer.Option("--bytes-per-token", min=1, help="KV of one token.")]
Overhead = Annotated[
    int | None,
    typer.Option(
        "--overhead", min=100, help="Instead: what lookups, admission and opening cost with so many chunks."
    ),
]
LoadSpeed = Annotated[float, typer.Option("--load-mb-per-s", min=0.001, help="How fast stored KV is loaded.")]


@command(bench_app, "quality")
def quality(
    cli: Cli,
    data: QuestionFile = None,
    form: Format = None,
    generate: Generate = None,
    docs: Docs = None,
    collection: Collection = None,
    methods: MethodsAndModes = "all",
    ratios: Ratios = "0.05,0.15,0.3",
    compare: Compare = None,
    limit: Limit = None,
    seed: Seed = None,
    passages: Passages = None,
    skip: Skip = False,
    max_new_tokens: MostTokens = None,
    inspect: Inspect = 1,
    output: Output = Path("bench-results"),
    fresh: Fresh = False,
    keep_kv: KeepKV = False,
) -> None:
    """Compare each method's next-token distributions and answers with full prefill's, on the same prompts."""
    from ragblend.app.bench.quality_report import QualityRequest, report_quality
    from ragblend.app.bench.sources import Source
    from ragblend.app.bench.table import print_quality

    engine = engine_arguments(cli)
    chosen = _settings(cli, collection=collection).collection
    source = Source(
        data, form, tuple(generate or ()), docs, cli.home, chosen, limit, seed, passages, skip
    )  # fmt: skip
    request = QualityRequest(
        source, engine, methods, ratios, max_new_tokens, output, fresh, keep_kv, tuple(compare or ()), inspect
    )
    try:
        results = report_quality(request)
    except KeyboardInterrupt:
        cli.note("Stopped. What was measured is kept; run the same command again to go on.")
        raise typer.Exit(1) from None
    for skipped in results["settings"]["skipped"]:
        cli.note(f"left out  {skipped['reason']}")
    print_quality(_console(cli), results["rows"], results["comparisons"], results["tasks"])
    _finish(cli, results["rows"], results["files"])


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
    from ragblend.app.bench.table import print_ttft
    from ragblend.app.bench.ttft_report import TtftRequest, report_ttft

    engine = engine_arguments(cli)
    request = TtftRequest(data, engine, methods, ratios, chunks, tokens, caches, repeats, memory, output)
    results = report_ttft(request)
    print_ttft(_console(cli), results["rows"])
    _finish(cli, {name: results[name] for name in ("rows", "environment")}, results["files"])


@command(bench_app, "store")
def store(
    cli: Cli,
    traces: Traces = "zipf:0.7,zipf:0.9,zipf:1.1,mmlu,drift",
    top_k: TopK = "1,3,5",
    budgets: Budgets = "4,8,16,32,64",
    policies: Policies = STORE_POLICIES,
    lengths: Lengths = "documents",
    reuse: Reuse = "anywhere",
    documents: Documents = 1_000,
    retrievals: Retrievals = 6_000,
    seeds: Seeds = 3,
    half_life: HalfLife = 4_096,
    profile: Profile = None,
    bytes_per_token: TokenBytes = 23_040,
    load_mb_per_s: LoadSpeed = 1_000,
    overhead: Overhead = None,
    output: Output = Path("bench-results"),
) -> None:
    """Replay made-up traces through the store's eviction policies: hit rates, byte hit rates, simulated TTFT."""
    from ragblend.app.bench.store_overhead import report_overhead
    from ragblend.app.bench.store_report import StoreRequest, report_store
    from ragblend.app.bench.store_table import print_overhead, print_store

    if overhead is not None:
        row = report_overhead(overhead)
        print_overhead(_console(cli), row)
        _finish(cli, row, {})
        return
    request = StoreRequest(
        traces, top_k, budgets, policies, lengths, reuse, documents, retrievals, seeds, half_life, profile,
        bytes_per_token, load_mb_per_s, output,
    )  # fmt: skip
    results = report_store(request)
    print_store(_console(cli), results)
    _finish(cli, {name: results[name] for name in ("rows", "comparisons", "settings")}, results["files"])


def engine_arguments(cli: Cli) -> dict[str, Any]:
    """What `Engine.open` is called with, here and in the child processes: plain JSON values.

    What is not given comes from the settings, as for every other command. The collection is the benches' own: its
    name is in every key, so nothing that a bench stores or removes is the user's.
    """
    from ragblend.app.home import Home

    settings = _settings(cli)
    names = ("model", "device", "dtype", "store_budget_bytes", "kv_codec")
    chosen = {name: getattr(settings, name) for name in names}
    return {"home": str(Home.resolve(cli.home).root), "collection": "bench", **chosen}


def _settings(cli: Cli, **more: Any) -> "Settings":
    from ragblend.app.home import Home
    from ragblend.app.settings import Settings

    overrides = {"model": cli.model, "device": cli.device, "dtype": cli.dtype, **more}
    return Settings.load(Home.resolve(cli.home).settings, overrides=overrides)


def _console(cli: Cli) -> "Console":
    """Where tables go. In a file or a pipe there is no width to fit, and one folded to 80 columns is unreadable."""
    from rich.console import Console

    console = Console(stderr=cli.json)
    return console if console.is_terminal else Console(stderr=cli.json, width=200)


def _finish(cli: Cli, value: Any, files: dict[str, str]) -> None:
    """Print the JSON: for `quality` the list of rows that design.md section 7 fixes, for `ttft` an object."""
    for name in files.values():
        cli.note(f"wrote {name}")
    if cli.json:
        print(json.dumps(value, ensure_ascii=False), file=cli.out)
