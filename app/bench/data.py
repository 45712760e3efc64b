"""Questions with their passages and gold answers, in the JSON format of the CacheBlend artifact.

The file is one list of `{"ctxs": [{"title": str, "text": str}, ...], "question": str, "answers": [str,
...]}`.
"""

import hashlib
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError


@dataclass(frozen=True)
class Question:
    """One question: the passages to read (title and text in one), and the answers that count as right."""

    index: int
    text: str
    passages: tuple[str, ...]
    answers: tuple[str, ...]

    @property
    def digest(self) -> str:
        """What the question says, whatever its place in the file: records are kept under it."""
        content = json.dumps([self.text, self.passages, self.answers], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def load_questions(path: Path) -> list[Question]:
    """Read and check the whole file. Raises UsageError with file, index and field."""
    return check_questions(_read_list(path), path)


def check_questions(entries: list[Any], path: Path) -> list[Question]:
    """The entries of a file's list, checked; `path` is for the messages. Raises UsageError."""
    return [_question(entry, index, path) for index, entry in enumerate(entries)]


def choose(
    questions: list[Question], limit: int | None = None, seed: int | None = None, passages: int | None = None
) -> list[Question]:
    """Some of the questions, with some of their passages.

    limit: how many questions (None: all); seed: shuffle before counting (None: the file's order); passages:
    the first so many of each question (None: all). Raises UsageError.
    """
    _check_positive("--limit", limit)
    _check_positive("--passages", passages)
    chosen = [replace(question, passages=question.passages[:passages]) for question in questions]
    if seed is not None:
        random.Random(seed).shuffle(chosen)
    return chosen[:limit]


def _check_positive(option: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{option} is {value}; it must be 1 or more (leave it out for all)")


def _read_list(path: Path) -> list[Any]:
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"Reading the questions: there is no file {path}; give an existing one to --data"
        ) from error
    except OSError as error:
        raise UsageError(f"Reading the questions: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"Reading the questions: {path} is not UTF-8 text (byte {error.start})") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"Reading the questions: {path} is not JSON ({error})") from error
    if not isinstance(entries, list):
        raise UsageError(
            f"Reading the questions: {path} holds a JSON {_kind(entries)}; expected a list of questions"
        )
    if not entries:
        raise UsageError(f"Reading the questions: {path} is an empty list; there is nothing to measure")
    return entries


def _question(entry: Any, index: int, path: Path) -> Question:
    where = f"Reading the questions: {path}, question {index}"
    text = _field(entry, "question", str, where).strip()
    answers = _field(entry, "answers", list, where)
    ctxs = _field(entry, "ctxs", list, where)
    if not text:
        raise UsageError(f"{where}: 'question' is empty")
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise UsageError(f"{where}: 'answers' must be a list of one or more strings")
    if not ctxs:
        raise UsageError(f"{where}: 'ctxs' is empty; a question needs at least one passage")
    texts = [_passage(ctx, f"{where}, ctxs[{place}]") for place, ctx in enumerate(ctxs)]
    return Question(index, text, tuple(texts), tuple(answers))


def _passage(ctx: Any, where: str) -> str:
    title, text = _field(ctx, "title", str, where).strip(), _field(ctx, "text", str, where).strip()
    if not text:
        raise UsageError(f"{where}: 'text' is empty")
    return f"{title}\n{text}" if title else text


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        raise UsageError(f"{where}: found a JSON {_kind(entry)}; expected an object with '{name}'")
    if name not in entry:
        raise UsageError(f"{where}: the field '{name}' is missing")
    if not isinstance(entry[name], kind):
        expected = "a string" if kind is str else "a list"
        raise UsageError(f"{where}: the field '{name}' is a JSON {_kind(entry[name])}; expected {expected}")
    return entry[name]


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
