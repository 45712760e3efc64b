"""Measures eviction after the first token: time per token, bytes of KV, and divergence, by the number of tokens kept.

    python -m benchmarks.measure_eviction --home /tmp/eviction --data questions.json --passages 6 --limit 12

Each question is prefilled by --method, its greedy answer is teacher-forced through the same context after eviction, and
the next-token distributions are compared with those of the whole context (KL, nats). Time per token is the median over
the steps of all questions, measured alternately, so that other load slows all rows alike. Bytes are of the prompt's KV.
"""

import time
from dataclasses import replace
from statistics import fmean, median
from typing import Annotated, Any

import typer

from benchmarks.common import packed_loop, product_app, run_product_app
from ragblend.app.cli.common import Cli
from ragblend.app.quality import cli as product
from ragblend.app.quality.runs import open_engine
from ragblend.app.quality.sources import QuestionSource, read
from ragblend.measuring.metrics import kl_divergence
from ragblend.measuring.prefilling import stored
from ragblend.measuring.quality import build_prompt
from ragblend.measuring.table import number, table_of, text
from ragblend.measuring.variants import parse_counts


def measure_eviction(
    cli: Cli,
    source: QuestionSource,
    method: Annotated[str, typer.Option(help="What reads the prompts.")] = "cacheblend",
    ratio: Annotated[float, typer.Option(help="And its ratio.")] = 0.15,
    tokens: Annotated[int, typer.Option(min=1, help="Of each answer.")] = 16,
    keep: Annotated[str, typer.Option(help="How many tokens, by commas.")] = "1024,512,256,128,64",
) -> None:
    """Measure, and print a table."""
    from ragblend.engine.decoding.direct import DirectDecode
    from ragblend.engine.decoding.eviction import evict

    budgets = [None, *parse_counts(keep, "--keep")]
    found: dict[int | None, list[tuple[float, float, list[float]]]] = {budget: [] for budget in budgets}
    questions = read(replace(source, limit=source.limit or 12, passages=source.passages or 6)).questions
    engine = open_engine(product.engine_arguments(cli), "this bench")
    if engine.gate.passed and DirectDecode.supports(engine.runtime.decoder):
        engine.runtime.choice.current, _ = packed_loop(engine)
    how: dict[str, Any] = {"method": method, "ratio": ratio}
    for question in questions:
        prompt, whole = build_prompt(engine, question, tokens), None
        with stored(engine, question.passages):
            answer = engine.generate(prompt, max_new_tokens=tokens, temperature=0.0, **how)
            for budget, rows in found.items():
                prefilled = engine.prefill(prompt, **how)
                if budget is not None:
                    evict(engine.runtime.decoder, prefilled.prompt, prefilled.cache, budget)
                logits = engine.continue_logits(prefilled, answer.token_ids)
                whole = logits if whole is None else whole
                kl, mb = kl_divergence(whole, logits), prefilled.cache.nbytes / 1e6
                rows.append((kl, mb, step_times(engine, prefilled, answer.token_ids)))
    results = [
        {
            "kept": budget or "all",
            "kl": fmean(kls),
            "mb": fmean(mbs),
            "ms": median(ms for each in times for ms in each),
        }
        for budget, rows in found.items()
        for kls, mbs, times in [zip(*rows, strict=True)]
    ]
    columns = [("kept", text("kept")), ("mean KL", number("kl", 4)), ("KV, MB", number("mb", 1))]
    table = table_of("Eviction after the first token", [*columns, ("ms/token", number("ms", 1))], results)
    product.finish(cli, [table], results, {})


def step_times(engine: Any, prefilled: Any, token_ids: tuple[int, ...]) -> list[float]:
    """Milliseconds of each decoding step for the given tokens."""
    cache, times = prefilled.cache, []
    for token_id in token_ids:
        begun = time.perf_counter()
        engine.runtime.choice.current.run(cache, [token_id])
        times.append((time.perf_counter() - begun) * 1e3)
    cache.truncate()
    return times


if __name__ == "__main__":
    run_product_app(product_app(measure_eviction))
