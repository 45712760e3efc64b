"""Measures whether facts are found in ten languages, and whether questions about other things are refused.

    apt-get download $(printf 'libreoffice-l10n-%s ' ar de es hi ja ko ru th zh-cn)
    for each in *.deb; do dpkg -x $each texts; done
    python -m benchmarks.measure_languages --texts texts [--embedder FOLDER] [--data musique_dev.json]

For each language twelve facts (`languages.json`) are hidden among 200 passages of LibreOffice's translated messages.
Found: the fact's passage is among the first six; by the vectors alone, and as the app searches. Refused: the same
questions, asked where the facts are missing, find nothing. `--data`: the passages of the first 24 questions of that
file, and the sample documents, are asked their own questions, each other's, and general ones. `--held-out`: the same
with `held_out.json` and the next 24 questions of the file, which no number of the product was fitted to.
"""

import gettext
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.common import markdown, run
from benchmarks.measure_retrieval import fill
from ragblend.app import samples
from ragblend.app.answering.retrieval import search
from ragblend.app.library.ingest import embed_in_full, ingest_paths
from ragblend.app.library.similarity import measure_similarity
from ragblend.app.library.switching import choose_embedder
from ragblend.app.workspace import Workspace
from ragblend.kvstore.errors import UsageError
from ragblend.measuring.data import load

MESSAGES = "usr/lib/libreoffice/program/resource"
CODES = {
    "English": "de", "German": "de", "Spanish": "es", "Russian": "ru", "Arabic": "ar", "Hindi": "hi",
    "Chinese": "zh_CN", "Japanese": "ja", "Korean": "ko", "Thai": "th",
}  # fmt: skip
SHORT = ("Chinese", "Japanese", "Korean")  # scripts with about half as many letters
PASSAGES, CHARACTERS, LEAST_CHARACTERS, FIRST, QUESTIONS = 200, 350, 40, 6, 24
GENERAL = (
    "Who won the World Cup in 2018?", "What is the capital of Australia?", "How do I bake a sourdough bread?",
    "What is the derivative of x squared?", "Who wrote Don Quixote?", "How many planets are there?",
    "Translate good morning into French.", "How do vaccines work?", "Why is the sky blue?",
    "What is the best programming language?", "How old is the universe?", "What does GDP mean?",
    "Which phone should I buy?", "Who is the president of Brazil?", "How do I reset my router password?",
    "When does daylight saving time end?", "What are the symptoms of the flu?", "What is the plot of Hamlet?",
    "Can dogs eat chocolate?", "How do I write a cover letter?", "What is the exchange rate of the yen?",
    "What is quantum entanglement?", "How do I remove a red wine stain?", "What is the speed of light?",
)  # fmt: skip


def messages(texts: Path, language: str) -> list[str]:
    """Passages of sentences in that language."""
    folder = texts / MESSAGES / CODES[language] / "LC_MESSAGES"
    found = list[str]()
    for file in sorted(folder.glob("*.mo")):
        with file.open("rb") as stream:
            catalogue: dict[object, str] = vars(gettext.GNUTranslations(stream))["_catalog"]
        for key, translated in catalogue.items():
            original = key.rpartition("\x04")[2] if isinstance(key, str) else ""
            if len(original) >= LEAST_CHARACTERS and (language == "English" or translated != original):
                text = original if language == "English" else translated
                found.append(" ".join(text.replace("~", "").replace("_", "").split()))
    if not found:
        raise UsageError(
            f"There are no messages in {folder}. The bench's description says how to fetch them."
        )
    found = list(dict.fromkeys(found))
    random.Random(0).shuffle(found)
    passages, least = [""], CHARACTERS // 2 if language in SHORT else CHARACTERS
    for message in found:
        passages[-1] = f"{passages[-1]} {message}".strip()
        if len(passages[-1]) >= least:
            passages.append("")
    return passages[:PASSAGES]


