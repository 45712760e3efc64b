"""What the frameworks' own programs reuse, and what their first question costs: the tables of docs/frameworks.md.

    python -m benchmarks.measure_programs --home /tmp/programs

Every program (`programs_langchain.py`, `programs_llama_index.py`) is asked three questions about the bundled model's
sample documents. Counted is the third one. With `--repeats 5` the first one is timed as well, beside the same program
with `method="full"` and nothing learnt or registered, in turn, each time in a new collection; the ratio is that of the
medians, and worth something on an idle machine. `--only` runs some programs, and leaves what is recorded of the others.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.matrix import Program, results_of, served, watched
from benchmarks.results import FRAMEWORKS, PROGRAMS, with_programs
from ragblend.app import samples
from ragblend.app.readers import read_document

ANSWER_TOKENS = 8
QUESTIONS = (
    "Where did the clapper of the bell fall?",
    "What happened to the clapper of the bell?",
    "How was the clapper of the bell lost?",
)
PLAIN = {"method": "full", "learn_from_prompts": False, "register_retrieved": False}
Row = dict[str, Any]


class LangChain:
    """Its programs on the sample documents, and what was retrieved."""

    def __init__(self) -> None:
        from langchain_core.documents import Document

        from benchmarks import programs_langchain
        from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings

        self.programs, self.model = programs_langchain.PROGRAMS, ChatRAGBlend
        self.options = {"max_tokens": ANSWER_TOKENS}
        documents = [Document(text, metadata={"source": name}) for name, text in texts().items()]
        self.library = programs_langchain.Library(documents, RAGBlendEmbeddings())

    @contextmanager
    def finding(self) -> Iterator[Any]:
        self.library.found.forget()
        yield self.library.found


class LlamaIndex:
    """The same of LlamaIndex."""

    def __init__(self) -> None:
        from llama_index.core import Document

        from benchmarks import programs_llama_index
        from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM

        self.programs, self.model = programs_llama_index.PROGRAMS, RAGBlendLLM
        self.options = {"max_new_tokens": ANSWER_TOKENS}
        self.finding = programs_llama_index.finding
        documents = [Document(text=text, metadata={"file_name": name}) for name, text in texts().items()]
        self.library = programs_llama_index.Library(documents, RAGBlendEmbedding())


def texts() -> dict[str, str]:
    """Of the sample documents that are text: whole, by their names."""
    paths = sorted(path for path in samples.documents_folder().iterdir() if path.suffix in (".md", ".html"))
    return {path.name: "\n\n".join(part.text for part in read_document(path)) for path in paths}


def main() -> int:
    """Run what was asked for, record it, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--home", type=Path, required=True, help="a RAGBlend home; the model is converted there"
    )
    parser.add_argument("--repeats", type=int, default=0, help="first questions that are timed, of each kind")
    parser.add_argument("--only", nargs="*", default=[], metavar="PROGRAM", help="programs by their names")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    recorded: dict[str, list[Row]] = (
        json.loads(PROGRAMS.read_text(encoding="utf-8")) if PROGRAMS.exists() else {}
    )
    for name, kind in {"langchain": LangChain, "llama-index": LlamaIndex}.items():
        framework: Any = kind()
        known = {row["program"]: row for row in recorded.get(name, [])}
        for program in framework.programs:
            if given.only and program.name not in given.only:
                continue
            known[program.name] = measured(framework, program, str(given.home), given.repeats)
            print(json.dumps(known[program.name]), flush=True)
            recorded[name] = [known[each.name] for each in framework.programs if each.name in known]
            lines = json.dumps(recorded, indent=1).replace("\n   ", " ").replace("\n  }", " }")
            PROGRAMS.write_text(lines + "\n", encoding="utf-8")
    FRAMEWORKS.write_text(with_programs(FRAMEWORKS.read_text(encoding="utf-8"), recorded), encoding="utf-8")
    return 0


def measured(framework: Any, program: Program, home: str, repeats: int) -> Row:
    """A row of the table. home: where nothing of this run's collections is stored yet."""
    row: Row = {"program": program.name, "source": program.source}
    ask, engine = made(framework, program, home, {})
    ask(QUESTIONS[0])
    row |= third(framework, ask, engine)
    times: dict[str, list[float]] = {"full": [], "ours": []}
    for _ in range(repeats):
        for kind, options in (("ours", {}), ("full", PLAIN)):
            del ask
            gc.collect()  # models that are alive learn what others retrieve
            ask, engine = made(framework, program, home, options)
            begun = time.perf_counter()
            ask(QUESTIONS[0])
            times[kind].append(time.perf_counter() - begun)
            engine.finish_background()
    medians = {kind: statistics.median(found) for kind, found in times.items() if found}
    return row | ({"first": round(medians["ours"] / medians["full"], 3)} if medians else {})


def made(framework: Any, program: Program, home: str, options: Row) -> tuple[Callable[[str], Any], Any]:
    """The program on a model with a collection of its own, warm."""
    llm = framework.model(home=home, collection=f"{time.time_ns()}", **framework.options, **options)
    ask = program.make(llm, framework.library)
    llm.complete("Hello") if hasattr(llm, "complete") else llm.invoke("Hello")
    llm.backend.engine.finish_background()
    return ask, llm.backend.engine


def third(framework: Any, ask: Callable[[str], Any], engine: Any) -> Row:
    engine.finish_background()
    for question in QUESTIONS[1:]:
        with watched() as answers, framework.finding() as found:
            ask(question)
        engine.finish_background()
    return asdict(served(engine, results_of(answers), found.texts))


if __name__ == "__main__":
    sys.exit(main())
