"""Measures requests under load as RAGCache does (arXiv 2404.12457, section 7): time to first token by request rate.

    python -m benchmarks.measure_serve --parts calibrate          cost of a prompt, by how much of it is stored
    python -m benchmarks.measure_serve --parts full,blend         systems on the real engine, minutes each
    python -m benchmarks.measure_serve --parts order              first come first served, and reordered, on the engine
    python -m benchmarks.measure_serve --parts simulate           larger traces and ablations, simulated
    python -m benchmarks.measure_serve --render                   the document again, from recorded figures

Requests arrive as a Poisson process; each asks about passages drawn by popularity. The clock is this process's
processor time, with one computing thread: other load does not count, and waiting for the next request takes no time.
Writes `serve.json` beside this file, the tables of docs/load.md and a picture.
"""

import json
import math
import random
import statistics
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import typer

from benchmarks.common import DOCS, FIGURES, Row, between_marks, dumped, markdown, read_json, run, texts
from benchmarks.serve_simulator import (
    SYSTEMS,
    Costs,
    PromptTokens,
    SimulatedRequest,
    SimulationResult,
    System,
    simulator,
)
from benchmarks.traces import make_trace
from ragblend import Engine
from ragblend.engine import engine as engine_module
from ragblend.engine.config import resolve_home
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.scheduling.order import WINDOW, Claim, RequestOrder, Ticket
from ragblend.engine.scheduling.queue import PAUSE_S
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.keys import ChunkKey
from ragblend.measuring.plots import figure_of
from ragblend.measuring.prefilling import cpu_name, prompt_of

RECORDED, PAGE, PICTURE = FIGURES / "serve.json", DOCS / "load.md", DOCS / "pictures" / "load.svg"
# RAGCache section 3.2: 3% of the documents make 60% of MMLU's requests. Its other traces are flatter: zipf 0.9, in
# which 3% make 40 to 50% here. Answers: one token of MMLU's letters, some of NQ's names (section 7.1).
TRACES = {"mmlu": (None, 1), "nq": (0.9, 6)}
QUESTION = "What is told?"
PASSAGES = 4  # a request
SLO = 5.0  # times the unloaded time to first token
# The real engine: documents, and requests by run
DOCUMENTS, WARM, ALONE, COUNT = 120, 40, 12, 40
BUDGET = 1.5  # of the corpus
COMMON, LOADS = 0.8, (1.0, 1.4, 2.0)  # of full prefill's rate, and of each system's own, when nobody waits
# The simulator's
LARGE, LARGE_WARM, LARGE_COUNT = 2_000, 1_500, 800
LARGE_LOADS, SATURATED = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1), (0.9, 1.1)
BUDGETS = (0.05, 0.1, 0.25, 0.5)
SHOWN = "mmlu"  # in the document; serve.json has all of them
AT = 0.7  # of the load at which policies are compared
ARTICLES = ("documents", 2)  # RAGCache's: two whole articles a request
SHAPES = {"passages": f"{PASSAGES} of up to 512", "documents": "2 whole articles"}
NAMES = [system.name for system in SYSTEMS]
EXACT = next(system for system in SYSTEMS if system.name == "exact tree")
# Retrieval in stages
AHEAD, AHEAD_LOADS = 20, (0.9,)
# Of 75 MuSiQue questions those whose nearest four were the final ones after each quarter of the probed clusters: 5,556
# windows of 64 word pieces by MiniLM in 54 clusters, 14 probed, by `staged.in_stages`.
SETTLED = (0.88, 0.96, 0.99, 1.0)
SELDOM = 1e-3  # so that nobody waits
# Order on the real engine: requests of a run, at a load at which the queue of so few grows long
ORDERED, ORDERED_LOAD = 100, 1.4


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times of a Poisson process with exactly that mean rate."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(1.0) for _ in range(count)]
    return [at * count / sum(gaps) / rate for at in accumulate(gaps)]


def throughput(points: Sequence[tuple[float, float]], slo_s: float) -> float:
    """The rate at which the mean crosses the SLO, interpolated between points (requests/s, mean s).

    The last rate if it does not.
    """
    ordered = sorted(points)
    for (low, before), (high, after) in pairwise(ordered):
        if before <= slo_s < after:
            return low + (high - low) * (slo_s - before) / (after - before)
    return ordered[-1][0] if ordered[-1][1] <= slo_s else 0.0


# --- the real engine


