"""Measures the recall of the app's search by vectors, and by vectors and words, on the same questions.

    python -m benchmarks.measure_retrieval --data musique_dev.json

All passages of the file are one collection. Relevant are those that belong to a question, or those of them that contain
an answer; of the sample documents, chunked as the app does, the passages that contain an answer. Recall at k is the
share of at most k relevant passages that are among the first k; differences are paired, with 95% bootstrap intervals
over questions. `follow_ups.json` has questions asked after another one, over the passages of `citations.json`: those
that need the one before, others about the same documents, and others about other things, which should find nothing.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.common import markdown, run
from ragblend.app import samples
from ragblend.app.answering.retrieval import search
from ragblend.app.library.documents import DocumentPassage, FileFacts, document_id, node_id
from ragblend.app.library.ingest import embed_in_full, ingest_paths
from ragblend.app.settings import SEARCHES, Settings
from ragblend.app.workspace import Workspace
from ragblend.measuring.data import Question, load
from ragblend.measuring.metrics import normalise
from ragblend.measuring.summary import difference_interval

DEPTHS = (3, Settings.top_k, 10)


@dataclass(frozen=True)
class Case:
    """A question with what should be found for it."""

    question: str
    relevant: frozenset[str]


def holding(texts: Sequence[str], answers: Sequence[str]) -> frozenset[str]:
    """Indices of the texts that contain one of the answers as whole words."""
    wanted = [f" {normalise(answer)} " for answer in answers]
    return frozenset(text for text in texts if any(each in f" {normalise(text)} " for each in wanted))


def fill(workspace: Workspace, texts: Sequence[str]) -> None:
    """Index texts as the passages of one document."""
    library, name = workspace.library, workspace.settings.collection
    document = document_id(name, "/passages")
    parts = [
        DocumentPassage(node_id(document, n, text), document, n, text, "") for n, text in enumerate(texts)
    ]
    rows = workspace.embedder.embed_passages(texts)
    library.begin(name, "/passages")
    library.replace_passages(document, FileFacts(0, 0, ""), "", parts, rows)
    library.finish(document)
    workspace.index.upsert([part.node_id for part in parts], rows)


def compared(home: Path, what: str, cases: Sequence[Case]) -> Iterator[list[str]]:
    """A table row for each k. Prints the processor time of a search."""
    asked = [case for case in cases if case.relevant]
    recalls, ms = dict[tuple[str, int], list[float]](), dict[str, list[float]]()
    for name in SEARCHES:
        with Workspace.open(home, search=name) as workspace:
            search([workspace], "warm up", 1)
            ms[name] = []
            for depth, case in product(DEPTHS, asked):
                begun = time.process_time()
                found = search([workspace], case.question, depth)
                ms[name].append(1e3 * (time.process_time() - begun))
                share = len({source.text for source in found} & case.relevant) / min(
                    depth, len(case.relevant)
                )
                recalls.setdefault((name, depth), []).append(share)
    for depth in DEPTHS:
        hybrid, vectors = (recalls[name, depth] for name in SEARCHES)
        low, high = difference_interval(hybrid, vectors) or (0.0, 0.0)
        means = statistics.mean(vectors), statistics.mean(hybrid)
        difference = f"{means[1] - means[0]:+.3f} ({low:+.3f} to {high:+.3f})"
        yield [what, str(len(asked)), str(depth), *(f"{mean:.3f}" for mean in means), difference]
    times = ", ".join(f"{name} {statistics.median(ms[name]):.1f} ms" for name in SEARCHES)
    print(f"{what}: processor time of a search {times}")


def of_file(home: Path, questions: Sequence[Question]) -> Iterator[list[str]]:
    with Workspace.open(home) as workspace:
        fill(workspace, list(dict.fromkeys(text for each in questions for text in each.passages)))
    own = [Case(each.text, frozenset(each.passages)) for each in questions]
    answers = [Case(each.text, holding(each.passages, each.answers)) for each in questions]
    yield from compared(home, "file, the question's passages", own)
    yield from compared(home, "file, those with an answer", answers)


def of_samples(home: Path) -> Iterator[list[str]]:
    with Workspace.open(home) as workspace:
        ingest_paths(workspace, [samples.documents_folder()])
        embed_in_full(workspace)
        library = workspace.library
        passages = {
            document.name: [passage.text for passage in library.passages_of(document.id)]
            for document in library.documents(workspace.settings.collection)
        }
    cases = []
    for each in samples.questions():
        texts = [text for name in each.documents for text in passages[name]]
        cases.append(Case(each.question, holding(texts, each.answers)))
    return compared(home, f"samples ({sum(map(len, passages.values()))} passages)", cases)


def of_follow_ups(home: Path) -> Iterator[list[str]]:
    """Table rows: how many found the right document first, or nothing where there is nothing."""
    folder = Path(__file__).parent
    passages = json.loads((folder / "citations.json").read_text(encoding="utf-8"))["passages"]
    kinds = json.loads((folder / "follow_ups.json").read_text(encoding="utf-8"))
    names = {text: name.partition("#")[0] for name, text in passages.items()}
    with Workspace.open(home) as workspace:
        fill(workspace, list(passages.values()))
        for kind, asked in kinds.items():
            right = 0
            for before, question, *documents in asked:
                found = search([workspace], question, Settings.top_k, before)
                first = {names[source.text] for source in found[:1]}
                is_right = bool(first & {*documents}) if documents else not first
                right += is_right
                if not is_right:
                    print(kind, before, question, [(names[source.text], source.score) for source in found])
            yield [kind, f"{right} of {len(asked)}"]


def main(data: Path | None = None) -> None:
    """Measure, and print a table."""
    rows = list[list[str]]()
    with tempfile.TemporaryDirectory() as folder:
        if data:
            rows += of_file(Path(folder) / "file", load(data, skip=True).questions)
        rows += of_samples(Path(folder) / "samples")
        follow_ups = list(of_follow_ups(Path(folder) / "follow-ups"))
    print(markdown(["relevant", "questions", "k", "vectors", "hybrid", "difference"], rows))
    print(markdown(["asked after another question", "right"], follow_ups))


if __name__ == "__main__":
    run(main, __doc__)
