"""Times the first token inside LlamaIndex and LangChain, with their own Hugging Face LLM and with RAGBlend instead.

    pip install --no-deps llama-index-llms-huggingface langchain-huggingface
    python -m benchmarks.measure_frameworks --home /tmp/frameworks --json frameworks.json

Each framework's introductory example over the sample documents, with its default chunk sizes and k. Both LLMs get the
same weights and dtype, and the same questions in the same order; retrieval is part of every time. RAGBlend is asked
them twice. A question counts as a later one if every passage that it retrieves was retrieved before.
"""

import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.common import Home, Model, Row, run
from ragblend.app import samples

ANSWER_TOKENS = 32
WARM_UP = "What is a tramway?"  # not counted: a process's first question starts threads and kernels
QUESTIONS = [each.question for each in samples.questions()[:11]]
Ask = Callable[[str], Iterator[str]]


def main(
    home: Home,
    model: Model = "default",
    output: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
) -> None:
    """Run both, print a table of each, write the JSON."""
    warnings.simplefilter("ignore")
    folder = weights_folder(home, model)
    runs = {"llama-index": llama_index, "langchain": langchain}
    figures = {
        name: dict(zip(("theirs", "ours"), each(home, folder), strict=True)) for name, each in runs.items()
    }
    for name, found in figures.items():
        report(name, found["theirs"], found["ours"])
    if output:
        output.write_text(json.dumps(figures, indent=1))


def weights_folder(home: Path, model: str) -> str:
    """The model as a folder of safetensors: what both LLMs load."""
    from ragblend import Engine

    if Path(model).is_dir():
        return model
    engine = Engine.open(model=model, home=home)
    _ = engine.gate  # converts it
    engine.close()
    return str(engine.runtime.folder)


def asked_all(ask: Ask, statistics_of: Callable[[], Row] = dict, rounds: int = 1) -> list[Row]:
    """Ask every question; its answer, its time, and RAGBlend's counts."""
    rows = []
    for question in [WARM_UP, *QUESTIONS * rounds]:
        begun, ttft_ms, text = time.perf_counter(), 0.0, ""
        for piece in ask(question):
            if piece and not text:
                ttft_ms = (time.perf_counter() - begun) * 1e3
            text += piece
        rows.append({**statistics_of(), "ttft_ms": ttft_ms, "answer": text})
    return rows[1:]


def report(name: str, theirs: list[Row], ours: list[Row]) -> None:
    """Print a line per question, and the median of the later ones."""
    print(f"\n{name}\n{'reused':>8}{'new':>5}{'theirs ms':>11}{'RAGBlend ms':>13}{'times':>7}  question")
    later = []
    for question, one, two in zip(QUESTIONS * 2, theirs * 2, ours, strict=True):
        times = one["ttft_ms"] / two["ttft_ms"]
        later += [times] if two["misses"] == 0 else []
        counts = f"{two['reused']:>8}{two['misses']:>5}{one['ttft_ms']:>11.0f}{two['ttft_ms']:>13.0f}"
        print(f"{counts}{times:>7.1f}  {question}")
    least = f"median; least {min(later):.1f}"
    print(f"later questions: {len(later)}, first token {statistics.median(later):.1f} times faster ({least})")


def llama_index(home: Path, folder: str) -> tuple[list[Row], list[Row]]:
    """Its starter example: load, index, ask."""
    import torch
    from llama_index.core import SimpleDirectoryReader, VectorStoreIndex
    from llama_index.llms.huggingface import HuggingFaceLLM

    from ragblend.integrations.llama_index import RAGBlendEmbedding, RAGBlendLLM

    documents = SimpleDirectoryReader(str(samples.documents_folder())).load_data()
    index = VectorStoreIndex.from_documents(documents, embed_model=RAGBlendEmbedding())

    def asking(llm: Any) -> Ask:
        engine: Any = index.as_query_engine(llm=llm, streaming=True)
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
    ours = RAGBlendLLM(model=folder, home=str(home), max_new_tokens=ANSWER_TOKENS)

    def statistics_of() -> Row:
        ours.backend.engine.finish_background()
        assert ours.last_stats is not None
        return dict(ours.last_stats["kv"])

    return asked_all(asking(theirs)), asked_all(asking(ours), statistics_of, rounds=2)


def langchain(home: Path, folder: str) -> tuple[list[Row], list[Row]]:
    """Its retrieval tutorial: split, Chroma.from_documents, retriever | prompt | llm."""
    import torch
    from langchain_chroma import Chroma
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.runnables import RunnablePassthrough
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    from ragblend.app.library.readers import read_document
    from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendEmbeddings

    documents = [
        Document("\n\n".join(part.text for part in read_document(path).parts), metadata={"source": path.name})
        for path in sorted(samples.documents_folder().iterdir())
    ]
    splits = RecursiveCharacterTextSplitter(chunk_size=1000, chunk_overlap=200).split_documents(documents)
    retriever = Chroma.from_documents(splits, RAGBlendEmbeddings()).as_retriever()
    prompt = ChatPromptTemplate.from_template(
        "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer "
        "the question. If you don't know the answer, just say that you don't know. Use three sentences maximum and "
        "keep the answer concise.\nQuestion: {question}\nContext: {context}\nAnswer:"
    )
    last: Row = {}

    def asking(llm: Any) -> Ask:
        chain = {"context": retriever | formatted, "question": RunnablePassthrough()} | prompt | llm
        return lambda question: map(text_of, chain.stream(question))

    def formatted(found: list[Document]) -> str:
        return "\n\n".join(document.page_content for document in found)

    def text_of(chunk: Any) -> str:
        last.update(chunk.response_metadata)
        return str(chunk.text)

    pipeline = HuggingFacePipeline.from_model_id(
        folder,
        task="text-generation",
        model_kwargs={"dtype": torch.bfloat16},
        pipeline_kwargs={"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "return_full_text": False},
    )
    ours = ChatRAGBlend(model=folder, home=str(home), max_tokens=ANSWER_TOKENS)

    def statistics_of() -> Row:
        ours.backend.engine.finish_background()
        return dict(last["kv"])

    theirs = asked_all(asking(ChatHuggingFace(llm=pipeline, model_id=folder)))
    return theirs, asked_all(asking(ours), statistics_of, rounds=2)


if __name__ == "__main__":
    run(main, __doc__)