class SkippingClock:
    """Processor time of this process, plus time that is skipped while all active threads only wait.

    awake: running requests and their senders that are not sleeping.
    """

    def __init__(self, engine: Engine) -> None:
        self._skipped, self._engine = -time.process_time(), engine
        self._lock, self._dues, self.awake = threading.Lock(), list[float](), 1

    def now(self) -> float:
        return time.process_time() + self._skipped

    def add(self, awake: int) -> None:
        with self._lock:
            self.awake += awake

    def sleep_until(self, at: float) -> None:
        with self._lock:
            self._dues.append(at)
            self.awake -= 1
        while (now := self.now()) < at:
            with self._lock:
                due = min(self._dues)
                if due > now and not self.awake and not self._computes(due - now):
                    self._skipped += due - now
            time.sleep(0.001)
        with self._lock:
            self._dues.remove(at)
            self.awake += 1

    def _computes(self, left_s: float) -> bool:
        """Whether the device is busy, or would be in a pause of that length."""
        ahead = any(thread.name == "ragblend-speculation" for thread in threading.enumerate())
        busy = ahead or self._engine.runtime.queue.inside > 0
        return busy or (left_s > PAUSE_S and not self._engine.finish_background(timeout_s=0.01))


class TimedOrder(RequestOrder):
    """Records how long choosing took, and how often the unluckiest request was overtaken."""

    spent_s, most_passed = 0.0, 0

    def begin(self, now: float) -> Ticket | None:
        begun = time.thread_time()
        ticket = super().begin(now)
        self.spent_s += time.thread_time() - begun
        if ticket is not None:
            self.most_passed = max(self.most_passed, ticket.passed)
        return ticket


Ask = Callable[[int, SkippingClock, Callable[[str], None]], None]


def served(engine: Engine, window: int, at: Sequence[float], ask: Ask) -> Row:
    """Send each request at its time; their times to first token. ask(number, clock, on_text)."""
    clock, order = SkippingClock(engine), TimedOrder(window=window)
    engine.runtime.queue.order = order
    ttft_s, claims_s, threads = [math.nan] * len(at), list[float](), list[threading.Thread]()
    claim_of: Callable[..., Claim] = vars(engine_module)["claim_of"]

    def timed(*args: Any) -> Claim:
        begun = time.thread_time()
        claim = claim_of(*args)
        claims_s.append(time.thread_time() - begun)
        return claim

    def one(number: int) -> None:
        def first(_: str) -> None:
            if math.isnan(ttft_s[number]):
                ttft_s[number] = clock.now() - at[number]

        ask(number, clock, first)
        first("")
        clock.add(-1)

    with mock.patch.object(engine_module, "claim_of", timed):
        for number, due in enumerate(at):
            clock.sleep_until(due)
            clock.add(1)
            threads.append(threading.Thread(target=one, args=(number,)))
            threads[-1].start()
        clock.add(-1)
        for thread in threads:
            thread.join()
    return {
        "rate": len(at) / at[-1],
        "mean_s": statistics.mean(ttft_s),
        "p99_s": float(torch.quantile(torch.tensor(ttft_s), 0.99)),
        "passed": order.most_passed,
        "scheduling_ms": 1e3 * (statistics.median(claims_s) + order.spent_s / len(at)),
    }


