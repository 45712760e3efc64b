"""How much sooner does the answer start, and where did the time go? (`ragblend bench ttft`)

All methods run in turn, round after round, on the same prompt, so that whatever else the machine does is
shared among them; the medians and the ratios against full prefill come from the same rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.memory import make_job, peak_bytes
from ragblend.app.bench.prefilling import stored, timed_prefill
from ragblend.app.bench.quality import INSTRUCTION
from ragblend.app.bench.texts import cut_texts
from ragblend.app.bench.variants import Variant
from ragblend.kvstore.errors import PromptTooLongError

if TYPE_CHECKING:
    from ragblend.engine.config import Timings
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.trace import Trace
    from ragblend.kvstore.chunks import ChunkKey

QUESTION = "Which of the passages above says the most about people, and what does it say?"
Row = dict[str, Any]
Progress = Callable[[int, int], None]
KeepTrace = Callable[[Row, "Trace"], None]


@dataclass(frozen=True)
class Plan:
    """What to measure: every variant on every (chunks, tokens, cache).

    caches: `warm` (stored KV in the page cache), `cold` (the kernel is asked to drop it before every prefill) and
    `memory` (in the store's own memory tier).
    """

    variants: tuple[Variant, ...]
    chunks: tuple[int, ...] = (6,)
    tokens: tuple[int, ...] = (512,)
    caches: tuple[str, ...] = ("warm", "cold")
    repeats: int = 5

    @property
    def steps(self) -> int:
        """Prefills in all, the warm-up round included."""
        return (
            len(self.chunks) * len(self.tokens) * len(self.caches) * len(self.variants) * (self.repeats + 1)
        )


@dataclass
class Samples:
    """What one variant took in one case, a value a round."""

    ttft_ms: list[float] = field(default_factory=list)
    timings: "list[Timings]" = field(default_factory=list)
    traces: "list[Trace]" = field(default_factory=list)
    predicted_ms: float | None = None
    recomputed_fraction: float = 0.0


@dataclass(frozen=True)
class Encoded:
    """A prompt whose chunks are in the store, and what they weigh there."""

    prompt: "Prompt"
    keys: "tuple[ChunkKey, ...]"
    raw_kv_bytes: int
    blob_bytes: int
    token_bytes: int

    @property
    def fused_kv_bytes(self) -> int:
        return len(self.prompt.token_ids) * self.token_bytes


def run(
    engine: "Engine",
    source: str,
    plan: Plan,
    retrieve: Callable[[str, int], object] | None = None,
    memory_engine: dict[str, Any] | None = None,
    progress: Progress | None = None,
    keep_trace: "KeepTrace | None" = None,
) -> list[Row]:
    """The rows, a (chunks, tokens, cache, variant) each.

    source: words to cut the chunks from; retrieve(question, top_k): timed beside the prefills if there is an
    index; memory_engine: how a child process opens the same engine, to measure the peak memory (None: do
    not); keep_trace is given each row with the trace of its median prefill.
    """
    rows: list[Row] = []
    tick = _ticker(plan.steps, progress)
    for chunks in plan.chunks:
        for tokens in plan.tokens:
            with encoded(engine, cut_texts(engine, source, chunks, tokens)) as subject:
                peaks = _peaks(subject, plan.variants, memory_engine)
                for cache in plan.caches:
                    samples, retrieve_ms = measure(engine, subject, plan, cache, retrieve, chunks, tick)
                    case = {"chunks": chunks, "tokens": tokens, "cache": cache}
                    found = _rows(case, samples, subject, peaks, retrieve_ms)
                    rows += found
                    if keep_trace is not None:
                        for row, taken in zip(found, samples.values(), strict=True):
                            keep_trace(row, median_trace(taken))
    return rows


def median_trace(taken: Samples) -> "Trace":
    """That of the prefill whose time is in the middle."""
    order = sorted(range(len(taken.ttft_ms)), key=taken.ttft_ms.__getitem__)
    return taken.traces[order[len(order) // 2]]


@contextmanager
def encoded(engine: "Engine", texts: Sequence[str]) -> Iterator[Encoded]:
    """A prompt over the texts, whose KV is in the store inside the block."""
    from ragblend.engine.prompt import Chunk

    chunks = [Chunk(text) for text in texts]
    prompt = engine.tokenize(engine.chat_prompt(None, chunks, QUESTION + INSTRUCTION))
    if len(prompt.token_ids) >= engine.context_window:
        raise PromptTooLongError(
            f"{len(texts)} chunks make a prompt of {len(prompt.token_ids)} tokens, and "
            f"{engine.model_name} takes {engine.context_window}; pass fewer --chunks or shorter --tokens"
        )
    with stored(engine, texts) as keys:
        yield _weighed(engine, prompt, keys)


def _weighed(engine: "Engine", prompt: "Prompt", keys: "tuple[ChunkKey, ...]") -> Encoded:
    raw = blob = token_bytes = 0
    for reader in _readers(engine, prompt, keys):
        token_bytes = reader.geometry.token_bytes
        raw += len(reader.token_ids) * token_bytes
        blob += reader.header.file_nbytes
    return Encoded(prompt, keys, raw, blob, token_bytes)


def _readers(engine: "Engine", prompt: "Prompt", keys: "tuple[ChunkKey, ...]") -> Iterator[Any]:
    for key, chunk in zip(keys, prompt.chunks, strict=True):
        assert chunk.token_ids is not None
        reader = engine.store.open_chunk(key, chunk.token_ids)
        assert reader is not None, f"{key} was encoded a moment ago"
        with reader:
            yield reader


def measure(
    engine: "Engine",
    subject: Encoded,
    plan: Plan,
    cache: str,
    retrieve: Callable[[str, int], object] | None,
    top_k: int,
    tick: Callable[[], None],
) -> tuple[dict[Variant, Samples], float | None]:
    """Round after round, each variant in turn; the first round warms up and is not counted."""
    from ragblend.engine.trace import Trace

    samples = {variant: Samples() for variant in plan.variants}
    retrieve_ms: list[float] = []
    for turn in range(plan.repeats + 1):
        if retrieve is not None:
            started = perf_counter()
            retrieve(QUESTION, top_k)
            retrieve_ms.append(1000 * (perf_counter() - started))
        for variant in _rotated(plan.variants, turn):
            place(engine, subject, cache)
            timed = timed_prefill(engine, subject.prompt, variant)
            tick()
            if turn:
                samples[variant].ttft_ms.append(timed.ttft_ms)
                samples[variant].timings.append(timed.report.timings)
                samples[variant].traces.append(timed.report.trace or Trace())
                samples[variant].recomputed_fraction = timed.report.recomputed_fraction
                decision = timed.report.decision
                samples[variant].predicted_ms = decision.predicted_ttft_ms if decision else None
    return samples, median(retrieve_ms[1:]) if retrieve_ms else None


def _rotated(variants: tuple[Variant, ...], turn: int) -> tuple[Variant, ...]:
    """Another one goes first in every round, so that none is always the one after the longest."""
    first = turn % len(variants)
    return variants[first:] + variants[:first]


def place(engine: "Engine", subject: Encoded, cache: str) -> None:
    """Have the stored chunks where that case wants them, and nowhere above."""
    engine.finish_background()  # it may just be bringing up what was used
    for tier in engine.store.tiers:
        tier.clear()
    if cache == "cold":
        drop_page_cache(engine, subject)
    if cache == "memory":
        for key, chunk in zip(subject.keys, subject.prompt.chunks, strict=True):
            engine.store.promote(key, chunk.token_ids or ())


def drop_page_cache(engine: "Engine", subject: Encoded) -> None:
    """Ask the kernel to forget the stored chunks, so that the next prefill reads them from the disk."""
    for reader in _readers(engine, subject.prompt, subject.keys):
        reader.drop_page_cache()


def _peaks(
    subject: Encoded, variants: Sequence[Variant], memory_engine: dict[str, Any] | None
) -> dict[Variant, int | None]:
    if memory_engine is None:
        return dict.fromkeys(variants)
    jobs = {each: make_job(memory_engine, subject.prompt, each.method, each.ratio) for each in variants}
    return {variant: peak_bytes(job) for variant, job in jobs.items()}


def _rows(
    case: Row,
    samples: dict[Variant, Samples],
    subject: Encoded,
    peaks: dict[Variant, int | None],
    retrieve_ms: float | None,
) -> list[Row]:
    full = samples.get(Variant("full"))
    return [
        {
            "method": variant.method,
            "ratio": variant.ratio,
            **case,
            "prompt_tokens": len(subject.prompt.token_ids),
            "repeats": len(taken.ttft_ms),
            **_times(taken, full),
            "retrieve_ms": retrieve_ms,
            "recomputed_fraction": taken.recomputed_fraction,
            "peak_bytes": peaks[variant],
            "fused_kv_bytes": subject.fused_kv_bytes,
            "peak_of_fused_kv": _part(peaks[variant], subject.fused_kv_bytes),
            "blob_bytes": subject.blob_bytes,
            "raw_kv_bytes": subject.raw_kv_bytes,
            "blob_of_raw_kv": _part(subject.blob_bytes, subject.raw_kv_bytes),
        }
        for variant, taken in samples.items()
    ]


def _times(taken: Samples, full: Samples | None) -> Row:
    from ragblend.engine.trace import busy_ms

    paired = zip(full.ttft_ms, taken.ttft_ms, strict=True) if full else ()
    ratios = [slow / fast for slow, fast in paired]
    stall_ms = median(timings.stall_ms for timings in taken.timings)
    ttft_ms = median(taken.ttft_ms)
    return {
        "ttft_ms": ttft_ms,
        "ttft_ms_min": min(taken.ttft_ms),
        "ttft_ms_max": max(taken.ttft_ms),
        "speedup": median(ratios) if ratios else None,
        "predicted_ttft_ms": taken.predicted_ms,
        "predicted_of_measured": None if taken.predicted_ms is None else taken.predicted_ms / ttft_ms,
        "load_ms": median(timings.load_ms for timings in taken.timings),
        "load_busy_ms": median(
            busy_ms(e for e in trace.events if e.part == "load") for trace in taken.traces
        ),
        "stall_share": stall_ms / ttft_ms,
        "where_ms": where_ms(taken),
    }


def where_ms(taken: Samples) -> dict[str, float]:
    """Medians of the parts of the time to the first token.

    load is not one of them: it runs beside the compute, and what it costs is the stall. compute is what is
    left.
    """
    parts: dict[str, list[float]] = {
        name: [] for name in ("stall", "move", "select", "compute", "first_token")
    }
    for ttft_ms, timings in zip(taken.ttft_ms, taken.timings, strict=True):
        known = {
            "stall": timings.stall_ms,
            "move": timings.move_ms,
            "select": timings.select_ms,
            "first_token": timings.first_token_ms,
        }
        for name, value in {**known, "compute": max(0.0, ttft_ms - sum(known.values()))}.items():
            parts[name].append(value)
    return {name: median(values) for name, values in parts.items()}


def _part(value: int | None, whole: int) -> float | None:
    return value / whole if value is not None and whole else None


def _ticker(total: int, progress: Progress | None) -> Callable[[], None]:
    done = iter(range(1, total + 1))

    def tick() -> None:
        if progress is not None:
            progress(next(done), total)

    return tick
