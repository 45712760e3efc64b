"""Measures the app's search: facts in ten languages, questions about other things, and follow-up questions.

    python -m benchmarks.measure_search                                        follow-up questions
    python -m benchmarks.measure_search --data musique_dev.json                questions about other things
    apt-get download $(printf 'libreoffice-l10n-%s ' ar de es hi ja ko ru th zh-cn)
    for each in *.deb; do dpkg -x $each texts; done
    python -m benchmarks.measure_search --texts texts [--embedder FOLDER]      languages

Languages: twelve facts (`languages.json`) are hidden among 200 passages of LibreOffice's translated messages. Found:
the fact's passage is among the first six; by the vectors alone, and as the app searches. Refused: the same questions
find nothing where the facts are missing. Other things: the sample documents, and the passages of 24 questions of the
file, are searched with their own questions and with unrelated ones (`other_things.json`), on which no constant of the
product was tuned. Follow-ups (`follow_ups.json`), over the passages of `citations.json`: questions that need the
previous one, questions that do not, and unrelated questions, which should find nothing.
"""

import gettext
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import DATA, markdown_table, read_json, run
from ragblend.app import samples
from ragblend.app.answering.retrieval import search
from ragblend.app.library.documents import DocumentPassage, FileFacts, id_of_document, node_id
from ragblend.app.library.ingest import embed_in_full, ingest_paths
from ragblend.app.library.similarity import measure_similarity
from ragblend.app.library.switching import choose_embedder
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import load

MESSAGES = "usr/lib/libreoffice/program/resource"
LANGUAGE_CODES = {  # English texts are the originals in the German catalogue
    "English": "de", "German": "de", "Spanish": "es", "Russian": "ru", "Arabic": "ar", "Hindi": "hi",
    "Chinese": "zh_CN", "Japanese": "ja", "Korean": "ko", "Thai": "th",
}  # fmt: skip
DENSE_SCRIPTS = ("Chinese", "Japanese", "Korean")  # their texts need about half as many characters
PASSAGES, CHARACTERS, MIN_CHARACTERS, TOP_K, QUESTIONS = 200, 350, 40, 6, 24
Json = dict[str, Any]


def fill(workspace: Workspace, texts: Sequence[str]) -> None:
    """Index texts as the passages of one document."""
    library, name = workspace.library, workspace.settings.collection
    document = id_of_document(name, "/passages")
    parts = [
        DocumentPassage(node_id(document, n, text), document, n, text, "") for n, text in enumerate(texts)
    ]
    rows = workspace.embedder.embed_passages(texts)
    library.begin(name, "/passages")
    library.replace_passages(document, FileFacts(0, 0, ""), "", parts, rows)
    library.finish(document)
    workspace.index.upsert([part.node_id for part in parts], rows)


def count_refused(workspace: Workspace, questions: Sequence[str]) -> str:
    """How many of the questions find nothing: `11 of 12`."""
    count = sum(not search([workspace], question, TOP_K) for question in questions)
    return f"{count} of {len(questions)}"


def messages(texts: Path, language: str) -> list[str]:
    """Passages of sentences in that language."""
    folder = texts / MESSAGES / LANGUAGE_CODES[language] / "LC_MESSAGES"
    sentences = list[str]()
    for file in sorted(folder.glob("*.mo")):
        with file.open("rb") as stream:
            catalogue: dict[object, str] = vars(gettext.GNUTranslations(stream))["_catalog"]
        for key, translated in catalogue.items():
            original = key.rpartition("\x04")[2] if isinstance(key, str) else ""
            if len(original) >= MIN_CHARACTERS and (language == "English" or translated != original):
                text = original if language == "English" else translated
                sentences.append(" ".join(text.replace("~", "").replace("_", "").split()))
    if not sentences:
        raise UsageError(f"There are no messages in {folder}. The help says how to fetch them.")
    sentences = list(dict.fromkeys(sentences))
    random.Random(0).shuffle(sentences)
    passages, least = [""], CHARACTERS // 2 if language in DENSE_SCRIPTS else CHARACTERS
    for sentence in sentences:
        passages[-1] = f"{passages[-1]} {sentence}".strip()
        if len(passages[-1]) >= least:
            passages.append("")
    return passages[:PASSAGES]


