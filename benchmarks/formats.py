"""Converts files of other data sets to the product's format of questions: `{"ctxs", "question", "answers", ...}`.

| format | records | passages |
|---|---|---|
| `longbench` | JSON lines of `{context, input, answers, dataset}` (Bai et al., ACL'24) | its context in its parts |
| `squad` | SQuAD (Rajpurkar et al., 2016), or rows of `{context, question, answers}` | its paragraph among others |
| `summary` | the product's own format, whose passages are to be summarised in place of its question | its own |

A list may be one JSON array or one object a line.
"""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import READING, field_of, read_text

Entry = dict[str, Any]
Records = list[tuple[str, Any]]  # each record's name for messages, and its value
PASSAGES = 6  # for formats that do not say which passages belong to a question
PASSAGE_WORDS = 360  # about 512 tokens of English
# LongBench's tasks that ask nothing of their own, or end in an unfinished example; the others are questions.
LONGBENCH_TASKS = {
    "gov_report": "Write a one-page summary of the report.",
    "multi_news": "Write a one-page summary of all the news.",
    "samsum": "Summarise the dialogue in one or two short sentences, as in the examples.",
    "trec": "Give the type of the question, as in the examples.",
    "lcc": "Write the next line of the code.",
}
SUMMARISE = "Summarise the passages above in five sentences. Name persons, places, dates and numbers."
# How its contexts begin their parts, whichever comes first: its passages, few-shot examples, paragraphs.
PARTS = (r"Passage \d+:", r"Paragraph \d+:", r"Dialogue: ", r"Question: ", r"Passage:")


def convert(path: Path, form: str, passages: int = PASSAGES) -> list[Entry]:
    """Convert a file to entries. form: a name of `FORMATS`; passages: how many, if the format does not say.

    Empty fields are kept; the product refuses or skips them. Raises UsageError with file, record and field.
    """
    if form not in FORMATS:
        raise UsageError(f"--format: {form!r} is unknown; there are {', '.join(FORMATS)}")
    entries = list(FORMATS[form](_records(path), passages))
    if not entries:
        raise UsageError(f"{READING}{path} has no question that can be measured")
    return entries


def _records(path: Path) -> Records:
    text = read_text(path)
    try:
        value = json.loads(text)
    except ValueError:
        return [_line(path, *line) for line in enumerate(text.splitlines(), start=1) if line[1].strip()]
    if isinstance(value, dict):  # SQuAD's outermost object, or one line of JSON lines
        value = value["data"] if isinstance(value.get("data"), list) else [value]
    if not isinstance(value, list) or not value:
        raise UsageError(f"{READING}{path} holds no list of questions, or an empty list")
    return [(f"{READING}{path}, question {number}", record) for number, record in enumerate(value)]


def _line(path: Path, number: int, line: str) -> tuple[str, Any]:
    where = f"{READING}{path}, line {number}"
    try:
        return where, json.loads(line)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON ({error})") from error


def _entry(question: str, passages: Iterable[str], answers: Iterable[str], task: str, **more: str) -> Entry:
    ctxs = [{"title": "", "text": text} for text in passages]
    return {"ctxs": ctxs, "question": question, "answers": list(answers), "task": task, **more}


def _longbench(records: Records, passages: int) -> Iterator[Entry]:
    for where, record in records:
        context, asked = (field_of(record, name, str, where) for name in ("context", "input"))
        answers, task = field_of(record, "answers", list, where), str(record.get("dataset") or "")
        words = LONGBENCH_TASKS.get(task.removesuffix("_e"))
        if words is None:
            yield _entry(asked.strip(), split_parts(context), answers, task)
        else:
            text = f"{words}\n\n{asked.strip()}".strip()
            yield _entry(text, split_parts(context), answers, task, instruction="")


