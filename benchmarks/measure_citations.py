"""Measures the citations of real answers against labels by hand.

    python -m benchmarks.measure_citations

`citations.json` has answers of three models about invented documents, in English and German. For each sentence
a person has noted which of its sources support it, often none. Precision: the share of our citations whose source
supports their sentence; recall: the share of supported sentences with such a citation. A citation that the model wrote
counts only if our rules find support for it. The rules were tuned on a part of the answers; the rest were held out
until the rules were final.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import markdown_table, run
from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.citations import cite
from ragblend.app.answering.support import sentences

PARTS = ("tuned", "held out", "all")


def load_answers() -> list[dict[str, Any]]:
    """The answers, each with its sources (name, place and text) and with the supporting sources of each sentence."""
    data = json.loads(Path(__file__).with_name("citations.json").read_text(encoding="utf-8"))
    return [
        answer
        | {
            "sources": [
                (each, data["locations"].get(each, ""), data["passages"][each]) for each in answer["sources"]
            ]
        }
        for answer in data["answers"]
    ]


def judge_sentences(answer: dict[str, Any]) -> Iterator[tuple[str, set[int], set[int]]]:
    """Each sentence with the numbers of the sources that support it, and of those that we cite."""
    text, sources = answer["answer"], [
        AnswerSource(number, name, name, "", name.partition("#")[0], place, 0.0, passage)
        for number, (name, place, passage) in enumerate(answer["sources"], start=1)
    ]  # fmt: skip
    citations = cite(text, sources).citations
    for (start, stop), numbers in zip(sentences(text), answer["supported_by"], strict=True):
        ours = {each.number for each in citations if start < each.stop <= stop and each.place is not None}
        yield text[start:stop], set(numbers), ours


def score(answers: Sequence[dict[str, Any]]) -> tuple[int, int, float, float]:
    """The number of sentences and of supported sentences, precision and recall."""
    rows = [each for answer in answers for each in judge_sentences(answer)]
    supported = [(right, ours) for _, right, ours in rows if right]
    cited = sum(len(ours) for _, _, ours in rows)
    precision = sum(len(ours & right) for _, right, ours in rows) / max(cited, 1)
    recall = sum(bool(ours & right) for right, ours in supported) / max(len(supported), 1)
    return len(rows), len(supported), precision, recall


def main() -> None:
    """Measure, and print a table."""
    answers, rows = load_answers(), list[list[str]]()
    for model in (*dict.fromkeys(answer["model"] for answer in answers), "all"):
        chosen = [answer for answer in answers if model in (answer["model"], "all")]
        for part in PARTS:
            count, supported, precision, recall = score(
                [answer for answer in chosen if part in (answer["part"], "all")]
            )
            rows.append([model, part, str(count), str(supported), f"{precision:.2f}", f"{recall:.2f}"])
    print(markdown_table(["model", "answers", "sentences", "supported", "precision", "recall"], rows))


if __name__ == "__main__":
    run(main, __doc__)
