"""Questions with their passages and gold answers, and the JSON format of the CacheBlend artifact.

The file is one list of `{"ctxs": [{"title": str, "text": str}, ...], "question": str, "answers": [str, ...]}`. An entry
may also say `"instruction"`, `"required"` and `"task"`: see `Question`.
"""

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError

MESSAGE_PREFIX = "Reading the questions: "


class UnusableError(UsageError):
    """A well-formed record that cannot be measured; `--skip` leaves it out, and reports it."""


@dataclass(frozen=True)
class Question:
    """A question with its passages (title and text in one) and gold answers.

    instruction: text after the question, None for the benches' default; required: strings that an exact answer must
    all contain (empty: unknown); task: its kind, for tables; where: its origin, for messages only.
    """

    index: int
    text: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]
    instruction: str | None = None
    required: tuple[str, ...] = ()
    task: str = ""
    where: str = field(default="", compare=False)

    @property
    def place(self) -> str:
        """The question's name in messages: file and record, or its number."""
        return self.where or f"question {self.index}"

    @property
    def digest(self) -> str:
        """A hash of the question's content, independent of its place in the file; the key of its records."""
        content: list[Any] = [self.text, self.passages, self.answers]
        if self.instruction is not None or self.required:
            content += [self.instruction, self.required]
        return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Skipped:
    """A question that was left out, and why."""

    where: str
    reason: str


@dataclass(frozen=True)
class Loaded:
    """The questions of one source, and the records that were left out."""

    questions: list[Question]
    skipped: tuple[Skipped, ...] = ()


def load(path: Path, skip: bool = False) -> Loaded:
    """Read and check a file of questions. Raises UsageError with file, question and field.

    skip: leave out well-formed records that cannot be measured (an empty question), and report them.
    """
    questions: list[Question] = []
    skipped: list[Skipped] = []
    for number, entry in enumerate(_read_list(path)):
        place = f"{path}, question {number}"
        try:
            question = entry_question(entry, len(questions), f"{MESSAGE_PREFIX}{place}")
            questions.append(replace(question, where=place))
        except UnusableError as error:
            if not skip:
                raise UnusableError(f"{error}, or pass --skip to leave it out") from error
            skipped.append(Skipped(place, str(error)))
    if not questions:
        raise UsageError(f"{MESSAGE_PREFIX}{path} has no question that can be measured")
    return Loaded(questions, tuple(skipped))


def choose(
    questions: list[Question], limit: int | None = None, seed: int | None = None, passages: int | None = None
) -> list[Question]:
    """Select questions and passages.

    limit: how many questions (None: all); seed: shuffle them first (None: the file's order); passages: how many of each
    question's passages, from the first on (None: all). Raises UsageError.
    """
    for option, value in (("--limit", limit), ("--passages", passages)):
        if value is not None and value < 1:
            raise UsageError(f"{option} is {value}; it must be 1 or more (leave it out for all)")
    chosen = [replace(question, passages=question.passages[:passages]) for question in questions]
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    return chosen[:limit]


def without_repeats(questions: Sequence[Question]) -> Loaded:
    """Drop repeated questions: a repeat would be counted twice but measured once."""
    first: dict[str, Question] = {}
    skipped = []
    for question in questions:
        kept = first.setdefault(question.digest, question)
        if kept is not question:
            reason = f"{question.place} is the same as {kept.place}; it is measured once"
            skipped.append(Skipped(question.place, reason))
    return Loaded(list(first.values()), tuple(skipped))


def read_text(path: Path) -> str:
    """Read a data file as text. Raises UsageError."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise UsageError(
            f"{MESSAGE_PREFIX}there is no file {path}; give an existing one to --data"
        ) from error
    except OSError as error:
        raise UsageError(f"{MESSAGE_PREFIX}{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{MESSAGE_PREFIX}{path} is not UTF-8 text (byte {error.start})") from error


def _read_list(path: Path) -> list[Any]:
    try:
        entries = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(
            f"{MESSAGE_PREFIX}{path} is not JSON ({error}); expected one list of questions"
        ) from error
    if not isinstance(entries, list):
        raise UsageError(
            f"{MESSAGE_PREFIX}{path} holds a JSON {kind_name(entries)}; expected a list of questions"
        )
    if not entries:
        raise UsageError(f"{MESSAGE_PREFIX}{path} is an empty list; there is nothing to measure")
    return entries


def entry_question(entry: Any, index: int, where: str) -> Question:
    """Parse one entry in CacheBlend's format; `where` begins every message. Raises UsageError, UnusableError."""
    ctxs = field_of(entry, "ctxs", list, where)
    text = field_of(entry, "question", str, where).strip()
    answers = field_of(entry, "answers", list, where)
    if not text:
        raise UnusableError(f"{where}: 'question' is empty; write a question")
    if not answers or not all(isinstance(answer, str) for answer in answers):
        kinds = ", ".join(dict.fromkeys(kind_name(answer) for answer in answers)) or "nothing"
        raise UsageError(f"{where}: 'answers' must be a list of one or more strings; found {kinds} in it")
    if not ctxs:
        raise UnusableError(f"{where}: 'ctxs' is empty; a question needs at least one passage")
    texts = [_passage(ctx, f"{where}, ctxs[{place}]") for place, ctx in enumerate(ctxs)]
    optional = {"instruction": str, "required": list, "task": str}
    given = {name: field_of(entry, name, kind, where) for name, kind in optional.items() if name in entry}
    required = given.get("required", [])
    if not all(isinstance(text, str) and text.strip() for text in required):
        raise UsageError(f"{where}: 'required' must be a list of strings that are not empty")
    more = given.get("instruction"), tuple(required), given.get("task", "")
    return Question(index, text, tuple(texts), tuple(answers), *more)


def _passage(ctx: Any, where: str) -> str:
    title, text = field_of(ctx, "title", str, where).strip(), field_of(ctx, "text", str, where).strip()
    if not text:
        raise UsageError(f"{where}: 'text' is empty")
    return f"{title}\n{text}" if title else text


def field_of(entry: Any, name: str, kind: type, where: str) -> Any:
    """A field of a JSON object, checked for its type. Raises UsageError."""
    expected = "a string" if kind is str else "a list"
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: found a JSON {kind_name(entry)}; expected an object with '{name}'")
    if name not in entry:
        names = ", ".join(map(str, entry)) or "no fields"
        raise UsageError(f"{where}: the field '{name}' is missing; found {names}; add '{name}', {expected}")
    if not isinstance(entry[name], kind):
        found = kind_name(entry[name])
        raise UsageError(f"{where}: the field '{name}' is a JSON {found}; expected {expected}")
    return entry[name]


def kind_name(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