def _squad(records: Records, passages: int) -> Iterator[Entry]:
    """A question's paragraph among others: first of its own article, then the following ones of the file."""
    asked = [each for where, record in records for each in _squad_asked(record, where)]
    by_title: dict[str, dict[str, None]] = {}
    for title, paragraph, _, _ in asked:
        by_title.setdefault(title, {})[paragraph] = None
    everything = [paragraph for known in by_title.values() for paragraph in known]
    for title, paragraph, question, answers in asked:
        if answers:  # SQuAD 2.0 has questions that its own paragraph does not answer
            near = dict.fromkeys([*by_title[title], *everything[: 4 * passages]])
            chosen = [paragraph, *[each for each in near if each != paragraph][: passages - 1]]
            random.Random(question).shuffle(chosen)
            yield _entry(question, chosen, answers, "squad")


def _summary(records: Records, passages: int) -> Iterator[Entry]:
    """Summaries have no gold answer: the text itself is the gold, and answers are compared with full prefill's."""
    for where, record in records:
        texts = [
            f"{ctx.get('title', '')}\n{ctx['text']}".strip() for ctx in field_of(record, "ctxs", list, where)
        ][:passages]
        yield _entry(SUMMARISE, texts, ["\n".join(texts)], "summary", instruction="")


def _squad_asked(record: Any, where: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Title, paragraph, question and answers of all questions of one article, or of one row."""
    title = str(record.get("title", "")).replace("_", " ").strip() if isinstance(record, dict) else ""
    rows = [(where, record, record)]
    if isinstance(record, dict) and "paragraphs" in record:
        rows = [
            (f"{where}, paragraphs[{place}], qas[{number}]", paragraph, qa)
            for place, paragraph in enumerate(field_of(record, "paragraphs", list, where))
            for number, qa in enumerate(field_of(paragraph, "qas", list, f"{where}, paragraphs[{place}]"))
        ]
    for here, paragraph, qa in rows:
        context = field_of(paragraph, "context", str, here).strip()
        question = field_of(qa, "question", str, here).strip()
        yield title, f"{title}\n{context}".strip(), question, _squad_answers(qa, here)


def _squad_answers(qa: Any, where: str) -> list[str]:
    if isinstance(qa.get("answers"), dict):  # a row of the datasets library: columns, not objects
        texts = field_of(qa["answers"], "text", list, f"{where}, answers")
    else:
        texts = [field_of(each, "text", str, where) for each in field_of(qa, "answers", list, where)]
    return [] if qa.get("is_impossible") else list(dict.fromkeys(texts))


FORMATS: dict[str, Callable[[Records, int], Iterator[Entry]]] = {
    "longbench": _longbench,
    "squad": _squad,
    "summary": _summary,
}


def split_parts(context: str, most_words: int = PASSAGE_WORDS) -> list[str]:
    """Split a context into its marked parts, or else into packed paragraphs."""
    for mark in PARTS:
        parts = re.split(rf"(?m)^(?={mark})", context)
        if len(parts) > 2:
            # A numbered part is a document of its own, an example only one of many.
            groups = [[part] for part in parts] if r"\d" in mark else [parts]
            return [passage for group in groups for passage in pack(_cut(group, most_words), most_words)]
    pieces = context.split("\n\n" if "\n\n" in context else "\n")
    return list(pack(_cut(pieces, most_words), most_words))


def pack(
    pieces: Iterable[str],
    most: int = PASSAGE_WORDS,
    size: Callable[[str], int] = lambda piece: len(piece.split()),
    between: str = "\n\n",
) -> Iterator[str]:
    """Join pieces to passages of at most that size, but of at least one piece each."""
    held: list[str] = []
    total = 0
    for piece in pieces:
        added = size(piece)
        if held and total + added > most:
            yield between.join(held)
            held, total = [], 0
        held.append(piece)
        total += added
    if held:
        yield between.join(held)


def _cut(pieces: Iterable[str], words: int) -> Iterator[str]:
    """The pieces; those that are too long are cut at spaces."""
    for piece in map(str.strip, pieces):
        while len(piece.split()) > words:
            end = [found.start() for found in re.finditer(r"\s+", piece)][words - 1]
            yield piece[:end]
            piece = piece[end:].strip()
        if piece:
            yield piece
