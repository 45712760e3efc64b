"""Counts what a framework's program reuses: for the third of three questions, where each token's KV came from."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from ragblend.engine.engine import Engine
from ragblend.engine.results import Result, Stream
from ragblend.integrations.text_index import MIN_TEXT_CHARS

Ask = Callable[[str], Any]


@dataclass(frozen=True)
class Program:
    """A program from a framework's documentation, with the same calls in the same order.

    make: takes a model and documents, returns a function that answers questions. source: repository and file.
    """

    name: str
    source: str
    make: Callable[[Any, Any], Ask]


@dataclass(frozen=True)
class Served:
    """Tokens of one question, over all calls of the model.

    reused, recomputed, fresh: as in a report, missing ones counted as fresh. retrieved: tokens of retrieved texts, in
    any prompt, and of retrieved lines that are in no prompt. found: how many of those came from the store.
    """

    reused: int
    recomputed: int
    fresh: int
    retrieved: int
    found: int

    @property
    def share(self) -> float:
        """The share of retrieved tokens that came from the store."""
        return self.found / self.retrieved


@contextmanager
def record_answers() -> Iterator[list[Result | Stream]]:
    """Record all answers of all engines within the block, in the order in which they begin."""
    answers: list[Result | Stream] = []
    originals = {name: getattr(Engine, name) for name in ("generate", "stream")}

    def watching(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            answers.append(answer := method(*args, **kwargs))
            return answer

        return call

    for name, method in originals.items():
        setattr(Engine, name, watching(method))
    try:
        yield answers
    finally:
        for name, method in originals.items():
            setattr(Engine, name, method)


def results_of(answers: Iterable[Result | Stream]) -> list[Result]:
    return [answer.result if isinstance(answer, Stream) else answer for answer in answers]


def count_served(engine: Engine, results: Iterable[Result], retrieved: Iterable[str]) -> Served:
    """Count how the retrieved texts in these prompts were served; they are searched as text in the whole prompt."""
    lines = {
        line.strip()
        for text in retrieved
        for line in text.splitlines()
        if len(line.strip()) >= MIN_TEXT_CHARS
    }
    everywhere, inside, present = Counter[str](), Counter[str](), set[str]()
    for result in results:
        words = [engine.tokenizer.decode([token]) for token in result.prompt.token_ids]
        places = list(_places("".join(words), lines))
        present |= {line for line, _ in places}
        everywhere.update(result.report.served)
        inside.update(_letters_at(words, result.report.served, [at for _, at in places]))
    absent_tokens = sum(engine.count_tokens(line) for line in lines - present)
    found = inside["r"] + inside["c"]
    return Served(
        reused=everywhere["r"],
        recomputed=everywhere["c"],
        fresh=everywhere["f"] + everywhere["m"],
        retrieved=inside.total() + absent_tokens,
        found=found,
    )


def _places(text: str, lines: Iterable[str]) -> Iterator[tuple[str, slice]]:
    """Each line that the text contains, once for every place."""
    for line in lines:
        at = text.find(line)
        while at >= 0:
            yield line, slice(at, at + len(line))
            at = text.find(line, at + 1)


def _letters_at(words: Iterable[str], letters: Iterable[str], places: Iterable[slice]) -> Iterator[str]:
    """The letters of the words that overlap these slices of the joined words."""
    words = list(words)
    inside = bytearray(sum(map(len, words)))
    for place in places:
        inside[place] = b"\1" * (place.stop - place.start)
    at = 0
    for word, letter in zip(words, letters, strict=True):
        if any(inside[at : at + len(word)]):
            yield letter
        at += len(word)
