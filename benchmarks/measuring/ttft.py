"""Measures the time to the first token and its parts, by method (`ragblend bench ttft`).

All methods run on the same prompt once a round, so that other load affects all of them alike. Medians and ratios to
full prefill come from the same rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, product
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ragblend.kvstore.errors import PromptTooLongError, UsageError
from ragblend.measuring.memory import peak_bytes
from ragblend.measuring.prefilling import prompt_of, temporarily_stored, timed_prefill
from ragblend.measuring.quality import INSTRUCTION, Progress
from ragblend.measuring.records import Row
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.config import Report, Timings
    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.trace import Trace
    from ragblend.kvstore.keys import ChunkKey

QUESTION = "Which of the passages above says the most about people, and what does it say?"
CACHES = ("warm", "cold", "memory")
Retrieve = Callable[[str, int], object]
Rounds = list[tuple[float, "Report"]]  # milliseconds to the first token, and the report, a round


@dataclass(frozen=True)
class TtftPlan:
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
        cases = len(self.chunks) * len(self.tokens) * len(self.caches)
        return cases * len(self.variants) * (self.repeats + 1)


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt whose chunks are in the store, and their sizes."""

    prompt: "Prompt"
    keys: "tuple[ChunkKey, ...]"
    raw_kv_bytes: int
    blob_bytes: int
    fused_kv_bytes: int


