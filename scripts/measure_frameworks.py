"""Time to first token inside LlamaIndex and LangChain: their own Hugging Face LLM, and RAGBlend in its place.

    pip install --no-deps llama-index-llms-huggingface langchain-huggingface
    python scripts/measure_frameworks.py --home /tmp/frameworks --json frameworks.json

Each framework's introductory example over the sample documents, with its default chunk sizes and k. Both LLMs get the
same weights and dtype, and the same questions in the same order; retrieval is part of every time. RAGBlend is asked
them twice. A question counts as a later one if every passage that it retrieves was retrieved before.
"""

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ANSWER_TOKENS = 32
QUESTIONS = [
    "How long is the causeway under water at every high tide?",
    "When did the Thornsay Causeway Tramway open?",
    "Who designed the causeway?",
    "How many strokes of the bell open the causeway?",
    "What does the locomotive Dunlin burn?",
    "What is the boiler pressure of the locomotive Dunlin?",
    "What are Dunlin's axleboxes packed with?",
    "What caused the leak in the north cistern?",
    "Who found the clapper of the bell?",
    "Who is the chair of the Thornsay Tramway Cooperative?",
    "How much will the battery locomotive Whimbrel cost?",
]
Ask = Callable[[str], Iterator[str]]


@dataclass
class Asked:
    """One question to one LLM; misses counts passages without stored KV (None for the framework's own LLM)."""

    ttft_ms: float
    answer: str
    misses: int | None = None
    reused: int | None = None
    prompt_tokens: int | None = None


def main() -> int:
    """Run what was asked for, print a table, write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--home", type=Path, required=True, help="a RAGBlend home; the model is converted there"
    )
    parser.add_argument("--model", default="default", help="as in `ragblend --model`; both LLMs load it")
    parser.add_argument("--framework", choices=["llama-index", "langchain", "both"], default="both")
    parser.add_argument("--json", type=Path, help="where the figures go")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    folder = weights_folder(given.home, given.model)
    runs = {"llama-index": llama_index, "langchain": langchain}
    names = list(runs) if given.framework == "both" else [given.framework]
    results = {name: runs[name](given.home, folder) for name in names}
    for name, (theirs, ours) in results.items():
        report(name, theirs, ours)
    if given.json:
        figures = {
            name: {"theirs": [asdict(a) for a in theirs], "ours": [asdict(a) for a in ours]}
            for name, (theirs, ours) in results.items()
        }
        given.json.write_text(json.dumps(figures, indent=1))
    return 0


def weights_folder(home: Path, model: str) -> str:
    """The model as a folder of safetensors: what both LLMs load."""
    from ragblend import Engine

    if Path(model).is_dir():
        return model
    engine = Engine.open(model=model, home=home)
    _ = engine.gate
    engine.close()
    (config,) = (home / "models").glob("*/config.json")
    return str(config.parent)


def asked_all(ask: Ask, statistics_of: Callable[[], Any] = lambda: None, rounds: int = 1) -> list[Asked]:
    """Every question in turn, after one that is not counted: the process' first pays for threads and kernels."""
    return [asked(ask, question, statistics_of) for question in ["What is a tramway?", *QUESTIONS * rounds]][
        1:
    ]


def asked(ask: Ask, question: str, statistics_of: Callable[[], Any]) -> Asked:
    begun, ttft_ms, text = time.perf_counter(), 0.0, ""
    for piece in ask(question):
        if piece and not text:
            ttft_ms = (time.perf_counter() - begun) * 1e3
        text += piece
    kv = statistics_of()
    return (
        Asked(ttft_ms, text)
        if kv is None
        else Asked(ttft_ms, text, kv["misses"], kv["reused"], tokens_of(kv))
    )


def tokens_of(kv: dict[str, Any]) -> int:
    return sum(kv[name] for name in ("reused", "recomputed", "fresh", "missing"))


