"""Measures what the frameworks' own programs reuse, and what their first question costs: tables of docs/programs.md.

    python -m benchmarks.measure_programs --home /tmp/programs

Every program (`programs_langchain.py`, `programs_llama_index.py`) is asked three questions about the bundled model's
sample documents, and the tokens of the third are counted. With `--repeats 5` first questions are timed instead, each in
a new collection, alternating with the same program with `method="full"` and nothing learnt or registered. Recorded are
ratios of medians: `first` by wall-clock time, and `first_cpu` by processor time until the answer. `--only` runs some
programs, and keeps the recorded results of the rest.
"""

import gc
import json
import os
import time
import warnings
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import typer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.common import Home, Row, clock_and_cpu_s, medians, read_json, run, to_json
from benchmarks.results import PROGRAMS, write_programs
from benchmarks.reused_tokens import Ask, Program, count_served, record_answers, results_of
from ragblend.app import samples
from ragblend.app.library.readers import read_document

ANSWER_TOKENS = 8
QUESTIONS = (
    "Where did the clapper of the bell fall?",
    "What happened to the clapper of the bell?",
    "How was the clapper of the bell lost?",
)
FULL_PREFILL = {"method": "full", "learn_from_prompts": False, "register_retrieved": False}


class Framework(NamedTuple):
    """A framework's programs, our model for it with its options, and the sample documents."""

    programs: list[Program]
    model: Any
    options: Row
    library: Any


def langchain() -> Framework:
    from langchain_core.documents import Document

    from benchmarks.programs_langchain import PROGRAMS, LangChainDocuments
    from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings

    documents = [Document(text, metadata={"source": name}) for name, text in texts().items()]
    return Framework(
        PROGRAMS,
        ChatRAGBlend,
        {"max_tokens": ANSWER_TOKENS},
        LangChainDocuments(documents, RAGBlendEmbeddings()),
    )


def llama_index() -> Framework:
    from llama_index.core import Document

    from benchmarks.programs_llama_index import PROGRAMS, LlamaIndexDocuments
    from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM

    documents = [Document(text=text, metadata={"file_name": name}) for name, text in texts().items()]
    return Framework(
        PROGRAMS,
        RAGBlendLLM,
        {"max_new_tokens": ANSWER_TOKENS},
        LlamaIndexDocuments(documents, RAGBlendEmbedding()),
    )


def texts() -> dict[str, str]:
    """The sample documents that are plain text, by name."""
    paths = sorted(path for path in samples.documents_folder().iterdir() if path.suffix in (".md", ".html"))
    return {path.name: "\n\n".join(part.text for part in read_document(path).parts) for path in paths}


def main(
    home: Home,
    repeats: Annotated[int, typer.Option(help="How often the first question is timed; 0: count tokens.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="A program; may be given several times.")] = None,
) -> None:
    """Run the chosen programs, record the results, write the tables."""
    warnings.simplefilter("ignore")
    recorded: dict[str, list[Row]] = read_json(PROGRAMS)
    for name, make in {"langchain": langchain, "llama-index": llama_index}.items():
        framework = make()
        known = {row["program"]: row for row in recorded.get(name, [])}
        for program in framework.programs:
            if only and program.name not in only:
                continue
            row = known.get(program.name, {}) | {"program": program.name, "source": program.source}
            known[program.name] = row | measure_program(framework, program, str(home), repeats)
            print(json.dumps(known[program.name]), flush=True)
            recorded[name] = [known[each.name] for each in framework.programs if each.name in known]
            PROGRAMS.write_text(to_json(recorded, 2), encoding="utf-8")
    write_programs(recorded)


def measure_program(framework: Framework, program: Program, home: str, repeats: int) -> Row:
    """The results of one program to record."""
    if not repeats:
        return count_third_question(framework, program, home)
    rounds = [
        [
            each
            for options in ({}, FULL_PREFILL)
            for each in time_first_question(framework, program, home, options)
        ]
        for _ in range(repeats)
    ]
    clock, processor, full_clock, full_processor = medians(rounds)
    return {"first": round(clock / full_clock, 3), "first_cpu": round(processor / full_processor, 3)}


def start_program(framework: Framework, program: Program, home: str, options: Row) -> tuple[Ask, Any]:
    """The program with a warmed-up model and a collection of its own, and the model's engine."""
    gc.collect()  # otherwise models of earlier programs would learn from this one's retrieval, too
    llm = framework.model(home=home, collection=f"{time.time_ns()}", **framework.options, **options)
    ask = program.make(llm, framework.library)
    llm.complete("Hello") if hasattr(llm, "complete") else llm.invoke("Hello")
    llm.backend.engine.finish_background()
    return ask, llm.backend.engine


def time_first_question(
    framework: Framework, program: Program, home: str, options: Row
) -> tuple[float, float]:
    """Wall-clock and processor seconds of the first question."""
    ask, engine = start_program(framework, program, home, options)
    clock_s, cpu_s = clock_and_cpu_s(lambda: ask(QUESTIONS[0]))
    engine.finish_background()
    return clock_s, cpu_s


def count_third_question(framework: Framework, program: Program, home: str) -> Row:
    """Where the KV of the third question's tokens came from."""
    ask, engine = start_program(framework, program, home, {})
    for question in QUESTIONS:
        with record_answers() as answers, framework.library.finding() as found:
            ask(question)
        engine.finish_background()
    return asdict(count_served(engine, results_of(answers), found.texts))


if __name__ == "__main__":
    run(main, __doc__)
