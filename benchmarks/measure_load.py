"""Measures requests under load as RAGCache does (arXiv 2404.12457, section 7): time to first token by request rate.

    python -m benchmarks.measure_load --systems full,blend        minutes each
    python -m benchmarks.measure_load --render                    the document again, from recorded figures

Requests arrive as a Poisson process; each asks about passages drawn by popularity. The clock is this process's
processor time, with one computing thread: other load does not count, and waiting for the next request takes no time.
Writes `load.json` beside this file, the tables of docs/load.md and a picture.
"""

import json
import math
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from benchmarks.common import (
    DATA,
    DOCS,
    AnyHome,
    Row,
    make_texts,
    markdown_table,
    open_engine,
    read_json,
    replace_marked,
    run,
    to_json,
)
from ragblend.engine.config import resolve_home
from ragblend.engine.engine import Engine
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.scheduling.order import WINDOW, RequestOrder
from ragblend.engine.scheduling.queue import PAUSE_S
from ragblend.kvstore.blob import file_nbytes
from ragblend.kvstore.keys import ChunkKey
from ragblend.measuring.plots import new_figure
from ragblend.measuring.prefilling import cpu_name, prompt_of

RECORDED, PAGE, PICTURE = DATA / "load.json", DOCS / "load.md", DOCS / "pictures" / "load.svg"
# RAGCache section 3.2: 3% of the documents make 60% of MMLU's requests.
HEAD_SHARE, HEAD_REQUESTS = 0.03, 0.60
PASSAGES = 4  # of a request
DOCUMENTS = 120
WARM_UP_REQUESTS, UNLOADED_REQUESTS, RUN_REQUESTS = 40, 12, 40  # requests of each run
BUDGET = 1.5  # the store's budget, as a multiple of the corpus's KV
# Request rates: a share of full prefill's rate without load, and shares of each system's own.
COMMON_LOAD, OWN_LOADS = 0.8, (1.0, 1.4, 2.0)
SLO_FACTOR = 5.0  # the SLO as a multiple of the time to first token without load
UNLOADED_RATE = 1e-3  # requests a second, so few that none waits
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class System:
    """A system to compare. window: 0 is first come, first served."""

    name: str
    method: str
    policy: str = "pgdsf"
    window: int = WINDOW

    @property
    def fuses(self) -> bool:
        return self.method in ("probe-shift", "auto")


SYSTEMS = (
    System("full", "full", window=0),
    System("prefix LRU", "exact", "lru", window=0),
    System("exact tree", "exact"),
    System("blend", "probe-shift"),
    System("auto", "auto"),
)
NAMES = [system.name for system in SYSTEMS]


