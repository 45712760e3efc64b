"""How long a token of an answer takes, by the model's own forward and by our loop, in turns.

    python -m benchmarks.measure_decode --model default --context 500,3000
    python -m benchmarks.measure_decode --model default --context 500,3000 --streams 1,2,4,8
    python -m benchmarks.measure_decode --model default --data musique.json --limit 20

Prints, for each length of context, milliseconds a token (medians of five), their ratio, and how far the two are apart:
mean KL divergence in nats over 24 tokens of plain text, and the share of them with the same best token. With questions,
the divergence over their answers of each from the same weights in float32, and what guessing tokens gains over ten.
With streams, tokens a second of so many in all by our loop, one after the other and in one pass.
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.filler import sentences
from ragblend import Chunk, Engine, Literal, Prompt
from ragblend.engine.eightbit import EightBit
from ragblend.engine.few_rows import FewRows, Packed, Read, pack_weights
from ragblend.engine.fourbit import FourBit
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


def shared(prefilled: Sequence[Prefilled], rows: FewRows, follow: Sequence[tuple[int, ...]]) -> str:
    """One line about a token of each stream at a time, alone and together."""
    caches = [each.cache for each in prefilled]

    def alone(reads: list[Read]) -> list[torch.Tensor]:
        return [rows.run(*read) for read in reads]

    times: dict[str, list[float]] = {"alone": [], "together": []}
    told: dict[str, torch.Tensor] = {}
    for _ in range(REPEATS):
        for (name, spent), run in zip(times.items(), (alone, rows.run_together), strict=True):
            for cache in caches:
                cache.truncate()
            steps: list[list[Read]] = [
                [(cache, [token]) for cache, token in zip(caches, each, strict=True)]
                for each in zip(*follow, strict=True)
            ]
            begun = time.perf_counter()
            logits = [each for step in steps for each in run(step)]
            spent.append(len(logits) / (time.perf_counter() - begun))
            told[name] = torch.cat(logits).log_softmax(-1)
    one, many = told["alone"], told["together"]
    divergence = float((one.exp() * (one - many)).sum(-1).mean())
    same = float((one.argmax(-1) == many.argmax(-1)).float().mean())
    ratio = statistics.median(m / o for o, m in zip(*times.values(), strict=True))
    rates = " ".join(f"{name} {statistics.median(each):.0f} tokens/s" for name, each in times.items())
    bits = "the same bits" if torch.equal(one, many) else f"KL {divergence:.1e} same {same:.0%}"
    return f"{len(caches)} streams: {rates} ratio {ratio:.2f} {bits}"


def diverging(engine: Engine, exact: Engine, ways: dict[str, Steps], entries: list[Any]) -> str:
    """How far each is from the exact model over the greedy answers to questions about two passages."""
    told: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for entry in entries:
        passages = [Chunk(each["text"]) for each in entry["ctxs"][:2]]
        ids = engine.tokenize(engine.chat_prompt(None, passages, entry["question"])).token_ids
        whole = Prompt([Literal(token_ids=ids)])
        prefilled, reference = (each.prefill(whole, method="full") for each in (engine, exact))
        answer = exact.decode(reference, max_new_tokens=32).token_ids
        expected = exact.continue_logits(reference, answer).log_softmax(-1)[1:]
        for name, steps in ways.items():
            prefilled.cache.truncate()
            found = torch.cat([steps.run(prefilled.cache, [token]) for token in answer[:-1]]).log_softmax(-1)
            divergence = (expected.exp() * (expected - found)).sum(-1).mean()
            told[name].append(
                (float(divergence), float((expected.argmax(-1) == found.argmax(-1)).float().mean()))
            )
    means = {name: [statistics.mean(part) for part in zip(*each, strict=True)] for name, each in told.items()}
    return " ".join(
        f"{name}: KL {mean[0]:.1e} (at most {max(told[name])[0]:.1e}), same {mean[1]:.1%};"
        for name, mean in means.items()
    )


def guessing(engine: Engine, rows: FewRows, entries: list[Any]) -> str:
    """Whole answers about six passages, without guessed tokens and with them, by this thread's processor time."""
    spent, tokens, same = {0: 0.0, FewRows.guessed: 0.0}, 0, 0
    engine.runtime.choice.steps, engine.runtime.choice.is_open = rows, False
    for entry in entries:
        passages = [Chunk(each["text"]) for each in entry["ctxs"][:6]]
        prompt = engine.chat_prompt(None, passages, entry["question"])
        prefilled, answers = engine.prefill(prompt, method="full"), []
        for count in spent:
            FewRows.guessed = count
            begun = time.thread_time()
            answers.append(engine.decode(prefilled, max_new_tokens=64).token_ids)
            spent[count] += (time.thread_time() - begun) * 1e3
        tokens, same = tokens + len(answers[0]), same + (answers[0] == answers[1])
    told = ", ".join(f"{count} guesses {ms / tokens:.1f} ms a token" for count, ms in spent.items())
    return f"{told}; {same} of {len(entries)} answers have the same tokens"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default")
    parser.add_argument("--home")
    parser.add_argument("--dtype")
    parser.add_argument("--context", default="500,3000", help="tokens in front of the answer")
    parser.add_argument("--streams", help="how many at once, 1,2,4,8 say")
    parser.add_argument("--data", help="questions with passages, as `ragblend bench quality` takes them")
    parser.add_argument("--limit", type=int, default=20, help="of the questions")
    asked = parser.parse_args(arguments)
    engine = Engine.open(asked.model, home=asked.home, device="cpu", dtype=asked.dtype)
    runtime = engine.runtime
    if not engine.gate.passed or not FewRows.knows(runtime.decoder):
        print("this model's layers are none that the loop knows", file=sys.stderr)
        return 1
    looked_at: dict[str, Packed | None] = {}
    pack_weights(runtime.decoder, looked_at, rounds=runtime.has_quantized_weights)
    found = {name: each for name, each in looked_at.items() if each is not None}
    rows = FewRows(runtime.decoder, found)
    ways: dict[str, Steps] = {"model": ModelSteps(runtime.loaded.model), "rows": rows}
    kinds = {4: FourBit, 8: EightBit}
    packed = ", ".join(
        f"{sum(each.nbytes for each in found.values() if isinstance(each, kind)) / 1e6:.0f} MB of {bits} bits"
        for bits, kind in kinds.items()
    )
    threads = torch.get_num_threads()
    print(f"{engine.model_name}, {engine.dtype}, {threads} threads, {packed}")
    if asked.data:
        exact = Engine.open(asked.model, home=asked.home, device="cpu", dtype="float32")
        four: dict[str, Packed] = {name: each for name, each in found.items() if isinstance(each, FourBit)}
        ways |= {
            "rows in four bits": FewRows(runtime.decoder, four),
            "rows unpacked": FewRows(runtime.decoder, {}),
        }
        entries = json.loads(Path(asked.data).read_text())[: asked.limit]
        print(diverging(engine, exact, ways, entries), guessing(engine, rows, entries[:10]), sep="\n")
        return 0
    contexts = [int(each) for each in asked.context.split(",")]
    text = " ".join(itertools.islice(sentences(random.Random(0)), max(contexts) // 8 + TOKENS * 8))
    ids = tuple(engine.tokenizer.encode(text))
    streams = [int(each) for each in (asked.streams or "1").split(",")]
    for tokens in contexts:
        assert tokens + TOKENS * max(streams) <= len(ids), "a sentence has eight tokens at least"
        begins = range(0, TOKENS * max(streams), TOKENS)  # each stream reads another part of the text
        follow = [ids[begin + tokens : begin + tokens + TOKENS] for begin in begins]
        prefilled = [
            engine.prefill(Prompt([Literal(token_ids=ids[begin : begin + tokens])]), method="full")
            for begin in begins
        ]
        if not asked.streams:
            print(tokens, measured(prefilled[0], ways, follow[0]), flush=True)
        for count in streams if asked.streams else ():
            print(tokens, shared(prefilled[:count], rows, follow[:count]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
