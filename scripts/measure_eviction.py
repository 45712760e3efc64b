"""What eviction after the first token gains and costs: time per token, bytes of KV, and divergence, by tokens kept.

    python scripts/measure_eviction.py --home /tmp/eviction --data questions.json --passages 6 --limit 12

Each question is read by --method, its greedy answer is forced through the same context thinned out, and the next-token
distributions are compared with those of the whole context (KL, nats). Time per token is the median over the steps of
all questions, in one process and in turn, so that a busy machine slows all rows alike. Bytes are of the prompt's KV.
"""

import argparse
import contextlib
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

Row = dict[str, list[float]]


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--model", default="default")
    parser.add_argument("--data", type=Path, required=True, help="as for `ragblend bench quality`")
    parser.add_argument("--passages", type=int, default=6)
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--method", default="cacheblend")
    parser.add_argument("--ratio", type=float, default=0.15)
    parser.add_argument("--tokens", type=int, default=16, help="of each answer")
    parser.add_argument("--keep", default="1024,512,256,128,64")
    given = parser.parse_args()
    budgets = [None, *(int(text) for text in given.keep.split(","))]
    rows: dict[int | None, Row] = {budget: {"kl": [], "ms": [], "mb": []} for budget in budgets}
    from ragblend import Engine
    from ragblend.app.bench.data import load_questions

    with contextlib.closing(Engine.open(given.model, home=given.home)) as engine:
        for number, question in enumerate(load_questions(given.data)[: given.limit]):
            question = replace(question, passages=question.passages[: given.passages])
            measure(engine, question, given, rows)
            print(f"{number + 1} of {given.limit}", flush=True)
    print("\nkept    mean KL   KV, MB   ms/token")
    for budget, row in rows.items():
        kl, ms, mb = statistics.mean(row["kl"]), statistics.median(row["ms"]), statistics.mean(row["mb"])
        print(f"{budget or 'all':>5}  {kl:8.4f}  {mb:7.1f}  {ms:9.1f}")
    return 0


def measure(engine: Any, question: Any, given: argparse.Namespace, rows: dict[int | None, Row]) -> None:
    """One question, with every budget in turn."""
    from ragblend.app.bench.metrics import kl_divergence
    from ragblend.app.bench.quality import build_prompt
    from ragblend.engine.eviction import evict

    engine.encode(list(question.passages))
    prompt = build_prompt(engine, question, given.tokens)
    answer = engine.generate(prompt, method=given.method, ratio=given.ratio, max_new_tokens=given.tokens)
    whole = None
    for budget, row in rows.items():
        prefilled = engine.prefill(prompt, method=given.method, ratio=given.ratio)
        if budget is not None:
            evict(engine._resources.decoder, prefilled.prompt, prefilled.cache, budget)
        logits = engine.continue_logits(prefilled, answer.token_ids)
        whole = logits if whole is None else whole
        row["kl"].append(kl_divergence(whole, logits))
        row["mb"].append(prefilled.cache.nbytes / 1e6)
        row["ms"] += step_times(engine, prefilled, answer.token_ids)


def step_times(engine: Any, prefilled: Any, token_ids: tuple[int, ...]) -> list[float]:
    """Milliseconds of each decoding step, the given tokens going in."""
    import torch

    model, cache, times = engine._resources.loaded.model, prefilled.cache, []
    with torch.inference_mode():
        for token_id in token_ids:
            begun = time.perf_counter()
            model(torch.tensor([[token_id]], device=model.device), past_key_values=cache, use_cache=True)
            times.append((time.perf_counter() - begun) * 1e3)
    cache.truncate()
    return times


if __name__ == "__main__":
    raise SystemExit(main())