def hide_facts(passages: Sequence[str], facts: Sequence[str]) -> list[str]:
    """The passages, with a fact each in the middle of some of them."""
    found, places = list(passages), random.Random(1).sample(range(len(passages)), len(facts))
    for place, fact in zip(places, facts, strict=True):
        words = found[place].split(". ")
        middle = (len(words) + 1) // 2
        found[place] = " ".join(filter(None, [". ".join(words[:middle]), fact, ". ".join(words[middle:])]))
    return found


def measure_language(folder: Path, texts: Path, language: str, embedder: str) -> list[str]:
    pairs: list[tuple[str, str]] = read_json(DATA / "languages.json")[language]
    passages, counts = messages(texts, language), list[str]()
    questions = [question for _, question in pairs]
    for way in ("vectors", "hybrid"):
        with Workspace.open(folder / language, embedder=embedder, search=way) as workspace:
            if way == "vectors":
                choose_embedder(workspace)
                fill(workspace, hide_facts(passages, [fact for fact, _ in pairs]))
                measure_similarity(workspace)
            found = [[each.text for each in search([workspace], asked, TOP_K)] for asked in questions]
            right = sum(
                any(fact in text for text in own) for (fact, _), own in zip(pairs, found, strict=True)
            )
            counts.append(str(right))
    with Workspace.open(folder / f"{language}-without", embedder=embedder) as workspace:
        choose_embedder(workspace)
        fill(workspace, passages)
        measure_similarity(workspace)
        return [language, *counts, count_refused(workspace, questions)]


def measure_other_things(folder: Path, data: Path, embedder: str) -> Iterator[list[str]]:
    """A row per corpus: its own questions that found something, and unrelated ones that found nothing."""
    questions = load(data, skip=True).questions[QUESTIONS : 2 * QUESTIONS]
    kept: Json = read_json(DATA / "other_things.json")
    own = {"samples": kept["samples"], "file": [each.text for each in questions]}
    for name, asked in own.items():
        with Workspace.open(folder / name, embedder=embedder) as workspace:
            choose_embedder(workspace)
            if name == "samples":
                ingest_paths(workspace, [samples.documents_folder()])
                embed_in_full(workspace)
            else:
                fill(workspace, list(dict.fromkeys(text for each in questions for text in each.passages)))
            measure_similarity(workspace)
            found = sum(bool(search([workspace], question, TOP_K)) for question in asked)
            yield [name, f"{found} of {len(asked)}", count_refused(workspace, kept["other"])]


def measure_follow_ups(home: Path) -> Iterator[list[str]]:
    """A row per kind of question: how many found a right document first, or rightly found nothing."""
    passages: Json = read_json(DATA / "citations.json")["passages"]
    names = {text: name.partition("#")[0] for name, text in passages.items()}
    kinds: Json = read_json(DATA / "follow_ups.json")
    with Workspace.open(home) as workspace:
        fill(workspace, list(passages.values()))
        for kind, asked in kinds.items():
            right = 0
            for before, question, *documents in asked:
                found = search([workspace], question, Settings.top_k, before)
                first = {names[source.text] for source in found[:1]}
                right += bool(first & {*documents}) if documents else not first
            yield [kind, f"{right} of {len(asked)}"]


def main(texts: Path | None = None, data: Path | None = None, embedder: str = "default") -> None:
    """Measure, and print tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if texts:
            head = ["language", "by vectors", "by vectors and words", "refused without the facts"]
            print(
                markdown_table(
                    head, [measure_language(folder, texts, each, embedder) for each in LANGUAGE_CODES]
                )
            )
        if data:
            rows = measure_other_things(folder, data, embedder)
            print(markdown_table(["passages of", "answerable kept", "others refused"], rows))
        if not (texts or data):
            print(
                markdown_table(
                    ["asked after another question", "right"], measure_follow_ups(folder / "follow-ups")
                )
            )


if __name__ == "__main__":
    run(main, __doc__)
