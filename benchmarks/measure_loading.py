"""Times the first token from a slow disk: full prefill, all KV loaded, and what pays loaded, in turns.

    python -m benchmarks.measure_loading --model default --rates 50,200,1000

A disk of that many megabytes a second is played by sleeping after each read. Prints medians of milliseconds, their
ratio to full prefill, and the tokens of stored passages that were computed instead of loaded.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated
from unittest import mock

import typer

from benchmarks.common import AnyHome, Model, counts, in_turns, opened, run
from benchmarks.filler import sentences
from ragblend.kvstore.blob import ChunkReader
from ragblend.measuring.prefilling import prompt_of, stored
from ragblend.measuring.ttft import QUESTION, cut_texts

WAYS = {"full": ("full", "all"), "all": ("probe-shift", "all"), "auto": ("probe-shift", "auto")}


@contextmanager
def slow_disk(bytes_per_s: float) -> Iterator[None]:
    """In the block, files are read at that speed, all readers together, and none is in the page cache."""
    lock, free_at, read = threading.Lock(), [0.0], ChunkReader._read

    def slowly(reader: ChunkReader, first: int, *layers: list) -> None:
        nbytes = len(layers) * reader.header.layer_nbytes
        with lock:
            free_at[0] = max(free_at[0], time.perf_counter()) + nbytes / bytes_per_s
            until = free_at[0]
        read(reader, first, *layers)
        time.sleep(max(0.0, until - time.perf_counter()))

    with mock.patch.multiple(ChunkReader, _read=slowly, comes_from="disk"):
        yield


def main(
    model: Model = "default",
    home: AnyHome = None,
    rates: Annotated[str, typer.Option(help="Megabytes a second.")] = "50,200,1000",
    passages: int = 6,
    tokens: int = 512,
    repeats: int = 5,
) -> None:
    """Time the ways on one prompt."""
    text = " ".join(itertools.islice(sentences(random.Random(0)), 4000))
    with opened(model, home) as engine, stored(engine, cut_texts(engine, text, passages, tokens)):
        prompt = prompt_of(engine, cut_texts(engine, text, passages, tokens), QUESTION)
        engine.profile()
        for rate in counts(rates):
            not_loaded = [0]

            def seconds(way: str) -> float:
                method, engine.runtime.load = WAYS[way]
                begun = time.perf_counter()
                report = engine.prefill(prompt, method=method).report
                if way == "auto":
                    not_loaded.append(report.tokens.not_loaded)  # noqa: B023
                return time.perf_counter() - begun

            with slow_disk(rate * 1e6):
                for way in WAYS:  # warms up, and shows the speed of the disk
                    seconds(way)
                times = in_turns({way: lambda way=way: seconds(way) for way in WAYS}, repeats)  # type: ignore[misc]
            shares = {
                way: statistics.median(t / f for t, f in zip(took, times["full"], strict=True))
                for way, took in times.items()
            }
            told = ", ".join(
                f"{way} {1e3 * statistics.median(took):.0f} ms ({shares[way]:.2f} of full)"
                for way, took in times.items()
            )
            print(
                f"{rate} MB/s: {told}; {statistics.median(not_loaded[1:]):.0f} tokens not loaded", flush=True
            )


if __name__ == "__main__":
    run(main, __doc__)