def run(
    engine: "Engine",
    source: str,
    plan: TtftPlan,
    retrieve: Retrieve | None = None,
    memory_engine: dict[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
    keep_trace: "Callable[[Row, Trace], None]" = lambda row, trace: None,
) -> list[Row]:
    """Measure; returns one row per (chunks, tokens, cache, variant).

    source: text to cut the chunks from; retrieve(question, top_k): timed beside the prefills if there is an index;
    memory_engine: arguments of `Engine.open` for measuring peak memory in a child process (None: do not measure it);
    keep_trace is called with each row and the trace of its median prefill.
    """
    from ragblend.engine.trace import Trace

    rows: list[Row] = []
    steps = count(1)
    for chunks, tokens in product(plan.chunks, plan.tokens):
        with encoded_prompt(engine, cut_texts(engine, source, chunks, tokens)) as subject:
            peaks: dict[Variant, int | None] = dict.fromkeys(plan.variants)
            if memory_engine is not None:
                peaks = {each: peak_bytes(memory_engine, subject.prompt, each) for each in plan.variants}
            for cache in plan.caches:
                retrieve_ms: list[float] = []
                rounds: dict[Variant, Rounds] = {variant: [] for variant in plan.variants}
                for turn in range(plan.repeats + 1):  # the first one warms up and is not counted
                    if retrieve is not None:
                        started = perf_counter()
                        retrieve(QUESTION, chunks)
                        retrieve_ms.append(1000 * (perf_counter() - started))
                    for variant, one in measure(engine, subject, plan.variants, cache, turn):
                        progress(next(steps), plan.steps)
                        if turn:
                            rounds[variant].append(one)
                case: Row = {"chunks": chunks, "tokens": tokens, "cache": cache}
                case["retrieve_ms"] = median(retrieve_ms[1:]) if retrieve_ms else None
                for variant, runs in rounds.items():
                    times = _times(runs, rounds.get(Variant("full")))
                    rows.append(_row(case, variant, runs, times, subject, peaks[variant]))
                    middle = sorted(runs, key=lambda each: each[0])[len(runs) // 2]
                    keep_trace(rows[-1], middle[1].trace or Trace())
    return rows


@contextmanager
def encoded_prompt(engine: "Engine", texts: Sequence[str]) -> Iterator[EncodedPrompt]:
    """A prompt over the texts, whose KV is stored for the block."""
    prompt = prompt_of(engine, texts, QUESTION + INSTRUCTION)
    if len(prompt.token_ids) >= engine.context_window:
        raise PromptTooLongError(
            f"{len(texts)} chunks make a prompt of {len(prompt.token_ids)} tokens, and "
            f"{engine.model_name} takes {engine.context_window}; pass fewer --chunks or shorter --tokens"
        )
    with temporarily_stored(engine, texts) as keys:
        raw = blob = fused = 0
        for reader in _readers(engine, prompt, keys):
            raw += len(reader.token_ids) * reader.geometry.token_bytes
            blob += reader.header.file_nbytes
            fused = len(prompt.token_ids) * reader.geometry.token_bytes
        yield EncodedPrompt(prompt, keys, raw, blob, fused)


def _readers(engine: "Engine", prompt: "Prompt", keys: "tuple[ChunkKey, ...]") -> Iterator[Any]:
    for key, chunk in zip(keys, prompt.chunks, strict=True):
        assert chunk.token_ids is not None
        reader = engine.store.open_chunk(key, chunk.token_ids)
        assert reader is not None, f"{key} was encoded a moment ago"
        with reader:
            yield reader


def measure(
    engine: "Engine", subject: EncodedPrompt, variants: tuple[Variant, ...], cache: str, turn: int
) -> "Iterator[tuple[Variant, tuple[float, Report]]]":
    """Time each variant once. Each round begins with another variant, so that none always follows the slowest."""
    first = turn % len(variants)
    for variant in variants[first:] + variants[:first]:
        place_chunks(engine, subject, cache)
        timed = timed_prefill(engine, subject.prompt, variant)
        yield variant, (timed.ttft_ms, timed.report)


def place_chunks(engine: "Engine", subject: EncodedPrompt, cache: str) -> None:
    """Put the stored chunks into the tier that the case measures, and remove them from faster ones.

    cache: one of CACHES, or `device` for an accelerator's own tier.
    """
    engine.finish_background()  # it may be promoting chunks that were used
    for tier in engine.store.tiers:
        tier.clear()
    if cache == "cold":
        for reader in _readers(engine, subject.prompt, subject.keys):
            reader.drop_page_cache()
    for _ in range({"memory": 1, "device": 2}.get(cache, 0)):  # a tier at a time
        for key, chunk in zip(subject.keys, subject.prompt.chunks, strict=True):
            engine.store.promote(key, chunk.token_ids or ())


def _row(
    case: Row, variant: Variant, runs: Rounds, times: Row, subject: EncodedPrompt, peak: int | None
) -> Row:
    return {
        "method": variant.method,
        "ratio": variant.ratio,
        **case,
        "prompt_tokens": len(subject.prompt.token_ids),
        "repeats": len(runs),
        **times,
        "recomputed_fraction": runs[-1][1].recomputed_fraction,
        "peak_bytes": peak,
        "fused_kv_bytes": subject.fused_kv_bytes,
        "peak_of_fused_kv": _quotient(peak, subject.fused_kv_bytes),
        "blob_bytes": subject.blob_bytes,
        "raw_kv_bytes": subject.raw_kv_bytes,
        "blob_of_raw_kv": _quotient(subject.blob_bytes, subject.raw_kv_bytes),
    }


def _times(runs: Rounds, full: Rounds | None) -> Row:
    times, reports = zip(*runs, strict=True)
    ratios = [slow / fast for (slow, _), fast in zip(full, times, strict=True)] if full else []
    ttft_ms, decision = median(times), reports[-1].decision
    predicted_ms = decision.predicted_ttft_ms if decision else None
    return {
        "ttft_ms": ttft_ms,
        "ttft_ms_min": min(times),
        "ttft_ms_max": max(times),
        "speedup": median(ratios) if ratios else None,
        "predicted_ttft_ms": predicted_ms,
        "predicted_of_measured": None if predicted_ms is None else predicted_ms / ttft_ms,
        "load_ms": median(report.timings.load_ms for report in reports),
        "load_busy_ms": median(report.trace.busy_ms("load") if report.trace else 0.0 for report in reports),
        "stall_share": median(report.timings.stall_ms for report in reports) / ttft_ms,
        "where_ms": part_medians_ms([(ms, report.timings) for ms, report in runs]),
    }


def part_medians_ms(runs: "Sequence[tuple[float, Timings]]") -> dict[str, float]:
    """Medians of the parts of the time to the first token, from that time and the timings of every round.

    Loading is not among them: it overlaps with computing, and only the stall counts. compute is the remaining time.
    """
    rounds = []
    for ttft_ms, timings in runs:
        known = {name: getattr(timings, f"{name}_ms") for name in ("stall", "move", "select", "first_token")}
        rounds.append(known | {"compute": max(0.0, ttft_ms - sum(known.values()))})
    names = ("stall", "move", "select", "compute", "first_token")
    return {name: median(each[name] for each in rounds) for name in names}


def _quotient(value: int | None, whole: int) -> float | None:
    return value / whole if value is not None and whole else None


def cut_texts(engine: "Engine", source: str, chunks: int, tokens: int) -> list[str]:
    """Cut `chunks` different texts of real words, each of exactly `tokens` tokens.

    Random ids would give another attention than real text. Takes the words of `source` in order; at their end it starts
    again at another word. Raises UsageError if there are no such texts.
    """
    words = source.split()
    texts: dict[str, None] = {}  # ordered, without repeats: two equal chunks would share one stored KV
    start = 0
    for _ in range(50 * chunks):
        if len(texts) == chunks or not words:
            break
        text = _cut(engine, words, start, tokens)
        if text is not None:
            texts[text] = None
        start = (start + (len(text.split()) if text else 1)) % len(words)
    if len(texts) < chunks:
        wanted = f"{chunks} different texts of {tokens} tokens"
        raise UsageError(f"no {wanted} can be cut from {len(words)} words; pass --data")
    return list(texts)


def _cut(engine: "Engine", words: Sequence[str], start: int, tokens: int) -> str | None:
    """The text from word `start` on with exactly `tokens` tokens; None if there is none."""
    # One word is at least one token, so `tokens` words are enough; they may wrap around the end of the source.
    text = " ".join(words[(start + place) % len(words)] for place in range(tokens))
    ids = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
    # A cut can fall inside a character or a merge; then another start is tried.
    cut = engine.tokenizer.decode(ids[:tokens])
    return cut if engine.count_tokens(cut) == tokens else None