@contextmanager
def opened(home: str, **options: Any) -> Iterator[Engine]:
    """The home's model on one thread, with a store of its own."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(Path(home) / "models")
        engine = Engine.open(home=folder, **options)
        try:
            yield engine
        finally:
            engine.close()


class Corpus:
    """The passages of a trace as texts, and its requests as prompts."""

    def __init__(self, trace: str, shape: tuple[str, int] = ("passages", PASSAGES)) -> None:
        exponent, self.answer_tokens = TRACES[trace]
        count = WARM + ALONE + (len(LOADS) + 2) * COUNT
        self.trace = make_trace(exponent, shape[0], DOCUMENTS, count, shape[1], seed=0)

    def texts(self, engine: Engine) -> list[str]:
        return [texts(engine, 1, tokens, number)[0] for number, tokens in enumerate(self.trace.tokens)]

    def prompts(self, engine: Engine, known: Sequence[str], first: int, count: int) -> list[Prompt]:
        return [
            prompt_of(engine, [known[each] for each in request], f"What is told in {number}?")
            for number, request in enumerate(self.trace.requests[first : first + count], start=first)
        ]


class Trial:
    """One system on the real engine, whose store is filled as the system would; each run has other requests."""

    def __init__(self, system: System, corpus: Corpus, engine: Engine, passages: Sequence[str]) -> None:
        self._system, self._corpus, self._engine, self._passages = system, corpus, engine, passages
        self.begin = WARM

    def at_rate(self, count: int, rate: float) -> Row:
        engine, system = self._engine, self._system
        prompts = self._corpus.prompts(engine, self._passages, self.begin, count)
        self.begin += count

        def ask(number: int, clock: SkippingClock, on_text: Callable[[str], None]) -> None:
            # Opens this thread's connection, which the prefill needs as well.
            engine.store.contains(ChunkKey("0" * 64))
            options = {"on_text": on_text, "max_new_tokens": self._corpus.answer_tokens}
            engine.generate(prompts[number], system.method, **options)

        row = served(engine, system.window, arrivals(count, rate), ask)
        print(f"{system.name}, {system.window}: {json.dumps(row)}", flush=True)
        return row

    @property
    def about(self) -> str:
        return f"{self._engine.model_name} on one core of {cpu_name()}, {self._engine.dtype}"


@contextmanager
def trial(system: System, corpus: Corpus, home: str) -> Iterator[Trial]:
    with opened(home) as engine:
        passages, shape = corpus.texts(engine), engine.runtime.fingerprint.geometry
        total = sum(file_nbytes(shape, tokens, engine.runtime.codec) for tokens in corpus.trace.tokens)
    with opened(home, store_policy=system.policy, store_budget_bytes=int(BUDGET * total)) as engine:
        if system.fuses:
            engine.encode(passages)
        else:
            engine.prefill(corpus.prompts(engine, passages, 0, 1)[0], method="full")
        if system.paths or system.fuses:
            for prompt in corpus.prompts(engine, passages, 0, WARM):
                engine.generate(prompt, system.method, max_new_tokens=1)
                engine.finish_background()
        yield Trial(system, corpus, engine, passages)


def measured(system: System, trace: str, alone_full_s: float | None, home: str) -> Row:
    """Measure a system without load, at the common rate, and at its own loads."""
    with trial(system, Corpus(trace), home) as one:
        alone_s = one.at_rate(ALONE, SELDOM)["mean_s"]
        rows = [one.at_rate(COUNT, COMMON / (alone_full_s or alone_s))]
        rows += [one.at_rate(COUNT, load / alone_s) for load in LOADS]
        return under_load(alone_s, rows) | {"about": one.about}


def in_order(home: str) -> list[Row]:
    """Saturated systems, with the same requests in arrival order and reordered, each from the same start."""
    rows, blend = list[Row](), next(system for system in SYSTEMS if system.name == "blend")
    for system, shape in (
        (EXACT, ("passages", PASSAGES)),
        (blend, ("passages", PASSAGES)),
        (EXACT, ARTICLES),
    ):
        corpus, alone_s = Corpus("mmlu", shape), 0.0
        for window in (0, WINDOW):
            with trial(replace(system, window=window), corpus, home) as one:
                alone_s = alone_s or one.at_rate(ALONE, SELDOM)["mean_s"]
                one.begin = WARM + ALONE
                of = {"lengths": shape[0], "system": system.name, "load": ORDERED_LOAD, "window": window}
                rows.append(of | one.at_rate(ORDERED, ORDERED_LOAD / alone_s))
    return rows


def read_ahead(home: str) -> list[Row]:
    """`blend` after a retrieval that takes as long as the prefill, without and with `stream_staged`.

    SETTLED: the stage after which the passages are final; before it they are another request's.
    """
    corpus, rows = Corpus("mmlu"), list[Row]()
    with opened(home) as engine:
        passages = corpus.texts(engine)
        engine.encode([passages[each] for each in sorted({*chain(*corpus.trace.requests[:AHEAD])})])
        prompts = corpus.prompts(engine, passages, 0, AHEAD)
        for prompt in prompts[:2]:
            engine.generate(prompt, max_new_tokens=1)
            engine.finish_background()
        right = [bisect_right(SETTLED, (number + 0.5) / AHEAD) for number in range(AHEAD)]
        random.Random(0).shuffle(right)
        alone_s = 0.0
        for load in (0.0, *AHEAD_LOADS):
            at = arrivals(AHEAD, load / alone_s if load else SELDOM)
            retrieval_s = alone_s

            def waits(number: int, clock: SkippingClock, on_text: Callable[[str], None]) -> None:
                clock.sleep_until(at[number] + retrieval_s)  # noqa: B023
                engine.generate(prompts[number], on_text=on_text, max_new_tokens=1)

            def reads(number: int, clock: SkippingClock, on_text: Callable[[str], None]) -> None:
                def stages() -> Iterator[Prompt]:
                    for stage in range(len(SETTLED)):
                        clock.sleep_until(at[number] + retrieval_s * (stage + 1) / len(SETTLED))  # noqa: B023
                        yield prompts[number if stage >= right[number] else number - 1]

                with engine.stream_staged(stages(), max_new_tokens=1) as stream:
                    for piece in stream:
                        on_text(piece)
                    assert stream.result

            if not alone_s:
                alone_s = retrieval_s = served(engine, WINDOW, at, waits)["mean_s"]
            row = {"load": load, "retrieval_s": retrieval_s}
            rows.append(
                row
                | {"without": served(engine, WINDOW, at, waits), "with": served(engine, WINDOW, at, reads)}
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def calibrated(home: str) -> Row:
    """Times of prompts, by how many of their passages are on a path, stored alone, or not stored."""
    samples, draw, used = list[tuple[PromptTokens, float]](), random.Random(0), 0
    with opened(home) as engine:

        def timed(passages: Sequence[str], method: str, exact: int, pieces: int = 1) -> None:
            prompt = prompt_of(engine, passages, QUESTION)
            begun = time.process_time()
            counts = engine.prefill(prompt, method=method).report.tokens
            spent = time.process_time() - begun
            engine.finish_background()
            stored = counts.reused + counts.recomputed
            path = sum(stop - start for start, stop in prompt.places[:exact])
            samples.append((PromptTokens(counts.prompt - stored, path, stored - path, pieces), spent))

        for count in (1, 2, 3, 4) * 2:
            for known in range(count + 1):
                numbers = range(used, used := used + count)
                passages = [texts(engine, 1, draw.randrange(64, 513), each)[0] for each in numbers]
                if not samples:
                    timed(passages, "full", 0)
                    samples.clear()
                timed(passages, "full", 0)
                engine.encode(passages[:known])
                timed(passages, "probe-shift", min(known, 1))
                if known:
                    engine.prefill(prompt_of(engine, passages[:known], QUESTION), method="exact")
                    engine.finish_background()
                timed(passages, "auto", known)
                timed(passages, "exact", known, 1 + count - known)
        prefilled = engine.prefill(prompt_of(engine, passages, QUESTION))
        engine.decode(prefilled, max_new_tokens=4)
        engine.finish_background()  # which loop computes answers is measured after the first one
        begun = time.process_time()
        answer = engine.decode(prefilled, max_new_tokens=24, temperature=0.0).token_ids
        token_s = (time.process_time() - begun) / len(answer)
    return asdict(Costs.fitted(samples, token_s)) | {"samples": len(samples)}


# --- simulated time


class Large:
    """The requests of one large trace; each run takes the next ones."""

    def __init__(self, trace: str, costs: Costs, shape: tuple[str, int] = ("passages", PASSAGES)) -> None:
        exponent, self.answer_tokens = TRACES[trace]
        self.costs, (lengths, each) = costs, shape
        count = LARGE_WARM + (2 + len(LARGE_LOADS)) * LARGE_COUNT
        self.trace = make_trace(exponent, lengths, LARGE, count, each, seed=0)

    def requests(self, run: int, rate: float) -> list[SimulatedRequest]:
        """The requests of a run; the first of them warms up."""
        count = LARGE_COUNT if run else LARGE_WARM
        first = run and LARGE_WARM + (run - 1) * LARGE_COUNT
        tokens = self.trace.tokens
        return [
            SimulatedRequest(at, tuple((each, tokens[each]) for each in asked), self.answer_tokens)
            for at, asked in zip(
                arrivals(count, rate), self.trace.requests[first : first + count], strict=True
            )
        ]

    def row(self, outcome: SimulationResult, rate: float) -> Row:
        read = outcome.path_tokens / outcome.tokens
        return {
            "rate": rate, "mean_s": outcome.mean_s, "p99_s": outcome.p99_s, "passed": outcome.passed, "on_paths": read
        }  # fmt: skip

    def system(self, system: System, full_s: float | None) -> Row:
        with simulator(system, self.costs, self.trace.tokens, BUDGET) as one:
            one.run(self.requests(0, SELDOM))
            alone_s = one.run(self.requests(1, SELDOM)).mean_s
            rates = [COMMON / (full_s or alone_s), *(load / alone_s for load in LARGE_LOADS)]
            rows = [
                self.row(one.run(self.requests(1 + run, rate)), rate) for run, rate in enumerate(rates, 1)
            ]
        return under_load(alone_s, rows)

    def once(self, system: System, rate: float, share: float = BUDGET) -> Row:
        with simulator(system, self.costs, self.trace.tokens, share) as one:
            one.run(self.requests(0, SELDOM))
            return self.row(one.run(self.requests(1, rate)), rate)


def under_load(alone_s: float, rows: list[Row]) -> Row:
    """A system's results; the run at the common rate is the first."""
    points = [(0.0, alone_s), *((row["rate"], row["mean_s"]) for row in rows)]
    reached = throughput(points, SLO * alone_s)
    return {"alone_s": alone_s, "common": rows[0], "loads": rows[1:], "throughput": reached}


