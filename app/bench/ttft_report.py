"""One `bench ttft`: an engine in; rows, JSON and picture out."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.app.bench import ttft
from ragblend.app.bench.data import load
from ragblend.app.bench.environment import check_extra, environment
from ragblend.app.bench.plots import plot_ttft
from ragblend.app.bench.prefilling import model_digest
from ragblend.app.bench.records import make_folder, write_json
from ragblend.app.bench.variants import parse_choices, parse_counts, parse_variants
from ragblend.app.cli_progress import progress_bar
from ragblend.app.timeline import SUFFIXES, write_timeline

if TYPE_CHECKING:
    from ragblend.engine.trace import Trace

CACHES = ("warm", "cold", "memory")
MEMORY_BYTES = 1 << 34


@dataclass(frozen=True)
class TtftRequest:
    """The arguments of `bench ttft`; engine: the keyword arguments of `Engine.open`."""

    data: Path | None
    engine: dict[str, Any]
    methods: str
    ratios: str
    chunks: str
    tokens: str
    caches: str
    repeats: int
    memory: bool
    output: Path


def report_ttft(request: TtftRequest) -> dict[str, Any]:
    """Measure and write `ttft.json`, `ttft.png` and a timeline a row; the results, and `files` by kind."""
    from ragblend.engine.engine import Engine

    check_extra()
    plan = _plan(request)
    source = _source(request.data)
    folder = make_folder(request.output)
    memory_bytes = MEMORY_BYTES if "memory" in plan.caches else None
    engine = Engine.open(**request.engine, memory_budget_bytes=memory_bytes)
    # The child has to open what this process opened: the home and the device that were found, not asked for.
    found = {"home": str(engine.home), "device": engine.device, "dtype": engine.dtype}
    child = request.engine | found if request.memory else None
    model_digest(engine)  # raises now, and not after the first encode, for a model that cannot be fused
    with retriever(engine.home) as retrieve, progress_bar("prefilling") as progress:
        rows = ttft.run(engine, source, plan, retrieve, child, progress, timelines(folder))
    return _write(folder, {"rows": rows, "environment": environment(engine)})


def _plan(request: TtftRequest) -> ttft.Plan:
    from ragblend.engine.selection import METHODS, WITHOUT_RATIO

    return ttft.Plan(
        variants=parse_variants(request.methods, request.ratios, METHODS, WITHOUT_RATIO),
        chunks=parse_counts(request.chunks, "--chunks"),
        tokens=parse_counts(request.tokens, "--tokens"),
        caches=parse_choices(request.caches, "--caches", CACHES),
        repeats=request.repeats,
    )


def _source(data: Path | None) -> str:
    if data is not None:
        return "\n\n".join(
            passage for question in load(data, skip=True).questions for passage in question.passages
        )
    from ragblend.app.bench.samples_data import sample_source

    return sample_source()


@contextmanager
def retriever(home: Path) -> Iterator[Callable[[str, int], object] | None]:
    """Retrieval from the documents of that home, loaded and ready; None where nothing was ingested."""
    from ragblend.app.retrieval import nearest
    from ragblend.app.workspace import Workspace

    with Workspace.open(home) as workspace:
        if not (
            workspace.home.library.exists()
            and workspace.library.count_passages(workspace.settings.collection)
        ):
            yield None
            return
        workspace.embedder.load()
        yield partial(nearest, workspace)


def timelines(folder: Path) -> "Callable[[ttft.Row, Trace], None]":
    """Write each row's trace as a picture and for a trace viewer, under a name that tells the row."""

    def keep(row: ttft.Row, trace: "Trace") -> None:
        share = "" if row["ratio"] is None else f"-{100 * row['ratio']:g}"
        case = f"{row['method']}{share}-{row['chunks']}x{row['tokens']}-{row['cache']}"
        title = f"{case}: first token after {row['ttft_ms']:.0f} ms (median of {row['repeats']})"
        for suffix in SUFFIXES:
            write_timeline(trace, title, folder / f"timeline-{case}{suffix}")

    return keep


def _write(folder: Path, results: dict[str, Any]) -> dict[str, Any]:
    where = results["environment"]
    title = f"Time to the first token: {where['model']}, {where['dtype']} on {where['gpu'] or where['cpu']}"
    write_json(folder / "ttft.json", results)
    plot_ttft(results["rows"], title, folder / "ttft.png")
    return results | {"files": {kind: str(folder / f"ttft.{kind}") for kind in ("json", "png")}}