def arrivals(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times of a Poisson process with exactly that mean rate."""
    draw = random.Random(seed)
    gaps = [draw.expovariate(1.0) for _ in range(count)]
    return [at * count / sum(gaps) / rate for at in accumulate(gaps)]


def throughput(points: Sequence[tuple[float, float]], slo_s: float) -> float:
    """The rate at which the mean time crosses the SLO, interpolated between points (requests/s, mean s).

    If it does not, the last rate; 0 if even the first point is above the SLO.
    """
    ordered = sorted(points)
    for (low, before), (high, after) in pairwise(ordered):
        if before <= slo_s < after:
            return low + (high - low) * (slo_s - before) / (after - before)
    return ordered[-1][0] if ordered[-1][1] <= slo_s else 0.0


def popularity(documents: int) -> Floats:
    """Zipf's probabilities that give HEAD_SHARE of the documents HEAD_REQUESTS of the requests."""
    from scipy.optimize import brentq

    def zipf(exponent: float) -> Floats:
        weights = np.arange(1, documents + 1, dtype=np.float64) ** -exponent
        return weights / weights.sum()

    head = max(1, round(HEAD_SHARE * documents))
    return zipf(brentq(lambda exponent: zipf(exponent)[:head].sum() - HEAD_REQUESTS, 0.0, 10.0))


def passage_lengths(documents: int, draw: np.random.Generator) -> NDArray[np.int64]:
    """Tokens of passages as the app cuts them, up to 512."""
    tokens = draw.integers(400, 513, documents)  # passages end at the end of a sentence
    is_last = draw.random(documents) < 0.2  # one in five is its document's last, of any length
    tokens[is_last] = draw.integers(32, 513, int(is_last.sum()))
    return tokens


# --- the real engine


class SkippingClock:
    """Processor time of this process, plus the time that is skipped while all active threads only wait.

    awake: how many threads (the sender and the running requests) are not sleeping.
    """

    def __init__(self, engine: Engine) -> None:
        self._skipped, self._engine = -time.process_time(), engine
        self._lock, self._deadlines, self.awake = threading.Lock(), list[float](), 1

    def now(self) -> float:
        return time.process_time() + self._skipped

    def add(self, awake: int) -> None:
        with self._lock:
            self.awake += awake

    def sleep_until(self, at: float) -> None:
        with self._lock:
            self._deadlines.append(at)
            self.awake -= 1
        while (now := self.now()) < at:
            with self._lock:
                due = min(self._deadlines)
                if due > now and not self.awake and not self._is_computing(due - now):
                    self._skipped += due - now
            time.sleep(0.001)
        with self._lock:
            self._deadlines.remove(at)
            self.awake += 1

    def _is_computing(self, pause_s: float) -> bool:
        """Whether the device is busy, or would get background work in a pause of that length."""
        is_busy = self._engine.runtime.queue.request_count > 0
        return is_busy or (pause_s > PAUSE_S and not self._engine.finish_background(timeout_s=0.01))


Ask = Callable[[int, Callable[[str], None]], None]


def send_requests(engine: Engine, window: int, times_s: Sequence[float], ask: Ask) -> Row:
    """Send each request at its time, and return the rate and the times to first token. ask(number, on_text)."""
    clock, threads = SkippingClock(engine), list[threading.Thread]()
    engine.runtime.queue.order = RequestOrder(window=window)
    ttft_s = [math.nan] * len(times_s)

    def send(number: int) -> None:
        def note_first_token(_: str) -> None:
            if math.isnan(ttft_s[number]):
                ttft_s[number] = clock.now() - times_s[number]

        ask(number, note_first_token)
        note_first_token("")  # an answer without text
        clock.add(-1)

    for number, time_s in enumerate(times_s):
        clock.sleep_until(time_s)
        clock.add(1)
        threads.append(threading.Thread(target=send, args=(number,)))
        threads[-1].start()
    clock.add(-1)
    for thread in threads:
        thread.join()
    p99_s = float(torch.quantile(torch.tensor(ttft_s), 0.99))
    return {"rate": len(times_s) / times_s[-1], "mean_s": statistics.mean(ttft_s), "p99_s": p99_s}


@contextmanager
def on_one_thread(home: str, **options: Any) -> Iterator[Engine]:
    """An engine with the home's model, a store of its own and one computing thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "models").symlink_to(Path(home) / "models")
        with open_engine(home=Path(folder), **options) as engine:
            yield engine


class RequestTrace:
    """Documents of one passage each, and requests that ask about some of them; the same in every run."""

    def __init__(self) -> None:
        draw = np.random.default_rng((0, PASSAGES))
        self.tokens: list[int] = passage_lengths(DOCUMENTS, draw).tolist()
        shuffled = np.empty(DOCUMENTS)
        shuffled[draw.permutation(DOCUMENTS)] = popularity(DOCUMENTS)
        drawn = self._draws(shuffled, draw)
        count = WARM_UP_REQUESTS + UNLOADED_REQUESTS + (len(OWN_LOADS) + 2) * RUN_REQUESTS
        self.requests = [self._request(drawn) for _ in range(count)]

    def _draws(self, shuffled: Floats, draw: np.random.Generator) -> Iterator[int]:
        while True:
            yield from draw.choice(DOCUMENTS, size=4096, p=shuffled).tolist()

    def _request(self, drawn: Iterator[int]) -> list[int]:
        """Different documents, drawn one after the other."""
        found: dict[int, None] = {}
        while len(found) < PASSAGES:
            found[next(drawn)] = None
        return list(found)

    def texts(self, engine: Engine) -> list[str]:
        return [make_texts(engine, 1, tokens, number)[0] for number, tokens in enumerate(self.tokens)]

    def prompts(self, engine: Engine, known: Sequence[str], first: int, count: int) -> list[Prompt]:
        return [
            prompt_of(engine, [known[each] for each in request], f"What is told in {number}?")
            for number, request in enumerate(self.requests[first : first + count], start=first)
        ]


class Trial:
    """One system on the real engine, whose store is filled as that system would fill it.

    Each run takes the next requests of the trace.
    """

    def __init__(self, system: System, corpus: RequestTrace, engine: Engine, passages: Sequence[str]) -> None:
        self._system, self._corpus, self._engine, self._passages = system, corpus, engine, passages
        self.begin = WARM_UP_REQUESTS

    def at_rate(self, count: int, rate: float) -> Row:
        engine, system = self._engine, self._system
        prompts = self._corpus.prompts(engine, self._passages, self.begin, count)
        self.begin += count

        def ask(number: int, on_text: Callable[[str], None]) -> None:
            # Opens this thread's database connection, which the prefill needs as well.
            engine.store.contains(ChunkKey("0" * 64))
            engine.generate(prompts[number], system.method, on_text=on_text, max_new_tokens=1)

        row = send_requests(engine, system.window, arrivals(count, rate), ask)
        print(f"{system.name}, {system.window}: {json.dumps(row)}", flush=True)
        return row

    @property
    def about(self) -> str:
        return f"{self._engine.model_name} on one core of {cpu_name()}, {self._engine.dtype}"


@contextmanager
def trial(system: System, corpus: RequestTrace, home: str) -> Iterator[Trial]:
    with on_one_thread(home) as engine:
        passages, shape = corpus.texts(engine), engine.runtime.fingerprint.geometry
        total = sum(file_nbytes(shape, tokens, engine.runtime.codec) for tokens in corpus.tokens)
    with on_one_thread(home, store_policy=system.policy, store_budget_bytes=int(BUDGET * total)) as engine:
        if system.fuses:
            engine.encode(passages)
        else:
            engine.prefill(corpus.prompts(engine, passages, 0, 1)[0], method="full")
        if system.name != "full":
            for prompt in corpus.prompts(engine, passages, 0, WARM_UP_REQUESTS):
                engine.generate(prompt, system.method, max_new_tokens=1)
                engine.finish_background()
        yield Trial(system, corpus, engine, passages)


def measure_system(system: System, alone_full_s: float | None, home: str) -> Row:
    """Measure a system without load, at the rate that all share, and at its own rates."""
    with trial(system, RequestTrace(), home) as runs:
        alone_s = runs.at_rate(UNLOADED_REQUESTS, UNLOADED_RATE)["mean_s"]
        common = runs.at_rate(RUN_REQUESTS, COMMON_LOAD / (alone_full_s or alone_s))
        loads = [runs.at_rate(RUN_REQUESTS, load / alone_s) for load in OWN_LOADS]
        points = [(0.0, alone_s), *((row["rate"], row["mean_s"]) for row in (common, *loads))]
        reached = throughput(points, SLO_FACTOR * alone_s)
        found = {"alone_s": alone_s, "common": common, "loads": loads, "throughput": reached}
        return found | {"about": runs.about}


# --- the document


def comparison_table(systems: Row) -> str:
    """A row per system: time without load and at the common rate, and requests per second within the SLO."""
    head = ("system", "alone", "mean", "p99", "requests/s within the SLO", "of full's")
    rows = list[Sequence[str]]()
    for name in NAMES:
        row, full = systems[name], systems["full"]["throughput"]
        at, last, reached = row["common"], row["loads"][-1], row["throughput"]
        more = "" if last["mean_s"] > SLO_FACTOR * row["alone_s"] else "at least "
        times = (f"{each:.2f} s" for each in (row["alone_s"], at["mean_s"], at["p99_s"]))
        rows.append((name, *times, f"{more}{reached:.2f}", f"{reached / full:.2f}"))
    return markdown_table(head, rows)


def draw_picture(found: Row) -> None:
    """Plot the mean time to first token by rate."""
    figure = new_figure(5.0, 3.2)
    axes = figure.subplots()
    for number, name in enumerate(NAMES):
        row = found[name]
        points = sorted((each["rate"], each["mean_s"]) for each in (row["common"], *row["loads"]))
        axes.plot(*zip((0.0, row["alone_s"]), *points, strict=True), color=f"C{number}", label=name)
        axes.axhline(SLO_FACTOR * row["alone_s"], color=f"C{number}", linewidth=0.5, linestyle=":")
    axes.set(xlabel="requests/s", ylabel="mean TTFT, s", yscale="log")
    axes.legend(fontsize=7)
    figure.savefig(PICTURE, metadata={"Date": None})


def render_page(found: Row) -> str:
    """docs/load.md with the recorded table."""
    about = f"{found['full']['about']}; {RUN_REQUESTS} requests a run."
    return replace_marked(PAGE.read_text(encoding="utf-8"), lambda: f"{about}\n\n{comparison_table(found)}")


def main(
    home: AnyHome = None,
    systems: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(NAMES),
    render: Annotated[bool, typer.Option("--render", help="Nothing is measured.")] = False,
) -> None:
    """Measure, and add the results to the recorded ones."""
    found: Row = read_json(RECORDED)
    for name in () if render else systems.split(","):
        alone_full_s = None if name == "full" else found["full"]["alone_s"]  # of this machine
        found[name] = measure_system(
            SYSTEMS[NAMES.index(name)], alone_full_s, str(home or resolve_home(None))
        )
        RECORDED.write_text(to_json(found, 2), encoding="utf-8")
    if found.keys() >= set(NAMES):
        PAGE.write_text(render_page(found), encoding="utf-8")
        draw_picture(found)


if __name__ == "__main__":
    run(main, __doc__)