def hidden(passages: Sequence[str], facts: Sequence[str]) -> list[str]:
    """The passages, with a fact each in the middle of some of them."""
    found, places = list(passages), random.Random(1).sample(range(len(passages)), len(facts))
    for place, fact in zip(places, facts, strict=True):
        words = found[place].split(". ")
        middle = (len(words) + 1) // 2
        found[place] = " ".join(filter(None, [". ".join(words[:middle]), fact, ". ".join(words[middle:])]))
    return found


def opened(home: Path, embedder: str, search_by: str = "hybrid") -> Workspace:
    return Workspace.open(home, embedder=embedder, search=search_by)


def of_language(folder: Path, texts: Path, language: str, embedder: str) -> list[str]:
    pairs: list[tuple[str, str]] = json.loads(Path(__file__).with_name("languages.json").read_text())[
        language
    ]
    passages, counts = messages(texts, language), list[int]()
    for way in ("vectors", "hybrid"):
        with opened(folder / language, embedder, way) as workspace:
            if way == "vectors":
                choose_embedder(workspace)
                fill(workspace, hidden(passages, [fact for fact, _ in pairs]))
                measure_similarity(workspace)
            found = [[s.text for s in search([workspace], question, FIRST)] for _, question in pairs]
            counts.append(sum(any(f in t for t in texts) for (f, _), texts in zip(pairs, found, strict=True)))
            mean = sum(map(len, found)) / len(found)
    with opened(folder / f"{language}-without", embedder) as workspace:
        choose_embedder(workspace)
        fill(workspace, passages)
        measure_similarity(workspace)
        refused = sum(not search([workspace], question, FIRST) for _, question in pairs)
    row = [language, *map(str, counts), f"{mean:.1f}", f"{refused} of {len(pairs)}"]
    print(row, flush=True)
    return row


def of_questions(folder: Path, data: Path, embedder: str, held_out: bool) -> Iterator[list[str]]:
    """Rows of answerable questions that found something, and of others that found nothing."""
    beside = Path(__file__)
    questions = load(data, skip=True).questions[QUESTIONS if held_out else 0 :][:QUESTIONS]
    own = {
        "samples": [each.question for each in samples.questions()],
        "file": [each.text for each in questions],
    }
    facts = [
        question for _, question in json.loads(beside.with_name("languages.json").read_text())["English"]
    ]
    general = [*facts, *GENERAL]
    if held_out:
        new = json.loads(beside.with_name("held_out.json").read_text())
        own["samples"], general = new["samples"], new["other"]
    for name, other in (("samples", "file"), ("file", "samples")):
        with opened(folder / name, embedder) as workspace:
            choose_embedder(workspace)
            if name == "samples":
                ingest_paths(workspace, [samples.documents_folder()])
                embed_in_full(workspace)
            else:
                fill(workspace, list(dict.fromkeys(text for each in questions for text in each.passages)))
            measure_similarity(workspace)
            kept = [search([workspace], question, FIRST) for question in own[name]]
            others = general if held_out else [*own[other], *general]
            refused = sum(not search([workspace], question, FIRST) for question in others)
        mean = sum(map(len, kept)) / len(kept)
        row = [name, f"{sum(map(bool, kept))} of {len(kept)}", f"{mean:.1f}", f"{refused} of {len(others)}"]
        print(row, flush=True)
        yield row


def main(
    texts: Path | None = None, embedder: str = "default", data: Path | None = None, held_out: bool = False
) -> None:
    """Measure, and print tables."""
    with tempfile.TemporaryDirectory() as folder:
        if data:
            rows = list(of_questions(Path(folder), data, embedder, held_out))
            print(markdown(["passages of", "answerable kept", "passages", "others refused"], rows))
        if texts:
            rows = [of_language(Path(folder), texts, language, embedder) for language in CODES]
            heads = [
                "language",
                "by vectors",
                "by vectors and words",
                "passages",
                "refused without the facts",
            ]
            print(markdown(heads, rows))


if __name__ == "__main__":
    run(main, __doc__)
