"""Times encoding and storing passages against the model's own forward over the same tokens, alternately.

    python -m benchmarks.measure_ingest --model default --tokens 512

Prints the share of the model's own speed that is left, by wall-clock and by processor time, and both speeds: medians
over the chunks.
"""

import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.common import AnyHome, Model, clock_and_cpu_s, make_texts, medians, run
from ragblend import Chunk, Engine, Prompt


def main(
    model: Model = "default",
    home: AnyHome = None,
    dtype: str | None = None,
    tokens: int = 512,
    chunks: int = 40,
) -> None:
    """Measure, and print a line."""
    engine = Engine.open(model, home, dtype=dtype)
    assert engine.gate.passed, engine.gate.reason
    passages = make_texts(engine, chunks, tokens, first=time.time_ns())  # not stored yet
    ids = [engine.tokenize(Prompt([Chunk(each)])).chunks[0].token_ids or () for each in passages]
    names = [f"measured-{time.time_ns()}-{number}" for number in range(chunks)]
    base = engine.runtime.decoder.model.base_model

    @torch.inference_mode()
    def run_forward(token_ids: Sequence[int]) -> None:
        base(input_ids=torch.tensor([token_ids]), use_cache=False)

    engine.enter(passages, names)
    encoding = engine.encode_nodes(names)
    next(encoding)
    rows = list[tuple[float, ...]]()
    for each in ids[1:]:
        forward = clock_and_cpu_s(partial(run_forward, each))
        # A chunk is written while the next one is computed.
        encoded = clock_and_cpu_s(partial(next, encoding))
        shares = (forward[0] / encoded[0], forward[1] / encoded[1])
        rows.append((*shares, len(each) / forward[0], len(each) / encoded[0]))
    engine.forget(names)
    by_clock, by_cpu, alone, stored = medians(rows)
    summary = f"{by_clock:.1%} of the model's own rate (processor time {by_cpu:.1%})"
    print(f"{summary}: {stored:.0f} of {alone:.0f} tokens/s")


if __name__ == "__main__":
    run(main, __doc__)
