"""Times the tokens of real answers: by our loop, with and without speculative tokens, and by llama.cpp.

    python -m benchmarks.measure_answers --data musique_dev.json
    python -m benchmarks.measure_answers --data musique_dev.json --model FILE.gguf --llamacpp .venv-llamacpp/bin/python

Greedy answers after all passages of a question; both of our ways alternately, medians of three, and then llama.cpp on
the same tokens of the same prompts from the same file, one at a time, with as many threads (set OMP_NUM_THREADS for
fewer than there are cores). Means are weighted by length; answers of one token are left out.
"""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import llama_tokens
from benchmarks.common import AnyHome, Data, Limit, Model, environment_of_others, in_turns, packed_loop, run
from ragblend import Engine
from ragblend.engine.decoding.direct import DirectDecode
from ragblend.engine.model.checkpoints import find_model
from ragblend.measuring.data import Question, load
from ragblend.measuring.prefilling import prompt_of

REPEATS, MOST_TOKENS = 3, 96
Answered = dict[str, list[int]]  # a prompt and its answer, token ids
WAYS = {"without guesses": 0, "guessing": DirectDecode.guessed_tokens}


def asked(engine: Engine, question: Question) -> tuple[Answered, dict[str, float]]:
    """The prompt and its answer, without the last token; milliseconds per token for each way."""
    prefilled = engine.prefill(prompt_of(engine, question.passages, question.text), method="full")
    answers = []

    def answered(guessed_tokens: int) -> float:
        DirectDecode.guessed_tokens = guessed_tokens
        begun = time.perf_counter()
        answers.append(engine.decode(prefilled, max_new_tokens=MOST_TOKENS).token_ids)
        return 1e3 * (time.perf_counter() - begun) / max(1, len(answers[-1]) - 1)

    times = in_turns({way: partial(answered, count) for way, count in WAYS.items()}, REPEATS)
    if len(set(answers)) > 1:  # in float32 four rows and one differ in the last bits
        print("a near tie: with guesses the answer is another one", flush=True)
    told = {"prompt": list(prefilled.prompt.token_ids), "answer": list(answers[0][:-1])}
    return told, {way: statistics.median(each) for way, each in times.items()}


def by_llama_cpp(python: Path, gguf: Path, answers: Sequence[Answered]) -> Iterator[float]:
    """Milliseconds per token of llama.cpp for these answers."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.json")
        plan.write_text(
            json.dumps({"gguf": str(gguf), "threads": torch.get_num_threads(), "answers": answers})
        )
        command = [str(python), llama_tokens.__file__, str(plan)]
        told = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True, env=environment_of_others()
        ).stdout
    yield from map(float, told.split())


def main(
    data: Data,
    model: Model = "default",
    home: AnyHome = None,
    limit: Limit = 4,
    llamacpp: Annotated[Path | None, typer.Option(help="A Python that has llama_cpp.")] = None,
) -> None:
    """Measure, and print a line for each answer, and the means."""
    if llamacpp is not None and find_model(model).suffix != ".gguf":
        raise SystemExit(f"llama.cpp reads .gguf files, and {model} is none")
    engine = Engine.open(model, home=home, device="cpu")
    engine.runtime.choice.current, _ = packed_loop(engine)
    answers, rows = list[Answered](), list[dict[str, float]]()
    for question in load(data).questions[:limit]:
        told, times = asked(engine, question)
        if not told["answer"]:
            continue
        answers.append(told)
        rows.append(times)
        print(
            len(told["prompt"]),
            len(told["answer"]),
            {way: round(ms, 1) for way, ms in times.items()},
            flush=True,
        )
    if llamacpp is not None:
        for row, ms in zip(rows, by_llama_cpp(llamacpp, find_model(model), answers), strict=True):
            row["llama.cpp"] = ms
    if not answers:
        raise SystemExit("no answer had two tokens: nothing was measured")
    lengths = [len(each["answer"]) for each in answers]
    for way in rows[0]:
        mean = sum(row[way] * count for row, count in zip(rows, lengths, strict=True)) / sum(lengths)
        print(f"{way}: {mean:.1f} ms a token")


if __name__ == "__main__":
    run(main, __doc__)
