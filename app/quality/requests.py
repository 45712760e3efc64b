"""What the benches are asked for: the options of `ragblend bench quality` and `ttft`, beside the questions."""

from dataclasses import dataclass
from pathlib import Path

from ragblend.app.cli.common import option

OUTPUT = Path("bench-results")


@dataclass(frozen=True)
class QualityRequest:
    """What `bench quality` is asked for, beside its questions; max_new_tokens None: 32, or what an exact one needs."""

    methods: str = option("all", "Methods, separated by commas, or `all` policies.")
    ratios: str = option("0.05,0.15,0.3", "Shares of the reused tokens to compute again, by commas.")
    compare: list[str] | None = option(
        None, "Two methods, A,B or A@0.05,B@0.15: paired bootstrap. May be given several times."
    )
    max_new_tokens: int | None = option(
        None, "How long an answer may be [32, or what an exact one needs].", min=1
    )
    output: Path = option(OUTPUT, "Folder for the results; a stopped run goes on from it.")
    fresh: bool = option(False, "Measure again what this folder already has.", "--fresh")
    keep_kv: bool = option(False, "Leave the passages' KV in the store.", "--keep-kv")


@dataclass(frozen=True)
class TtftRequest:
    """What `bench ttft` is asked for."""

    data: Path | None = option(
        None, "A JSON list of {ctxs: [{title, text}], question, answers}: texts to cut."
    )
    methods: str = option("full,prefix,reuse,cacheblend", "Methods, separated by commas.")
    ratios: str = option("0.05,0.15,0.3", "Shares of the reused tokens to compute again, by commas.")
    chunks: str = option("6", "How many chunks, by commas.")
    tokens: str = option("512", "How many tokens a chunk, by commas.")
    caches: str = option(
        "warm,cold", "Any of warm, cold (page cache dropped before each prefill), memory, by commas."
    )
    repeats: int = option(5, "Rounds over all methods, after one to warm up.", min=1)
    memory: bool = option(True, "Measure peak memory, in processes of its own.", "--memory/--no-memory")
    output: Path = option(OUTPUT, "Folder for the results.")
