"""How fast passages are encoded and stored, beside the model's own forward over the same tokens, in turns.

    python -m benchmarks.measure_ingest --model default --tokens 512

Prints the share of the model's own rate that is left, by the clock and by processor time, and both rates: medians over
the chunks. Also what the model's own forward makes of 1, 2 and 4 chunks at a time.
"""

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.filler import sentences
from ragblend import Chunk, Engine, Prompt

AT_ONCE = (1, 2, 4)
Seconds = tuple[float, float]  # by the clock, by the processor


def spent(since: Seconds) -> Seconds:
    return time.perf_counter() - since[0], time.process_time() - since[1]


def texts(engine: Engine, count: int, tokens: int) -> list[str]:
    """Different texts of about so many tokens."""
    drawn = sentences(random.Random(time.time_ns()))
    each = engine.count_tokens(" ".join(itertools.islice(drawn, 100)))
    return [" ".join(itertools.islice(drawn, max(1, 100 * tokens // each))) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--home", type=Path)
    parser.add_argument("--dtype")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=40)
    given = parser.parse_args()
    engine = Engine.open(given.model, given.home, dtype=given.dtype)
    assert engine.gate.passed, engine.gate.reason
    passages = texts(engine, given.chunks, given.tokens)
    ids = [engine.tokenize(Prompt([Chunk(each)])).chunks[0].token_ids or () for each in passages]
    names = [f"measured-{time.time_ns()}-{number}" for number in range(given.chunks)]
    base = engine.runtime.decoder.model.base_model

    @torch.inference_mode()
    def own(batch: Sequence[Sequence[int]]) -> None:
        base(input_ids=torch.tensor(batch), use_cache=False)

    def rate(at_once: int) -> float:
        length = min(map(len, ids))
        begun = time.perf_counter()
        for number in range(0, 8, at_once):
            own([each[:length] for each in ids[number : number + at_once]])
        return 8 * length / (time.perf_counter() - begun)

    engine.enter(passages, names)
    encoding = engine.encode_nodes(names)
    next(encoding)
    shares, rates = list[Seconds](), list[tuple[float, float]]()
    for each in ids[1:]:
        begun = time.perf_counter(), time.process_time()
        own([each])
        forward, begun = spent(begun), (time.perf_counter(), time.process_time())
        next(encoding)  # ends with the chunk before: each is written while the one after it is computed
        encoded = spent(begun)
        shares.append((forward[0] / encoded[0], forward[1] / encoded[1]))
        rates.append((len(each) / forward[0], len(each) / encoded[0]))
    engine.forget(names)
    by_clock, by_cpu = (statistics.median(each) for each in zip(*shares, strict=True))
    alone, stored = (statistics.median(each) for each in zip(*rates, strict=True))
    print(
        f"{by_clock:.1%} of the model's own rate (processor time {by_cpu:.1%}): {stored:.0f} of {alone:.0f} tokens/s"
    )
    turns = [[rate(at_once) for at_once in AT_ONCE] for _ in range(5)]
    medians = [statistics.median(each) for each in zip(*turns, strict=True)]
    said = (f"{count}: {each:.0f} tokens/s" for count, each in zip(AT_ONCE, medians, strict=True))
    print("chunks at a time: " + ", ".join(said))


if __name__ == "__main__":
    main()
