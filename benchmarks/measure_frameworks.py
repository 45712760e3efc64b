"""Times the first token inside LlamaIndex and LangChain, with their own Hugging Face LLM and with RAGBlend instead.

    pip install --no-deps llama-index-llms-huggingface langchain-huggingface
    python -m benchmarks.measure_frameworks --home /tmp/frameworks

Each framework's introductory example over the sample documents, with its default chunk sizes and k, answers in one
token. Both LLMs get the same weights and dtype, and the same questions in the same order; retrieval is part of every
time. RAGBlend is asked them twice. A question counts as a later one if every passage that it retrieves was retrieved
before.
"""

import os
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.common import Home, Model, Row, markdown_table, open_engine, run
from benchmarks.reused_tokens import Ask, record_answers, results_of
from ragblend.app import samples

WARM_UP = "What is a tramway?"  # not counted: a process's first question starts threads and kernels
QUESTIONS = [each.question for each in samples.questions()[:11]]


def main(home: Home, model: Model = "default") -> None:
    """Run both, print a table of each."""
    warnings.simplefilter("ignore")
    with open_engine(model, home) as engine:
        _ = engine.gate  # converts the model
        folder = str(engine.runtime.folder)
    for name, make in {"LlamaIndex": llama_index, "LangChain": langchain}.items():
        theirs, ours, finish = make(str(home), folder)
        report(name, ask_all(theirs, 1), ask_all(ours, 2, finish))


def ask_all(ask: Ask, rounds: int, finish: Callable[[], object] = lambda: None) -> list[Row]:
    """Ask every question: the time until its one token, and how many passages were reused and missing.

    finish: waits for background work; called after every question.
    """
    rows = []
    for question in [WARM_UP, *QUESTIONS * rounds]:
        with record_answers() as answers:
            begun = time.perf_counter()
            ask(question)
            ttft_ms = 1e3 * (time.perf_counter() - begun)
        reports = [result.report for result in results_of(answers)]
        counts = {name: sum(getattr(each, name) for each in reports) for name in ("hits", "misses")}
        rows.append(counts | {"ttft_ms": ttft_ms})
        finish()
    return rows[1:]


def report(name: str, theirs: list[Row], ours: list[Row]) -> None:
    """Print a row per question, and the median of the later ones."""
    rows, later = [], []
    for question, their, our in zip(QUESTIONS * 2, theirs * 2, ours, strict=True):
        speedup = their["ttft_ms"] / our["ttft_ms"]
        later += [speedup] if our["misses"] == 0 else []
        times = (f"{their['ttft_ms']:.0f}", f"{our['ttft_ms']:.0f}", f"{speedup:.1f}")
        rows.append((question, str(our["hits"]), str(our["misses"]), *times))
    print(markdown_table((name, "reused", "new", "theirs, ms", "RAGBlend, ms", "times"), rows))
    least = f"median; least {min(later):.1f}"
    print(
        f"later questions: {len(later)}, first token {statistics.median(later):.1f} times faster ({least})\n"
    )


def llama_index(home: str, folder: str) -> tuple[Ask, Ask, Callable[[], object]]:
    """LlamaIndex's starter example with both LLMs, and a function that waits for RAGBlend's background work."""
    from llama_index.core import SimpleDirectoryReader
    from llama_index.llms.huggingface import HuggingFaceLLM

    from benchmarks.programs_llama_index import LlamaIndexDocuments, as_starter
    from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM

    documents = SimpleDirectoryReader(str(samples.documents_folder()), exclude_hidden=False).load_data()
    library = LlamaIndexDocuments(documents, RAGBlendEmbedding())
    theirs = HuggingFaceLLM(
        model_name=folder,
        tokenizer_name=folder,
        context_window=8192,
        max_new_tokens=1,
        generate_kwargs={"do_sample": False},
        model_kwargs={"dtype": torch.bfloat16},
        device_map="cpu",
        is_chat_model=True,  # so that it sees the same chat template
    )
    ours = RAGBlendLLM(model=folder, home=home, max_new_tokens=1)
    return as_starter(theirs, library), as_starter(ours, library), ours.backend.engine.finish_background


def langchain(home: str, folder: str) -> tuple[Ask, Ask, Callable[[], object]]:
    """LangChain's retrieval tutorial with both models, and a function that waits for RAGBlend's background work."""
    from langchain_core.documents import Document
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

    from benchmarks.programs_langchain import LangChainDocuments, as_chain
    from ragblend.app.library.readers import read_document
    from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings

    texts = [read_document(path).parts for path in sorted(samples.documents_folder().iterdir())]
    documents = [Document("\n\n".join(part.text for part in parts)) for parts in texts]
    library = LangChainDocuments(documents, RAGBlendEmbeddings())
    options: dict[str, Any] = {"max_new_tokens": 1, "do_sample": False, "return_full_text": False}
    pipeline = HuggingFacePipeline.from_model_id(
        folder, task="text-generation", model_kwargs={"dtype": torch.bfloat16}, pipeline_kwargs=options
    )
    theirs, ours = (
        ChatHuggingFace(llm=pipeline, model_id=folder),
        ChatRAGBlend(model=folder, home=home, max_tokens=1),
    )
    return as_chain(theirs, library), as_chain(ours, library), ours.backend.engine.finish_background


if __name__ == "__main__":
    run(main, __doc__)