def report(name: str, theirs: list[Asked], ours: list[Asked]) -> None:
    """A line a question, and the median of the later ones."""
    print(
        f"\n{name}\n{'prompt':>8}{'reused':>8}{'new':>5}{'theirs ms':>11}{'RAGBlend ms':>13}{'times':>7}  question"
    )
    ratios = []
    for question, one, two in zip(QUESTIONS * 2, theirs * 2, ours, strict=True):
        ratio = one.ttft_ms / two.ttft_ms
        ratios += [ratio] if two.misses == 0 else []
        numbers = (
            f"{two.prompt_tokens:>8}{two.reused:>8}{two.misses:>5}{one.ttft_ms:>11.0f}{two.ttft_ms:>13.0f}"
        )
        print(f"{numbers}{ratio:>7.1f}  {question}")
    median = statistics.median(ratios)
    print(
        f"later questions: {len(ratios)}, first token {median:.1f} times sooner (median; least {min(ratios):.1f})"
    )


# --- LlamaIndex


def llama_index(home: Path, folder: str) -> tuple[list[Asked], list[Asked]]:
    """Its starter example: load, index, ask."""
    import torch
    from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
    from llama_index.llms.huggingface import HuggingFaceLLM

    from ragblend.app.samples import documents_folder
    from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM

    documents = SimpleDirectoryReader(str(documents_folder())).load_data()
    index = VectorStoreIndex.from_documents(documents, embed_model=RAGBlendEmbedding())

    def asking(llm: Any) -> Ask:
        engine = index.as_query_engine(llm=llm, streaming=True)
        return lambda question: iter(engine.query(question).response_gen)

    theirs = HuggingFaceLLM(
        model_name=folder,
        tokenizer_name=folder,
        context_window=8192,
        max_new_tokens=ANSWER_TOKENS,
        generate_kwargs={"do_sample": False},
        model_kwargs={"dtype": torch.bfloat16},
        device_map="cpu",
        is_chat_model=True,  # so that it sees the same chat template
    )
    measured = asked_all(asking(theirs))
    ours = RAGBlendLLM(model=folder, home=home, max_new_tokens=ANSWER_TOKENS)

    def statistics_of() -> Any:
        ours.backend.engine.finish_background()
        assert ours.last_stats is not None
        return ours.last_stats["kv"]

    return measured, asked_all(asking(ours), statistics_of, rounds=2)


# --- LangChain


def langchain(home: Path, folder: str) -> tuple[list[Asked], list[Asked]]:
    """Its retrieval tutorial: split, Chroma.from_documents, retriever | prompt | llm."""
    import torch
    from langchain_chroma import Chroma
    from langchain_core.documents import Document
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    from ragblend.app.readers import read_document
    from ragblend.app.samples import documents_folder
    from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings

    documents = [
        Document("\n\n".join(part.text for part in read_document(path)), metadata={"source": path.name})
        for path in sorted(documents_folder().iterdir())
    ]
    splits = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=200).split_documents(documents)
    retriever = Chroma.from_documents(splits, RAGBlendEmbeddings()).as_retriever()
    prompt = ChatPromptTemplate.from_template(
        "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer "
        "the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and "
        "keep the answer concise.\nQuestion: {question}\nContext: {context}\nAnswer:"
    )

    def asking(llm: Any, wrap: Callable[[Any], Any]) -> Ask:
        context = {"context": retriever | formatted, "question": RunnablePassthrough()}
        return (context | prompt | llm | wrap).stream

    def formatted(found: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in found)

    pipeline = HuggingFacePipeline.from_model_id(
        folder,
        task="text-generation",
        model_kwargs={"dtype": torch.bfloat16},
        pipeline_kwargs={"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "return_full_text": False},
    )
    measured = asked_all(asking(ChatHuggingFace(llm=pipeline, model_id=folder), StrOutputParser()))
    ours = ChatRAGBlend(model=folder, home=str(home), max_tokens=ANSWER_TOKENS)
    last: dict[str, Any] = {}

    def text_of(chunks: Iterator[Any]) -> Iterator[str]:
        for chunk in chunks:
            last.update(chunk.response_metadata)
            yield str(chunk.text)

    def statistics_of() -> Any:
        ours.backend().engine.finish_background()
        return last["kv"]

    return measured, asked_all(asking(ours, text_of), statistics_of, rounds=2)


if __name__ == "__main__":
    sys.exit(main())
