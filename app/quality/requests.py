"""The options of `ragblend bench quality` and `bench ttft`, except those that choose the questions (`sources`)."""

from dataclasses import dataclass
from pathlib import Path

from ragblend.app.cli.common import option

OUTPUT = Path("bench-results")


@dataclass(frozen=True)
class QualityRequest:
    """Options of `bench quality`; max_new_tokens None: 32, or what an exact answer needs."""

    methods: str = option("all", "Methods, separated by commas, or `all` policies.")
    ratios: str = option("0.05,0.15,0.3", "Shares of the reused tokens to recompute, separated by commas.")
    compare: list[str] | None = option(
        None, "Two methods, A,B or A@0.05,B@0.15, to compare by paired bootstrap. May be repeated."
    )
    max_new_tokens: int | None = option(
        None, "Longest answer in tokens (default: 32, or what an exact one needs).", min=1
    )
    output: Path = option(OUTPUT, "Folder for the results; a stopped run is resumed from it.")
    fresh: bool = option(False, "Discard the measurements in this folder.", "--fresh")
    keep_kv: bool = option(False, "Leave the passages' KV in the store.", "--keep-kv")


@dataclass(frozen=True)
class TtftRequest:
    """Options of `bench ttft`."""

    data: Path | None = option(
        None, "A JSON list of {ctxs: [{title, text}], question, answers}: texts to cut chunks from."
    )
    methods: str = option("full,prefix,reuse,cacheblend", "Methods, separated by commas.")
    ratios: str = option("0.05,0.15,0.3", "Shares of the reused tokens to recompute, separated by commas.")
    chunks: str = option("6", "How many chunks, separated by commas.")
    tokens: str = option("512", "Tokens per chunk, separated by commas.")
    caches: str = option(
        "warm,cold",
        "Any of warm, cold (page cache dropped before each prefill), memory, separated by commas.",
    )
    repeats: int = option(5, "Rounds over all methods, after one to warm up.", min=1)
    memory: bool = option(True, "Measure peak memory, in separate processes.", "--memory/--no-memory")
    output: Path = option(OUTPUT, "Folder for the results.")
