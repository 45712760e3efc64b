"""`--data FILE`: which format a file has, and its records as questions.

| format | records | passages |
|---|---|---|
| `cacheblend` | JSON list of `{ctxs, question, answers}` (CacheBlend's artifact) | its `ctxs` |
| `longbench` | JSON lines of `{context, input, answers, dataset}` (Bai et al., ACL'24) | its context in its parts |
| `samsum` | `{dialogue, summary}` (Gliwa et al., 2019) | other dialogues and their summaries: examples |
| `squad` | SQuAD (Rajpurkar et al., 2016), or rows of `{context, question, answers}` | its paragraph among others |

A list may be one JSON array or one object a line.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from ragblend.app.bench.data import (
    READING,
    Loaded,
    Question,
    Skipped,
    UnusableError,
    check_answers,
    check_asked,
    entry_question,
    field_of,
    kind_name,
    read_text,
)
from ragblend.app.bench.packing import pack, split_parts
from ragblend.kvstore.errors import UsageError

PASSAGES = 6  # where the format does not say what belongs to a question
NO_INSTRUCTION = ""
SUMMARISE = "Summarise the dialogue in one or two short sentences, as in the examples."
# LongBench's tasks that ask nothing of their own, or end in an unfinished example; the others are questions.
LONGBENCH_TASKS = {
    "gov_report": "Write a one-page summary of the report.",
    "multi_news": "Write a one-page summary of all the news.",
    "samsum": SUMMARISE,
    "trec": "Give the type of the question, as in the examples.",
    "lcc": "Write the next line of the code.",
}


@dataclass(frozen=True)
class Source:
    """A data file's records, and what to call each in a message."""

    path: Path
    records: list[Any]
    label: str = "question"
    numbers: tuple[int, ...] = ()

    def where(self, place: int) -> str:
        number = self.numbers[place] if self.numbers else place
        return f"{READING}{self.path}, {self.label} {number}"


def load(path: Path, form: str | None = None, passages: int | None = None, skip: bool = False) -> Loaded:
    """Read the whole file. form: a name of `FORMATS`, None to find out; passages: how many, where the format is open.

    skip: leave records out that are well formed and cannot be measured (an empty question), and say which. Raises
    UsageError with file, record and field.
    """
    source = _source(path)
    name = form or guess(source)
    if name not in FORMATS:
        raise UsageError(f"--format: {name!r} is unknown; there are {', '.join(FORMATS)}")
    if passages is not None and passages < 1:
        raise UsageError(f"--passages is {passages}; it must be 1 or more (leave it out for all)")
    questions: list[Question] = []
    skipped: list[Skipped] = []
    for where, make in FORMATS[name](source, passages or PASSAGES):
        place = where.removeprefix(READING)
        try:
            questions.append(replace(make(len(questions)), where=place))
        except UnusableError as error:
            if not skip and not isinstance(error, UnanswerableError):
                raise UnusableError(f"{error}, or pass --skip to leave it out") from error
            skipped.append(Skipped(place, str(error)))
    if not questions:
        raise UsageError(f"Reading the questions: {path} has no question that can be measured")
    return Loaded(questions, tuple(skipped))


def guess(source: Source) -> str:
    """The format, by the fields of the first record. Raises UsageError where it looks like none."""
    first = source.records[0]
    if not isinstance(first, dict):
        raise UsageError(f"{source.where(0)}: found a JSON {kind_name(first)}; expected an object")
    for fields, name in SIGNS:
        if fields <= first.keys():
            return name
    if first.keys() & {"question", "answers", "ctxs"}:  # nearest to ours: say what is missing there
        return "cacheblend"
    raise UsageError(
        f"Reading the questions: the format of {source.path} is none of {', '.join(FORMATS)}: its first record has the "
        f"fields {', '.join(map(str, first)) or 'none'}; name its format with --format"
    )