def simulated(case: tuple[str, Costs]) -> Row:
    """Simulate all systems on a large trace, and the effects of eviction and order, also with whole articles."""
    shapes = {"passages": Large(*case), "documents": Large(*case, ARTICLES)}
    full_s, systems = None, dict[str, Row]()
    for system in SYSTEMS:
        systems[system.name] = shapes["passages"].system(system, full_s)
        full_s = full_s or systems[system.name]["alone_s"]
    policies, orders = list[Row](), list[Row]()
    for shape, large in shapes.items():
        alone = {
            system.name: large.once(replace(system, window=0), SELDOM)["mean_s"]
            for system in SYSTEMS
            if system.window
        }
        orders += [
            {"lengths": shape, "system": system.name, "load": load, "window": window}
            | large.once(replace(system, window=window), load / alone[system.name])
            for system in SYSTEMS
            if system.window
            for load in SATURATED
            for window in (0, WINDOW)
        ]
        policies += [
            {"lengths": shape, "budget": share, "policy": policy}
            | large.once(replace(EXACT, policy=policy), AT / alone[EXACT.name], share)
            for share in BUDGETS
            for policy in ("lru", "gdsf", "pgdsf")
        ]
    return {"systems": systems, "policies": policies, "orders": orders}


def compared(systems: dict[str, Row]) -> str:
    """A row per system: time without load and at the common rate, and requests per second within the SLO."""
    head = [
        "system",
        "alone",
        "mean",
        "p99",
        "requests/s within the SLO",
        "of full's",
    ]
    rows, full = list[Sequence[str]](), systems["full"]["throughput"]
    for name, row in systems.items():
        at, last = row["common"], row["loads"][-1]
        more = "" if last["mean_s"] > SLO * row["alone_s"] else "at least "
        rows.append((
            name, *(f"{each:.2f} s" for each in (row["alone_s"], at["mean_s"], at["p99_s"])),
            f"{more}{row['throughput']:.2f}", f"{row['throughput'] / full:.2f}",
        ))  # fmt: skip
    return markdown(head, rows)


