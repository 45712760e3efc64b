"""Times decoding per token, by the model's own forward and by our loop, alternately.

    python -m benchmarks.measure_decode --model default --context 500,3000
    python -m benchmarks.measure_decode --model default --context 500,3000 --streams 1,2,4,8

Prints, for each context length, milliseconds per token (medians of five), their ratio, and how much the two differ:
mean KL divergence in nats over 24 tokens of plain text, and the share of them with the same top token. With --streams,
tokens per second of all streams together by our loop, one after the other and in one pass.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Annotated

import torch
import typer

from benchmarks.common import AnyHome, Model, agreement, packed_loop, parse_counts, run, run_alternately
from benchmarks.filler import sentences
from ragblend import Engine, Literal, Prompt
from ragblend.engine.decoding.direct import DirectDecode, PassInput
from ragblend.engine.decoding.eightbit import EightBit
from ragblend.engine.decoding.fourbit import FourBit
from ragblend.engine.decoding.implementations import DecodeImplementation, TransformersDecode
from ragblend.engine.model.device import device_name
from ragblend.engine.results import Prefilled

REPEATS, TOKENS = 5, 24
Logits = list[torch.Tensor]


def time_loops(
    loops: dict[str, Callable[[], Logits]],
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor]]:
    """Run all loops alternately: the seconds of each one's rounds, and its logits."""
    logits: dict[str, torch.Tensor] = {}

    def seconds(name: str) -> float:
        begun = time.perf_counter()
        logits[name] = torch.cat(loops[name]())
        float(logits[name][-1, -1])  # waits for the device
        return time.perf_counter() - begun

    return run_alternately({name: partial(seconds, name) for name in loops}, REPEATS), logits


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    return statistics.median(s / f for s, f in zip(slow, fast, strict=True))


def token_logits(steps: DecodeImplementation, prefilled: Prefilled, tokens: Sequence[int]) -> Logits:
    """The logits after the prompt and each of the tokens."""
    prefilled.cache.truncate()
    return [steps.run(prefilled.cache, [token]) for token in tokens]


def compare_loops(
    prefilled: Prefilled, loops: dict[str, DecodeImplementation], follow: tuple[int, ...]
) -> str:
    """One line that compares both loops after that prompt."""
    times, logits = time_loops(
        {n: partial(token_logits, steps, prefilled, follow) for n, steps in loops.items()}
    )
    spent = " ".join(f"{n} {1e3 * statistics.median(each) / len(follow):.1f} ms" for n, each in times.items())
    divergence, same = agreement(logits["model"], logits["rows"])
    return f"{spent} ratio {ratio(times['model'], times['rows']):.2f} KL {divergence:.1e} same {same:.0%}"


def compare_streams(
    prefilled: Sequence[Prefilled], direct: DirectDecode, follow: Sequence[tuple[int, ...]]
) -> str:
    """One line that compares decoding several streams one after the other and together."""
    caches = [each.cache for each in prefilled]

    def alone(reads: list[PassInput]) -> Logits:
        return [direct.run(*read) for read in reads]

    def decode_all(run: Callable[[list[PassInput]], Logits]) -> Logits:
        for cache in caches:
            cache.truncate()
        steps = zip(*follow, strict=True)
        return [
            each
            for step in steps
            for each in run([(cache, [token]) for cache, token in zip(caches, step, strict=True)])
        ]

    times, logits = time_loops(
        {"alone": lambda: decode_all(alone), "together": lambda: decode_all(direct.run_together)}
    )
    tokens = len(caches) * len(follow[0])
    rates = " ".join(f"{n} {tokens / statistics.median(each):.0f} tokens/s" for n, each in times.items())
    divergence, same = agreement(logits["alone"], logits["together"])
    is_same = torch.equal(logits["alone"], logits["together"])
    bits = "the same bits" if is_same else f"KL {divergence:.1e} same {same:.0%}"
    return f"{len(caches)} streams: {rates} ratio {ratio(times['alone'], times['together']):.2f} {bits}"


def main(
    model: Model = "default",
    home: AnyHome = None,
    device: str = "cpu",
    dtype: str | None = None,
    context: Annotated[str, typer.Option(help="Tokens in front of the answer.")] = "500,3000",
    streams: Annotated[str | None, typer.Option(help="How many at once: 1,2,4,8, say.")] = None,
) -> None:
    """Measure, and print a line for each case."""
    engine = Engine.open(model, home=home, device=device, dtype=dtype)
    runtime = engine.runtime
    direct, packed = packed_loop(engine)
    loops: dict[str, DecodeImplementation] = {
        "model": TransformersDecode(runtime.loaded.model),
        "rows": direct,
    }
    sizes = ", ".join(
        f"{sum(each.nbytes for each in packed.values() if isinstance(each, kind)) / 1e6:.0f} MB of {bits} bits"
        for bits, kind in ((4, FourBit), (8, EightBit))
    )
    where = f"{torch.get_num_threads()} threads" if device == "cpu" else device_name(runtime.device)
    print(f"{engine.model_name}, {engine.dtype}, {where}, {sizes}")
    for line in by_context(
        engine, loops, direct, parse_counts(context), parse_counts(streams) if streams else []
    ):
        print(line, flush=True)


def by_context(
    engine: Engine,
    loops: dict[str, DecodeImplementation],
    direct: DirectDecode,
    contexts: list[int],
    streams: list[int],
) -> Iterator[str]:
    """A line for each length of context, and for each number of streams if there are any."""
    answer_tokens = TOKENS * max(streams, default=1)
    text = " ".join(itertools.islice(sentences(random.Random(0)), (max(contexts) + answer_tokens) // 8 + 1))
    ids = tuple(engine.tokenizer.encode(text))
    for tokens in contexts:
        assert tokens + answer_tokens <= len(ids), "a sentence has eight tokens at least"
        begins = range(0, answer_tokens, TOKENS)  # each stream reads another part of the text
        follow = [ids[begin + tokens : begin + tokens + TOKENS] for begin in begins]
        prefilled = [
            engine.prefill(Prompt([Literal(token_ids=ids[begin : begin + tokens])]), method="full")
            for begin in begins
        ]
        if not streams:
            yield f"{tokens} {compare_loops(prefilled[0], loops, follow[0])}"
        for count in streams:
            yield f"{tokens} {compare_streams(prefilled[:count], direct, follow[:count])}"


if __name__ == "__main__":
    run(main, __doc__)