def _source(path: Path) -> Source:
    text = read_text(path)
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise UsageError(f"Reading the questions: {path} is not JSON ({error})") from error
    except json.JSONDecodeError as error:
        if "\n" not in text.strip():
            raise UsageError(f"Reading the questions: {path} is not JSON ({error})") from error
        return _lines(path, text, error)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]  # SQuAD's outermost object
    elif isinstance(value, dict) and text.strip().count("\n") == 0 and value:
        value = [value]  # one line of JSON lines
    if not isinstance(value, list):
        raise UsageError(
            f"Reading the questions: {path} holds a JSON {kind_name(value)}; expected a list of questions"
        )
    if not value:
        raise UsageError(f"Reading the questions: {path} is an empty list; there is nothing to measure")
    return Source(path, value)


def _lines(path: Path, text: str, whole: json.JSONDecodeError) -> Source:
    """One object a line; lines are counted from 1, as editors do."""
    records, numbers = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            records.append(json.loads(line))
        except (json.JSONDecodeError, RecursionError) as error:
            what = (
                f"{path}, line {number} is not JSON ({error})" if records else f"{path} is not JSON ({whole})"
            )
            raise UsageError(f"Reading the questions: {what}") from error
        numbers.append(number)
    return Source(path, records, "line", tuple(numbers))


class UnanswerableError(UnusableError):
    """A question that its own data set says has no answer; left out without asking, and reported."""


Made = Iterator[tuple[str, Callable[[int], Question]]]


def _cacheblend(source: Source, passages: int) -> Made:
    for place, entry in enumerate(source.records):
        where = source.where(place)
        yield where, partial(entry_question, entry, where=where)


def _longbench(source: Source, passages: int) -> Made:
    for place, entry in enumerate(source.records):
        where = source.where(place)
        yield where, partial(_longbench_question, entry, where)


def _longbench_question(entry: Any, where: str, index: int) -> Question:
    context = field_of(entry, "context", str, where)
    asked = field_of(entry, "input", str, where).strip()
    answers = field_of(entry, "answers", list, where)
    task = str(entry.get("dataset") or "")
    check_answers(answers, where)
    if not context.strip():
        raise UnusableError(f"{where}: 'context' is empty; there is nothing to read")
    words = LONGBENCH_TASKS.get(task.removesuffix("_e"))
    if words is None:
        check_asked(asked, "input", where)
        return Question(index, asked, tuple(split_parts(context)), tuple(answers), task=task)
    text = f"{words}\n\n{asked}" if asked else words
    return Question(index, text, tuple(split_parts(context)), tuple(answers), NO_INSTRUCTION, task=task)


def _samsum(source: Source, passages: int) -> Made:
    pairs = [_dialogue(entry, source.where(place)) for place, entry in enumerate(source.records)]
    if len({dialogue for dialogue, _ in pairs}) < 2:
        raise UsageError(
            f"Reading the questions: {source.path} has one dialogue; few-shot needs others as examples"
        )
    for place, (dialogue, summary) in enumerate(pairs):
        where = source.where(place)
        yield where, partial(_samsum_question, pairs, dialogue, summary, passages, where)


def _samsum_question(
    pairs: list[tuple[str, str]], dialogue: str, summary: str, passages: int, where: str, index: int
) -> Question:
    check_asked(dialogue, "dialogue", where)
    shown = [each for each in pairs if each[0] != dialogue and each[0]]
    random.Random(dialogue).shuffle(shown)
    if not shown:
        raise UnusableError(f"{where}: there is no other dialogue to show as an example; add dialogues")
    examples = pack((f"Dialogue: {example}\nSummary: {said}" for example, said in shown), passages)
    text = f"{SUMMARISE}\n\nDialogue: {dialogue}\nSummary:"
    return Question(index, text, tuple(examples), (summary,), NO_INSTRUCTION, task="samsum")