def evictions(rows: list[Row]) -> str:
    """A row a policy, a column a budget; requests of whole articles, for which the policies differ most."""
    shown = [row for row in rows if row["lengths"] == "documents"]
    found: dict[str, list[str]] = {}
    for row in shown:
        found.setdefault(row["policy"], []).append(f"{row['mean_s']:.2f} s")
    budgets = dict.fromkeys(f"{row['budget']:.0%}" for row in shown)
    return markdown(("room for", *budgets), [(policy, *cells) for policy, cells in found.items()])


def ordered(rows: list[Row]) -> str:
    lines = [
        (
            SHAPES[first["lengths"]],
            first["system"],
            *_side_by_side(first, least, 1, 0),
        )
        for first, least in zip(rows[::2], rows[1::2], strict=True)
    ]
    return markdown(("passages", "system", "in order of arrival", "least first", "lower by"), lines)


def ahead(rows: list[Row]) -> str:
    lines = [
        (
            f"{row['load']:.1f}" if row["load"] else "nobody waits", f"{row['retrieval_s']:.2f} s",
            *_side_by_side(row["without"], row["with"], 2, 2),
        )
        for row in rows
    ]  # fmt: skip
    return markdown(("load", "retrieval", "read afterwards", "read ahead", "lower by"), lines)


def _side_by_side(before: Row, after: Row, digits: int, tail_digits: int) -> tuple[str, ...]:
    """Two runs, and by how much the second's mean is lower."""
    cells = [f"{row['mean_s']:.{digits}f} s, p99 {row['p99_s']:.{tail_digits}f}" for row in (before, after)]
    return *cells, f"{before['mean_s'] / after['mean_s']:.2f} times"


