"""Measures eviction after the first token: time per token, bytes of KV, and divergence, by the number of tokens kept.

    python -m benchmarks.measure_eviction --home HOME --data questions.json --passages 6 --limit 12

Each question is prefilled by --method, its greedy answer is teacher-forced through the same context after eviction, and
the next-token distributions are compared with those of the whole context (KL, nats). Time per token is the median over
the steps of all questions, measured alternately, so that other load slows all rows alike. Bytes are of the prompt's KV.
"""

from functools import partial
from statistics import fmean, median
from typing import Any

from benchmarks.common import (
    AnyHome,
    Data,
    Limit,
    Model,
    agreement,
    counts,
    markdown,
    opened,
    packed_loop,
    run,
    spent,
)
from ragblend import Engine
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.decoding.eviction import evict
from ragblend.measuring.data import choose, load
from ragblend.measuring.prefilling import stored
from ragblend.measuring.quality import build_prompt


def main(
    data: Data,
    model: Model = "default",
    home: AnyHome = None,
    limit: Limit = 12,
    passages: int = 6,
    method: str = "cacheblend",
    ratio: float = 0.15,
    tokens: int = 16,
    keep: str = "1024,512,256,128,64",
) -> None:
    """Measure, and print a table."""
    found: dict[int | None, list[tuple[float, float, list[float]]]] = {n: [] for n in (None, *counts(keep))}
    how: dict[str, Any] = {"method": method, "ratio": ratio}
    with opened(model, home, load="all") as engine:
        if engine.gate.passed and DirectDecode.supports(engine.runtime.decoder):
            engine.runtime.choice.current, _ = packed_loop(engine)
        for question in choose(load(data).questions, limit, passages=passages):
            prompt, whole = build_prompt(engine, question, tokens), None
            with stored(engine, question.passages):
                answer = engine.generate(prompt, max_new_tokens=tokens, temperature=0.0, **how)
                for budget, rows in found.items():
                    prefilled = engine.prefill(prompt, **how)
                    if budget is not None:
                        evict(engine.runtime.decoder, prefilled.prompt, prefilled.cache, budget)
                    logits = engine.continue_logits(prefilled, answer.token_ids)
                    whole = logits if whole is None else whole
                    times = step_times(engine, prefilled.cache, answer.token_ids)
                    rows.append((agreement(whole, logits)[0], prefilled.cache.nbytes / 1e6, times))
    lines = []
    for budget, rows in found.items():
        kls, sizes, all_ms = zip(*rows, strict=True)
        step_ms = median(ms for each in all_ms for ms in each)
        lines.append((str(budget or "all"), f"{fmean(kls):.4f}", f"{fmean(sizes):.1f}", f"{step_ms:.1f}"))
    print(markdown(("kept", "mean KL", "KV, MB", "ms/token"), lines))


def step_times(engine: Engine, cache: Any, token_ids: tuple[int, ...]) -> list[float]:
    """Milliseconds of each decoding step for the given tokens."""
    steps = engine.runtime.choice.current
    times = [1e3 * spent(partial(steps.run, cache, [token_id]))[0] for token_id in token_ids]
    cache.truncate()
    return times


if __name__ == "__main__":
    run(main, __doc__)