def _dialogue(entry: Any, where: str) -> tuple[str, str]:
    dialogue = field_of(entry, "dialogue", str, where).replace("\r\n", "\n").strip()
    summary = field_of(entry, "summary", str, where).strip()
    if not summary:
        raise UsageError(f"{where}: 'summary' is empty; it is what answers are compared with")
    return dialogue, summary


@dataclass(frozen=True)
class Asked:
    """A question of SQuAD: where it stands, its paragraph (title and text in one), and what goes for an answer."""

    where: str
    title: str
    paragraph: str
    question: str
    answers: tuple[str, ...]
    impossible: bool


def _squad(source: Source, passages: int) -> Made:
    asked = [
        each
        for place, entry in enumerate(source.records)
        for each in _squad_asked(entry, source.where(place))
    ]
    paragraphs: dict[str, list[str]] = {}  # by title, in order, without repeats
    for each in asked:
        known = paragraphs.setdefault(each.title, [])
        if each.paragraph not in known:
            known.append(each.paragraph)
    everything = [paragraph for known in paragraphs.values() for paragraph in known]
    for each in asked:
        yield each.where, partial(_squad_question, each, paragraphs[each.title], everything, passages)


def _squad_asked(entry: Any, where: str) -> Iterator[Asked]:
    """All questions of one article, or the one of a row."""
    if isinstance(entry, dict) and "paragraphs" in entry:
        title = str(entry.get("title", "")).replace("_", " ").strip()
        for place, paragraph in enumerate(field_of(entry, "paragraphs", list, where)):
            here = f"{where}, paragraphs[{place}]"
            context = field_of(paragraph, "context", str, here).strip()
            for number, qa in enumerate(field_of(paragraph, "qas", list, here)):
                yield _squad_one(qa, title, context, f"{here}, qas[{number}]")
        return
    context = field_of(entry, "context", str, where).strip()
    yield _squad_one(entry, str(entry.get("title", "")).replace("_", " ").strip(), context, where)


def _squad_one(qa: Any, title: str, context: str, where: str) -> Asked:
    question = field_of(qa, "question", str, where).strip()
    if not context:
        raise UsageError(f"{where}: 'context' is empty; there is nothing to read")
    if isinstance(qa.get("answers"), dict):  # a row of the datasets library: columns, not objects
        texts = field_of(qa["answers"], "text", list, f"{where}, answers")
    else:
        answers = field_of(qa, "answers", list, where)
        texts = [field_of(each, "text", str, f"{where}, answers[{n}]") for n, each in enumerate(answers)]
    impossible = bool(qa.get("is_impossible")) or not texts
    if texts:  # of an impossible one as well: SQuAD 2.0 has texts that only look like answers
        check_answers(texts, where)
    paragraph = f"{title}\n{context}" if title else context
    return Asked(where, title, paragraph, question, tuple(dict.fromkeys(texts)), impossible)


def _squad_question(
    asked: Asked, near: list[str], everything: list[str], passages: int, index: int
) -> Question:
    """The paragraph among others: of its own article first, the next ones of the file after that."""
    check_asked(asked.question, "question", asked.where)
    if asked.impossible:
        raise UnanswerableError(f"{asked.where}: the data says that its passage does not answer it")
    others = [each for each in dict.fromkeys([*near, *everything[: 4 * passages]]) if each != asked.paragraph]
    chosen = [asked.paragraph, *others[: passages - 1]]
    random.Random(asked.question).shuffle(chosen)
    return Question(index, asked.question, tuple(chosen), asked.answers, task="squad")


FORMATS: dict[str, Callable[[Source, int], Made]] = {
    "cacheblend": _cacheblend,
    "longbench": _longbench,
    "samsum": _samsum,
    "squad": _squad,
}
SIGNS: tuple[tuple[set[str], str], ...] = (
    ({"ctxs", "question"}, "cacheblend"),
    ({"context", "input"}, "longbench"),
    ({"dialogue", "summary"}, "samsum"),
    ({"paragraphs"}, "squad"),
    ({"context", "question"}, "squad"),
)