def page(found: Row) -> str:
    """The generated part of docs/load.md."""
    parts = []
    for trace, rows in found["real"].items():
        about = f"**`{trace}`, measured**: {rows['full']['about']}; {COUNT} requests a run."
        parts += [about, compared({name: rows[name] for name in NAMES if name in rows})]
    if "ahead" in found:
        parts += ["**Reading ahead, measured** (`blend`):", ahead(found["ahead"]["rows"])]
    if "order" in found:
        parts += [
            f"**Order, measured** (`mmlu`, {ORDERED} requests a run, load {ORDERED_LOAD}):",
            ordered(found["order"]["rows"]),
        ]
    costs, rows = found["costs"], found["simulated"][SHOWN]
    parts += [
        f"**Eviction, simulated** (`{SHOWN}`, `exact tree`, {SHAPES['documents']}; costs fitted to {costs['samples']} "
        f"prompts, median error {costs['error']:.0%}): mean TTFT.",
        evictions(rows["policies"]),
    ]
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def picture(found: Row) -> None:
    """Plot the mean time to first token by rate, on the engine and simulated."""
    panels = [(f"{trace}, the engine", rows) for trace, rows in found["real"].items()]
    panels += [(f"{trace}, simulated", rows["systems"]) for trace, rows in found["simulated"].items()]
    figure = figure_of(3.4 * len(panels), 3.2)
    for axes, (title, rows) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for number, name in enumerate(name for name in NAMES if name in rows):
            row = rows[name]
            points = sorted((each["rate"], each["mean_s"]) for each in (row["common"], *row["loads"]))
            axes.plot(*zip((0.0, row["alone_s"]), *points, strict=True), color=f"C{number}", label=name)
            axes.axhline(SLO * row["alone_s"], color=f"C{number}", linewidth=0.5, linestyle=":")
        axes.set(title=title, xlabel="requests/s", ylabel="mean TTFT, s", yscale="log")
    axes.legend(fontsize=7)
    figure.savefig(PICTURE, metadata={"Date": None})


def page_with(found: Row) -> str:
    """docs/load.md with the recorded tables."""
    return between_marks(PAGE.read_text(encoding="utf-8"), lambda: page(found))


def main(
    home: Annotated[str | None, typer.Option(help="Where the model is.")] = None,
    trace: Annotated[str, typer.Option(help="Of the real engine: mmlu or nq.")] = "mmlu",
    parts: Annotated[
        str, typer.Option(help="By commas.")
    ] = f"calibrate,{','.join(NAMES)},ahead,order,simulate",
    render: Annotated[bool, typer.Option("--render", help="Nothing is measured.")] = False,
) -> None:
    """Measure, and add the results to the recorded ones."""
    for part in () if render else parts.split(","):
        measure(part, trace, home or str(resolve_home(None)))
    found = read_json(RECORDED)
    if {"costs", "real", "simulated"} <= found.keys():
        PAGE.write_text(page_with(found), encoding="utf-8")
        picture(found)


def measure(part: str, trace: str, home: str) -> None:
    if part == "calibrate":
        keep(calibrated(home), "costs")
    elif part == "ahead":
        keep({"rows": read_ahead(home)}, "ahead")
    elif part == "order":
        keep({"rows": in_order(home)}, "order")
    elif part == "simulate":
        given = read_json(RECORDED)["costs"]
        costs = Costs(tuple(given["weights"]), given["token_s"], given["error"])
        with ProcessPoolExecutor(2) as pool:
            found = pool.map(simulated, [(each, costs) for each in TRACES])
            keep(dict(zip(TRACES, found, strict=True)), "simulated")
    else:
        real = read_json(RECORDED).get("real", {}).get(trace, {})
        alone_s = real["full"]["alone_s"] if part != "full" and "full" in real else None  # of this machine
        keep(measured(SYSTEMS[NAMES.index(part)], trace, alone_s, home), "real", trace, part)


def keep(row: Row, *names: str) -> None:
    """Store a row in the recorded file, under these names."""
    everything = place = read_json(RECORDED)
    for name in names[:-1]:
        place = place.setdefault(name, {})
    place[names[-1]] = row
    RECORDED.write_text(dumped(everything, 4), encoding="utf-8")


if __name__ == "__main__":
    run(main, __doc__)
