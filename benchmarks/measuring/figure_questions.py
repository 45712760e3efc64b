"""Generates questions about numbers, dates, codes and names, with similar figures in other passages (`--figures`).

The words are in `figures.json` and every figure is drawn by a seeded generator, so a run needs no other data. A *set*
is six or ten passages, each about a thing with a name of its own (the Orbeck Museum, the Saltin Dam). Their topics
differ, with figures of the same kinds in similar sentences; in half of the sets there are only a few topics, so that
several passages say the same of different things. Many have a table of spare parts. There are QUESTIONS_A_SET questions
about each set, each in several orders of its passages.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ragblend.measuring.data import Question

Draw = random.Random
QUESTIONS_A_SET = 8
# The numbers of a set's questions that ask for two figures, and for a figure in a table.
TWO_FIGURES, TABLES = (7,), (5, 6)
PASSAGES = (6, 10)
FEW_TOPICS = 3
LANGUAGES = ("en", "de")
LETTERS = "ABDEFGHKLMNPRSTVXZ"


@cache
def _words() -> dict[str, Any]:
    """Names, and by language: months, parts, filler sentences, the table's words, and topics.

    A topic is a name ({n} is the thing's own name) and facts, each a sentence with one {kind} of figure and a question.
    """
    words: dict[str, Any] = json.loads((files(__package__) / "figures.json").read_text(encoding="utf-8"))
    return words


def _localised(number: str, language: str) -> str:
    """A number with the language's separators: German swaps point and comma."""
    return number if language == "en" else number.translate(str.maketrans(",.", ".,"))


def _date(draw: Draw, language: str) -> str:
    months = _words()["languages"][language]["months"]
    day, month, year = draw.randint(1, 28), draw.choice(months), draw.randint(1871, 2019)
    return f"{day} {month} {year}" if language == "en" else f"{day}. {month} {year}"


def _code(draw: Draw, language: str) -> str:
    letters = "".join(draw.choices(LETTERS, k=2))
    return f"{letters}-{draw.randint(1000, 9999)}-{draw.choice('ABCDE')}"


def _person(draw: Draw, language: str) -> str:
    return f"{draw.choice(_words()['first_names'])} {draw.choice(_words()['last_names'])}"


_KINDS: dict[str, Callable[[Draw, str], str]] = {
    "tens": lambda draw, language: str(draw.randint(12, 89)),
    "hundreds": lambda draw, language: str(draw.randint(101, 989)),
    "grouped": lambda draw, language: _localised(f"{draw.randint(1_200, 98_000):,}", language),
    "decimal": lambda draw, language: _localised(f"{draw.uniform(1.1, 9.9):.1f}", language),
    "percent": lambda draw, language: _localised(f"{draw.uniform(11, 97):.1f}", language),
    "money": lambda draw, language: _localised(f"{draw.uniform(4, 900):.2f}", language),
    "coordinate": lambda draw, language: _localised(f"{draw.uniform(48, 55):.4f}", language),
    "date": _date,
    "clock": lambda draw, language: f"{draw.randint(15, 22)}:{draw.choice((10, 15, 20, 25, 35, 40, 50))}",
    "part": lambda draw, language: f"{draw.randint(1, 9)}-{draw.randint(1000, 1999)}",
    "code": _code,
    "serial": lambda draw, language: f"{draw.choice(LETTERS)}{draw.randint(10_000, 99_999)}",
    "person": _person,
    "telephone": lambda draw, language: (
        f"04{draw.randint(10, 99)} {draw.randint(100, 999)}{draw.randint(100, 999)}"
    ),
}


@dataclass(frozen=True)
class _Thing:
    """The subject of one passage: its name, (question, figure) pairs, prices by spare part, and the passage."""

    name: str
    facts: Sequence[tuple[str, str]]
    prices: dict[str, str]
    text: str


def figure_questions(
    sets: int, orders: int = 2, seed: int = 0, languages: Sequence[str] = LANGUAGES
) -> list[Question]:
    """Generate sets of passages, each with QUESTIONS_A_SET questions, in several orders of its passages.

    A question's `required` are the figures of a right answer; `task` is language and kind (`en one`, `de several`).
    The same arguments give the same questions.
    """
    found: list[Question] = []
    for number in range(sets):
        draw = random.Random(f"figures {seed} {number}")
        language = languages[number % len(languages)]
        round_number = number // len(languages)
        things = _things(draw, language, PASSAGES[round_number % 2], few_topics=round_number // 2 % 2 == 1)
        asked = [_make_question(draw, language, things, each) for each in range(QUESTIONS_A_SET)]
        for order in range(orders):
            passages = [thing.text for thing in things]
            random.Random(f"order {seed} {number} {order}").shuffle(passages)
            for text, figures, kind in asked:
                answers, where = (", ".join(figures),), f"figures, set {number}, order {order}"
                task = f"{language} {kind}"
                found.append(Question(len(found), text, tuple(passages), answers, None, figures, task, where))
    return found


def _things(draw: Draw, language: str, count: int, few_topics: bool) -> list[_Thing]:
    words = _words()["languages"][language]
    topics = draw.sample(sorted(words["topics"]), FEW_TOPICS if few_topics else count)
    used: set[str] = set()

    def new(kind: str) -> str:
        while (text := _KINDS[kind](draw, language)) in used:
            pass
        used.add(text)
        return text

    things = []
    for number, own_name in enumerate(draw.sample(_words()["names"], count)):
        topic = topics[number % len(topics)]
        name = topic.format(n=own_name)
        sentences, facts = [], []
        for sentence, question in words["topics"][topic]:
            kind = sentence[sentence.index("{") + 1 : sentence.index("}")]
            figure = new(kind)
            sentences.append(sentence.format(**{kind: figure}))
            facts.append((question.format(n=own_name), figure))
        sentences += draw.sample(words["filler"], draw.choice((0, 3, 6, 9)))
        draw.shuffle(sentences)
        parts = draw.sample(words["parts"], draw.choice((0, 0, 4, 8)))
        rows = [(part, new("part"), new("money")) for part in parts]
        heading = name.partition(" ")[2] if language == "en" else name
        lines = [heading[:1].upper() + heading[1:], " ".join(sentences)]
        if rows:
            lines += [words["table_label"].format(name=name), words["table_head"]]
            lines += [f"| {' | '.join(row)} |" for row in rows]
        prices = {part: price for part, _, price in rows}
        things.append(_Thing(name, facts, prices, "\n".join(lines)))
    return things


def _make_question(
    draw: Draw, language: str, things: Sequence[_Thing], number: int
) -> tuple[str, tuple[str, ...], str]:
    """A question, the figures of its answer, and its kind: `one`, `table` or `several`."""
    with_table = [thing for thing in things if thing.prices]
    if number in TABLES and with_table:
        thing = draw.choice(with_table)
        part = draw.choice(sorted(thing.prices))
        question = _words()["languages"][language]["price_question"].format(part=part, name=thing.name)
        return question, (thing.prices[part],), "table"
    (first, figure), (second, other) = draw.sample(draw.choice(things).facts, 2)
    if number in TWO_FIGURES:
        return f"{first} {second}", (figure, other), "several"
    return first, (figure,), "one"
