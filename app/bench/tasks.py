"""Generated questions whose exact answers are known: RULER's tasks (Hsieh et al., COLM'24, §3) and two-hop questions.

Each task is a function of (draw, spec, count_tokens): sentences of our own filler with what is asked about hidden among
them. The texts are ours; what is asked, and how many distractors there are, follows the paper.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragblend.app.bench import filler
from ragblend.kvstore.errors import UsageError

CountTokens = Callable[[str], int]
ONE = "\nAnswer with the number alone."
ALL = "\nAnswer with all of the numbers, separated by commas, and nothing else."
COMMON_TIMES, OTHER_TIMES = 30, 3  # RULER's, where there is room


@dataclass(frozen=True)
class Spec:
    """What to generate. tokens: of all passages together; chunk: of one; seed: other questions of the same kind.

    items: keys, values, queries or common words, as the task has them; hops: of a variable's chain; chains: how many of
    those there are, the asked one included.
    """

    task: str
    n: int = 20
    tokens: int = 4000
    chunk: int = 512
    seed: int = 0
    items: int = 4
    hops: int = 4
    chains: int = 3


@dataclass(frozen=True)
class Task:
    """One generated question: its passages, its words, and what an exact answer must hold."""

    passages: tuple[str, ...]
    question: str
    instruction: str
    required: tuple[str, ...]


def single_needle(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """One key, one number."""
    ((key, number),) = _pairs(draw, 1)
    passages = haystack(draw, [_needle(key, number)], spec, count)
    return Task(passages, f"What is the magic number of {key}?", ONE, (number,))


def multi_key(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """Several keys with a number each; one is asked for."""
    pairs = _pairs(draw, spec.items)
    key, number = draw.choice(pairs)
    passages = haystack(draw, [_needle(*pair) for pair in pairs], spec, count)
    return Task(passages, f"What is the magic number of {key}?", ONE, (number,))


def multi_value(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """One key with several numbers; all are asked for."""
    (key,) = filler.keys(draw, 1)
    numbers = filler.numbers(draw, spec.items)
    passages = haystack(draw, [_needle(key, number) for number in numbers], spec, count)
    return Task(passages, f"What are all {spec.items} magic numbers of {key}?", ALL, tuple(numbers))


def multi_query(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """Several keys with a number each; all are asked for."""
    pairs = _pairs(draw, spec.items)
    passages = haystack(draw, [_needle(*pair) for pair in pairs], spec, count)
    asked = ", ".join(key for key, _ in pairs)
    return Task(
        passages, f"What are the magic numbers of {asked}?", ALL, tuple(number for _, number in pairs)
    )


def variable_tracking(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """Chains of assignments; every variable that holds one value is asked for."""
    values = filler.numbers(draw, spec.chains, digits=5)
    variables = filler.letters(draw, spec.chains * (spec.hops + 1))
    chains = [variables[place :: spec.chains] for place in range(spec.chains)]
    lines = [_chain(names, value) for names, value in zip(chains, values, strict=True)]
    # Chains are mixed, and every assignment stands after the one that it refers to.
    mixed = [chain for chain in range(spec.chains) for _ in range(spec.hops + 1)]
    draw.shuffle(mixed)
    needles = [lines[chain].pop(0) for chain in mixed]
    question = (
        f"Which variables hold the value {values[0]}, directly or through others? There are {spec.hops + 1}."
    )
    instruction = "\nAnswer with the names of the variables, separated by commas, and nothing else."
    return Task(haystack(draw, needles, spec, count), question, instruction, tuple(chains[0]))


def common_words(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """A numbered list in which some words come much more often than all others: these are asked for."""
    room = spec.tokens // count("1000. riverbell\n")
    room = spec.tokens // count(
        f"{max(10, room // 2)}. riverbell\n"
    )  # what a line in the middle of so many takes
    times = min(COMMON_TIMES, room // (2 * spec.items))
    if times <= 2 * OTHER_TIMES:
        raise _too_short(spec, f"{spec.items} common words")
    wanted = max(1, (room - times * spec.items) // OTHER_TIMES)
    words = filler.compounds(draw, spec.items + wanted)
    common, others = words[: spec.items], words[spec.items :]
    more = -(-wanted // len(others))  # a list longer than there are words for repeats all of them more often
    listed = common * (times * more) + others[: -(-wanted // more)] * (OTHER_TIMES * more)
    draw.shuffle(listed)
    lines = [f"{number}. {word}" for number, word in enumerate(listed, start=1)]
    passages = tuple(_packed(lines, spec.chunk, count, "\n"))
    question = f"Which {spec.items} words are the most common in the numbered list?"
    instruction = f"\nAnswer with the {spec.items} words, separated by commas, and nothing else."
    return Task(passages, question, instruction, tuple(common))


def two_hop(draw: random.Random, spec: Spec, count: CountTokens) -> Task:
    """Who has an office in a town, and where that person was born: two sentences, among others of their kind."""
    people = filler.names(draw, 4 * spec.items)
    persons = [
        f"{first} {last}" for first, last in zip(people[: spec.items], people[spec.items :], strict=False)
    ]
    places = people[2 * spec.items :]
    towns, births = places[: spec.items], places[spec.items :]
    offices = [
        f"The harbour master of {town} is {person}." for town, person in zip(towns, persons, strict=True)
    ]
    born = [f"{person} was born in {birth}." for person, birth in zip(persons, births, strict=True)]
    halves = [offices, born] if draw.random() < 0.5 else [born, offices]
    for half in halves:
        draw.shuffle(half)
    question = f"In which place was the harbour master of {towns[0]} born?"
    passages = haystack(draw, [*halves[0], *halves[1]], spec, count)
    return Task(passages, question, "\nAnswer with the name of the place alone.", (births[0],))


TASKS: dict[str, Callable[[random.Random, Spec, CountTokens], Task]] = {
    "single_needle": single_needle,
    "multi_key": multi_key,
    "multi_value": multi_value,
    "multi_query": multi_query,
    "variable_tracking": variable_tracking,
    "common_words": common_words,
    "two_hop": two_hop,
}


def haystack(draw: random.Random, needles: Sequence[str], spec: Spec, count: CountTokens) -> tuple[str, ...]:
    """Passages of filler with the needles in their order at different places. Raises UsageError if there is no room."""
    hay: list[str] = []
    left = spec.tokens - sum(count(f" {needle}") for needle in needles)
    source = filler.sentences(draw)
    while left > 0:
        hay.append(next(source))
        left -= count(f" {hay[-1]}")
    if len(hay) < len(needles):
        raise _too_short(spec, f"{len(needles)} sentences that are asked about")
    for place, needle in zip(
        sorted(draw.sample(range(len(hay) + 1), len(needles)))[::-1], needles[::-1], strict=True
    ):
        hay.insert(place, needle)
    return tuple(_packed(hay, spec.chunk, count, " "))


def _packed(pieces: Sequence[str], chunk_tokens: int, count: CountTokens, between: str) -> list[str]:
    """Pieces put together to passages of at most so many tokens, as their sum says."""
    packed: list[list[str]] = [[]]
    held = 0
    for piece in pieces:
        size = count(between + piece)
        if packed[-1] and held + size > chunk_tokens:
            packed.append([])
            held = 0
        packed[-1].append(piece)
        held += size
    return [between.join(held_pieces) for held_pieces in packed]


def _pairs(draw: random.Random, count: int) -> list[tuple[str, str]]:
    return list(zip(filler.keys(draw, count), filler.numbers(draw, count), strict=True))


def _needle(key: str, number: str) -> str:
    return f"One of the magic numbers of {key} is {number}."


def _chain(variables: Sequence[str], value: str) -> list[str]:
    sources = [value, *variables[:-1]]
    return [f"VAR {variable} = {source}." for variable, source in zip(variables, sources, strict=True)]


def _too_short(spec: Spec, what: str) -> UsageError:
    return UsageError(
        f"--generate {spec.task}: {spec.tokens} tokens have no room for {what}; ask for more tokens"
    )
