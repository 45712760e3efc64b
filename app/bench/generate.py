"""`--generate SPEC`: questions made here, seeded and offline, at any length.

A spec is a task and what it is to be like: `ruler:multi_value,tokens=4000,n=20`, `two_hop,tokens=16000`; `ruler` by
itself is all tasks of RULER. The same spec, seed and tokenizer always give the same questions, whatever n is, so a run
goes on where it stopped, and a larger n extends it.
"""

import dataclasses
import difflib
import random
from collections.abc import Sequence

from ragblend.app.bench.data import Question
from ragblend.app.bench.tasks import TASKS, CountTokens, Spec
from ragblend.kvstore.errors import UsageError

FAMILY = "ruler"
RULER = tuple(name for name in TASKS if name != "two_hop")
LIMITS = {"n": 10_000, "tokens": 4_000_000, "items": 100, "hops": 100, "chains": 20, "chunk": 100_000}


def parse_specs(texts: Sequence[str]) -> tuple[Spec, ...]:
    """Every spec, in order; a family gives one for each of its tasks. Raises UsageError."""
    return tuple(spec for text in texts for spec in _specs(text))


def generate(specs: Sequence[Spec], count_tokens: CountTokens) -> list[Question]:
    """The questions of all specs, one task after another. Raises UsageError where a task has no room."""
    made = [(spec, number) for spec in specs for number in range(spec.n)]
    return [_question(spec, number, index, count_tokens) for index, (spec, number) in enumerate(made)]


def _question(spec: Spec, number: int, index: int, count_tokens: CountTokens) -> Question:
    # Seeded without n (its default stands in), so that a larger n adds questions and keeps those that there were.
    draw = random.Random(f"{dataclasses.replace(spec, n=Spec.n)} {number}")
    task = TASKS[spec.task](draw, spec, count_tokens)
    return Question(
        index,
        task.question,
        task.passages,
        (", ".join(task.required),),
        task.instruction,
        task.required,
        f"{spec.task} {spec.tokens:,}",
        where=f"--generate {spec.task},tokens={spec.tokens}, question {number}",
        shorter="ask for fewer tokens=... in --generate",
    )


def _specs(text: str) -> list[Spec]:
    name, *settings = [part.strip() for part in text.split(",")]
    family, _, task = name.rpartition(":")
    if family not in ("", FAMILY) or (family and task not in RULER) or (task not in TASKS and task != FAMILY):
        near = difflib.get_close_matches(task, [*TASKS, FAMILY], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(
            f"--generate: there is no task {name!r}; there are {', '.join(TASKS)} and {FAMILY}{hint}"
        )
    values = dict(_setting(setting) for setting in settings if setting)
    return [Spec(each, **values) for each in (RULER if task == FAMILY else (task,))]


def _setting(text: str) -> tuple[str, int]:
    known = [field.name for field in dataclasses.fields(Spec) if field.name != "task"]
    name, _, value = (part.strip() for part in text.partition("="))
    if name not in known:
        raise UsageError(f"--generate: {name!r} is unknown; there are {', '.join(known)}")
    most = LIMITS.get(name)
    if not (value.isascii() and value.isdigit()) or (most is not None and not 1 <= int(value) <= most):
        expected = "a whole number from 0" if most is None else f"a whole number from 1 to {most}"
        raise UsageError(f"--generate: {name} is {value!r}; expected {expected}")
    return name, int(value)
