"""Shared by the benchmarks: command lines, engines, processes, texts, timing, Markdown tables, recorded JSON."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from benchmarks.filler import sentences

if TYPE_CHECKING:
    from torch import Tensor

    from ragblend.engine.decoding.direct import DirectDecode
    from ragblend.engine.decoding.packed_weights import PackedWeights
    from ragblend.engine.engine import Engine

REPO = Path(__file__).parents[1]
DATA = REPO / "benchmarks"  # recorded measurements, and texts for some benchmarks
DOCS = REPO / "docs"
MARKED_TEXT = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)
Row = dict[str, Any]
K = TypeVar("K")
T = TypeVar("T")
# Options that many command lines share.
Home = Annotated[Path, typer.Option(help="A RAGBlend home; the model is converted there.")]
AnyHome = Annotated[Path | None, typer.Option(help="A RAGBlend home; the user's own if absent.")]
Model = Annotated[str, typer.Option(help="As in `ragblend --model`.")]
Limit = Annotated[int, typer.Option(min=1, help="How many questions.")]


def run(main: Callable[..., None], about: str | None) -> None:
    """Run a script. main: its parameters are the options; about: the help, which is the module's docstring."""
    from ragblend.kvstore.errors import RagBlendError

    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    app.command(help="\b\n" + (about or "").replace("\n\n", "\n\n\b\n"))(main)
    try:
        app()
    except RagBlendError as error:
        raise SystemExit(f"error: {error}") from None


@contextmanager
def open_engine(model: str = "default", home: Path | None = None, **options: Any) -> "Iterator[Engine]":
    """An engine, closed after the block. Without a home it uses a temporary one."""
    from ragblend import Engine

    with (
        tempfile.TemporaryDirectory() as folder,
        closing(Engine.open(model=model, home=home or Path(folder), **options)) as engine,
    ):
        yield engine


@contextmanager
def run_server(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], Row]]:
    """Run `ragblend ui` or `serve` on a free port; yields the process, and the JSON that it prints when it is ready."""
    command = [sys.executable, "-m", "ragblend.app.cli.main", *arguments, "--json", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)


def environment_without_openmp(**more: str) -> dict[str, str]:
    """This process's environment for other programs, without the OpenMP settings that importing ragblend makes."""
    return {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | more


def parse_counts(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def make_texts(engine: "Engine", count: int, tokens: int, first: int = 0) -> list[str]:
    """`count` different texts of about `tokens` tokens. `first` seeds them: the same one gives the same texts."""
    found = []
    for number in range(first, first + count):
        words = " ".join(islice(sentences(Random(number)), tokens // 6))
        ids = engine.tokenizer(words, add_special_tokens=False)["input_ids"][:tokens]
        found.append(engine.tokenizer.decode(ids))
    return found


def packed_loop(engine: "Engine") -> "tuple[DirectDecode, PackedWeights]":
    """Our decoding loop for this engine's model, and its packed weights.

    The engine keeps its present loop from then on, since it no longer measures which one is faster.
    """
    from ragblend.engine.decoding.implementations import candidate_for
    from ragblend.engine.decoding.packed_weights import pack_weights
    from ragblend.engine.model.decoder import TransformersDecoder

    runtime, packed = engine.runtime, dict[str, Any]()
    runtime.decode_selector.needs_measurement = False
    candidate = candidate_for(runtime.decoder)
    if not engine.gate.passed or candidate is None:
        raise SystemExit("our decoding loop does not support this model's layers")
    assert isinstance(runtime.decoder, TransformersDecoder)
    pack_weights(runtime.decoder, packed, allows_rounding=runtime.has_quantized_weights)
    return candidate(runtime.decoder, packed), packed


def run_alternately(cases: Mapping[K, Callable[[], T]], rounds: int, warm: int = 0) -> dict[K, list[T]]:
    """Run every case once a round, so that other load slows all alike; returns the results of each case.

    warm: rounds before the others, whose results are dropped.
    """
    results: dict[K, list[T]] = {name: [] for name in cases}
    for number in range(warm + rounds):
        for name, case in cases.items():
            result = case()
            if number >= warm:
                results[name].append(result)
    return results


def clock_and_cpu_s(work: Callable[[], object]) -> tuple[float, float]:
    """Wall-clock and processor seconds of the work."""
    clock, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - processor


def medians(rows: Iterable[Sequence[float]]) -> list[float]:
    """The median of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def auc(larger: Sequence[float], smaller: Sequence[float]) -> float:
    """The share of pairs in which the value from `larger` is the larger one; equal values count half."""
    from scipy.stats import mannwhitneyu

    return float(mannwhitneyu(larger, smaller).statistic) / (len(larger) * len(smaller))


def agreement(expected: "Tensor", found: "Tensor") -> tuple[float, float]:
    """Mean KL(expected || found) in nats, and the share of positions with the same top token; logits (n, vocab)."""
    from ragblend.measuring.metrics import kl_divergence, top1_agreement

    return kl_divergence(expected, found), top1_agreement(expected, found)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def replace_marked(page: str, make: Callable[[], str]) -> str:
    """Replace the text between each pair of marks by what `make` returns. Raises ValueError if there are no marks."""
    text, replaced = MARKED_TEXT.subn(lambda _: make(), page)
    if not replaced:
        raise ValueError("the document must hold `<!-- results -->` and `<!-- end of results -->`")
    return text


def read_json(path: Path) -> Any:
    """A JSON file's value; {} if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def to_json(value: Any, depth: int) -> str:
    """JSON text with one line for each value at that depth."""
    text = re.sub(rf"\n {{{depth + 1},}}", " ", json.dumps(value, indent=1))
    return re.sub(rf"\n {{{depth}}}([]}}])", r" \1", text) + "\n"
