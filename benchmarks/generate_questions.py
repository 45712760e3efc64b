"""Generates questions with exact answers: numbers hidden in filler text, after RULER (Hsieh et al., COLM'24, §3).

    python -m benchmarks.generate_questions multi_key,tokens=4000 multi_value,tokens=4000,n=20 --out made.json
    ragblend bench quality --data made.json

A spec is a task with its settings, such as `multi_value,tokens=4000,n=20`. The same spec, seed and tokenizer always
give the same questions, whatever n is, so a run can be resumed, and a larger n extends it. The texts are ours; the
questions and the number of distractors follow the paper.
"""

import dataclasses
import difflib
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import filler
from benchmarks.common import AnyHome, Model, open_engine, run
from ragblend.kvstore.errors import UsageError

CountTokens = Callable[[str], int]
ANSWER_WITH_ONE = "\nAnswer with the number alone."
ANSWER_WITH_ALL = "\nAnswer with all of the numbers, separated by commas, and nothing else."


@dataclass(frozen=True)
class Spec:
    """What to generate. n: how many questions; tokens: of all passages together; chunk: of one passage.

    seed: another one gives other questions of the same kind.

    items: keys, values or queries, depending on the task; depth: where in the text the needles are, in percent (None:
    anywhere). The needles and the text around them are the same at every depth.
    """

    task: str
    n: int = 20
    tokens: int = 4000
    chunk: int = 512
    seed: int = 0
    items: int = 4
    depth: int | None = None


# Task: whether there are many keys, whether a key has many values, and whether all of them are asked for.
TASKS = {
    "single_needle": (False, False, False),
    "multi_key": (True, False, False),
    "multi_value": (False, True, True),
    "multi_query": (True, False, True),
}
MAX_SETTINGS = {
    "n": 10_000,
    "tokens": 4_000_000,
    "items": 100,
    "chunk": 100_000,
    "depth": 100,
}
MAY_BE_ZERO = ("depth", "seed")


def parse_spec(text: str) -> Spec:
    """Parse one spec. Raises UsageError."""
    name, *settings = [part.strip() for part in text.split(",")]
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"there is no task {name!r}; there are {', '.join(TASKS)}{hint}")
    return Spec(name, **dict(_setting(setting) for setting in settings if setting))


def generate(specs: Sequence[Spec], count: CountTokens) -> list[dict[str, Any]]:
    """Generate the entries of all specs, one task after another. Raises UsageError if `tokens` has no room for them."""
    return [_entry(spec, number, count) for spec in specs for number in range(spec.n)]


def _entry(spec: Spec, number: int, count: CountTokens) -> dict[str, Any]:
    """Ask for one number or for all. There are one or `items` keys, each with one or `items` numbers."""
    # The text that seeded recorded runs. It does not depend on n and depth, so that a larger n only adds questions.
    shape = f"chunk={spec.chunk}, seed={spec.seed}, items={spec.items}, hops=4, chains=3"
    draw = random.Random(f"Spec(task={spec.task!r}, n=20, tokens={spec.tokens}, {shape}) {number}")
    has_many_keys, has_many_values, asks_all = TASKS[spec.task]
    keys, values = spec.items if has_many_keys else 1, spec.items if has_many_values else 1
    names, numbers = filler.keys(draw, keys), filler.numbers(draw, keys * values)
    pairs = list(zip((name for name in names for _ in range(values)), numbers, strict=True))
    wanted = pairs if asks_all or len(pairs) == 1 else [draw.choice(pairs)]
    needles = [f"One of the magic numbers of {name} is {number}." for name, number in pairs]
    passages = haystack(draw, needles, spec, count)
    required = [number for _, number in wanted]
    depth = "" if spec.depth is None else f" at {spec.depth}%"
    return {
        "ctxs": [{"title": "", "text": text} for text in passages],
        "question": _question(", ".join(dict.fromkeys(name for name, _ in wanted)), values, len(wanted)),
        "answers": [", ".join(required)],
        "instruction": ANSWER_WITH_ONE if len(wanted) == 1 else ANSWER_WITH_ALL,
        "required": required,
        "task": f"{spec.task} {spec.tokens:,}{depth}",
    }


def _question(key_names: str, values: int, count: int) -> str:
    if values > 1:
        return f"What are all {values} magic numbers of {key_names}?"
    return (
        f"What is the magic number of {key_names}?"
        if count == 1
        else f"What are the magic numbers of {key_names}?"
    )


def _setting(text: str) -> tuple[str, int]:
    known = [field.name for field in dataclasses.fields(Spec) if field.name != "task"]
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in known:
        raise UsageError(f"{name!r} is unknown; there are {', '.join(known)}")
    most = MAX_SETTINGS.get(name)
    least = 0 if name in MAY_BE_ZERO else 1
    if not (value.isascii() and value.isdigit()) or int(value) < least or (most and int(value) > most):
        expected = f"a whole number from {least}" + (f" to {most}" if most else "")
        raise UsageError(f"{name} is {value!r}; expected {expected}")
    return name, int(value)


def haystack(draw: random.Random, needles: Sequence[str], spec: Spec, count: CountTokens) -> tuple[str, ...]:
    """Passages of filler with the needles in order, at different places or all at the given depth.

    Raises UsageError if there are fewer sentences of filler than needles.
    """
    hay: list[str] = []
    remaining_tokens = spec.tokens - sum(count(f" {needle}") for needle in needles)
    source = filler.sentences(draw)
    while remaining_tokens > 0:
        hay.append(next(source))
        remaining_tokens -= count(f" {hay[-1]}")
    if len(hay) < len(needles):
        raise _too_short(spec, f"{len(needles)} sentences that are asked about")
    places = sorted(draw.sample(range(len(hay) + 1), len(needles)))
    if spec.depth is not None:
        places = [round(len(hay) * spec.depth / 100)] * len(needles)
    for place, needle in zip(places[::-1], needles[::-1], strict=True):
        hay.insert(place, needle)
    return tuple(_passages(hay, spec.chunk, count))


def _passages(sentences: Sequence[str], max_tokens: int, count: CountTokens) -> Iterator[str]:
    """Join sentences to passages of at most max_tokens, but of at least one sentence each."""
    passage, total = list[str](), 0
    for sentence in sentences:
        tokens = count(f" {sentence}")
        if passage and total + tokens > max_tokens:
            yield " ".join(passage)
            passage, total = [], 0
        passage.append(sentence)
        total += tokens
    yield " ".join(passage)


def _too_short(spec: Spec, what: str) -> UsageError:
    return UsageError(f"{spec.task}: {spec.tokens} tokens have no room for {what}; ask for more tokens")


def main(
    specs: Annotated[list[str], typer.Argument(help="Tasks with their settings.")],
    out: Annotated[Path, typer.Option(help="The file of questions to write.")],
    model: Model = "default",
    home: AnyHome = None,
) -> None:
    """Write questions for `ragblend bench quality --data`; the model's tokenizer counts lengths."""
    checked = list(map(parse_spec, specs))
    with open_engine(model, home) as engine:
        entries = generate(checked, engine.count_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(entries, ensure_ascii=False, indent=1), encoding="utf-8")
    print(f"wrote {len(entries)} questions to {out}")


if __name__ == "__main__":
    run(main, __doc__)
