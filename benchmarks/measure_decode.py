"""How long a token of an answer takes, by the model's own forward and by our loop, in turns.

    python -m benchmarks.measure_decode --model default --context 500,3000

Prints, for each length of context, milliseconds a token (medians of five), their ratio, and how far the two are apart:
mean KL divergence in nats over 24 tokens of plain text, and the share of them with the same best token.
"""

import argparse
import itertools
import random
import statistics
import sys
import time

import torch

from benchmarks.filler import sentences
from ragblend import Engine, Literal, Prompt
from ragblend.engine.few_rows import FewRows, four_bits
from ragblend.engine.results import Prefilled
from ragblend.engine.steps import ModelSteps, Steps

REPEATS, TOKENS = 5, 24


def measured(prefilled: Prefilled, ways: dict[str, Steps], follow: tuple[int, ...]) -> str:
    """One line about both ways behind that prompt."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    told: dict[str, torch.Tensor] = {}
    for _ in range(REPEATS):
        for name, steps in ways.items():
            prefilled.cache.truncate()
            begun = time.perf_counter()
            told[name] = torch.cat([steps.run(prefilled.cache, [token]) for token in follow]).log_softmax(-1)
            times[name].append((time.perf_counter() - begun) * 1e3 / len(follow))
    model, rows = told["model"], told["rows"]
    divergence = float((model.exp() * (model - rows)).sum(-1).mean())
    same = float((model.argmax(-1) == rows.argmax(-1)).float().mean())
    ratio = statistics.median(m / r for m, r in zip(times["model"], times["rows"], strict=True))
    spent = " ".join(f"{name} {statistics.median(each):.1f} ms" for name, each in times.items())
    return f"{spent} ratio {ratio:.2f} KL {divergence:.1e} same {same:.0%}"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--home")
    parser.add_argument("--dtype")
    parser.add_argument("--context", default="500,3000", help="tokens in front of the answer")
    asked = parser.parse_args(arguments)
    engine = Engine.open(asked.model, home=asked.home, device="cpu", dtype=asked.dtype)
    runtime = engine.runtime
    if not engine.gate.passed or not FewRows.knows(runtime.decoder):
        print("this model's layers are none that the loop knows", file=sys.stderr)
        return 1
    found = four_bits(runtime.decoder)
    rows = FewRows.of(runtime.decoder, found)
    assert rows is not None
    ways: dict[str, Steps] = {"model": ModelSteps(runtime.loaded.model), "rows": rows}
    packed = sum(each.nbytes for each in found.values()) / 1e6
    threads = torch.get_num_threads()
    print(f"{engine.model_name}, {engine.dtype}, {threads} threads, {packed:.0f} MB of four-bit weights")
    contexts = [int(each) for each in asked.context.split(",")]
    text = " ".join(itertools.islice(sentences(random.Random(0)), max(contexts) // 8 + TOKENS))
    ids = tuple(engine.tokenizer.encode(text))
    for tokens in contexts:
        assert tokens + TOKENS <= len(ids), "a sentence has eight tokens at least"
        prefilled = engine.prefill(Prompt([Literal(token_ids=ids[:tokens])]), method="full")
        print(tokens, measured(prefilled, ways, ids[tokens : tokens + TOKENS]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
