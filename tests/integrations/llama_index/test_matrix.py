"""Every engine, style and response mode of LlamaIndex, with Chroma: the answers are the engine's own, and every
retrieved passage is found and reused. `docs/frameworks.md` has the table. Each pair of kind, mode and style is tested.
"""

import asyncio

import chromadb
import pytest
from llama_helpers import STORIES, HashEmbedding, recording, story_nodes
from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.vector_stores.chroma import ChromaVectorStore

from ragblend import Chunk, Literal
from ragblend.engine.prompts.segments import Message
from ragblend.integrations.llama_index import RAGBlendLLM, RAGBlendSynthesizer, encode_index
from ragblend.integrations.llama_index.nodes import passage_of

QUESTION = "Who kept two ledgers?"
HISTORY = [ChatMessage(role="user", content="Hello."), ChatMessage(role="assistant", content="Hello!")]
MODES = ["compact", "refine", "tree_summarize", "accumulate", "simple_summarize"]
STYLES = ["sync", "stream", "async", "async stream"]
TOKENS = 6
IDS = {node.node_id for node in story_nodes()}
TEXTS = {passage_of(node).text: node.node_id for node in story_nodes()}
assert len(TEXTS) == len(STORIES) == 3


@pytest.fixture(scope="module")
def llm(tiny_folder, tmp_path_factory):
    """Learns nothing from prompts: each question is asked in four styles, so that its template would recur as well."""
    made = RAGBlendLLM(
        model=str(tiny_folder), home=tmp_path_factory.mktemp("llama-index"), device="cpu", dtype="float32",
        max_new_tokens=TOKENS, learn_from_prompts=False,
    )  # fmt: skip
    yield made
    made.backend.engine.close()
    made.backend.registry.close()


@pytest.fixture(scope="module")
def index(llm, tmp_path_factory):
    """A stock index with its texts in Chroma alone; encoded ahead, from what Chroma returns."""
    settings = chromadb.config.Settings(anonymized_telemetry=False)
    client = chromadb.PersistentClient(path=tmp_path_factory.mktemp("chroma"), settings=settings)
    store = ChromaVectorStore(chroma_collection=client.create_collection("stories", embedding_function=None))
    context = StorageContext.from_defaults(vector_store=store)
    made = VectorStoreIndex(story_nodes(), storage_context=context, embed_model=HashEmbedding())
    assert not made.docstore.docs
    assert encode_index(made, llm, show_progress=False) == 3
    yield made
    client.close()


@pytest.fixture(scope="module")
def own_answer():
    """The engine's own answer to the prompt of an event, in which chunks are found here by `str.find`."""
    known = {}

    def answer(engine, event):
        asked = event.messages if hasattr(event, "messages") else [ChatMessage(event.prompt)]
        said = [Message(m.role.value, tuple(segments(m.content))) for m in asked]
        prompt = engine.tokenize(engine.chat(said))
        if (engine, prompt.token_ids) not in known:
            known[engine, prompt.token_ids] = engine.generate(prompt, max_new_tokens=TOKENS)
        return known[engine, prompt.token_ids]

    return answer


def segments(text):
    places = sorted((text.find(passage), passage) for passage in TEXTS if passage in text)
    at = 0
    for place, passage in places:
        yield Literal(text[at:place], verbatim=True)
        yield Chunk(passage)
        at = place + len(passage)
    yield Literal(text[at:], verbatim=True)


def query(engine, style):
    """The answer's text and its sources, by `query` or `aquery` (or a synthesizer's), streamed or not."""

    async def asked():
        response = await engine.aquery(QUESTION)
        text = [t async for t in response.response_gen] if "stream" in style else [str(response)]
        return "".join(text), response.source_nodes

    if "async" in style:
        return asyncio.run(asked())
    response = engine.query(QUESTION)
    text = list(response.response_gen) if "stream" in style else [str(response)]
    return "".join(text), response.source_nodes


class RetrieverAndSynthesizer:
    """For those who call the two steps separately."""

    def __init__(self, retriever, synthesizer):
        self.retriever, self.synthesizer = retriever, synthesizer

    def query(self, question):
        return self.synthesizer.synthesize(question, self.retriever.retrieve(question))

    async def aquery(self, question):
        return await self.synthesizer.asynthesize(question, await self.retriever.aretrieve(question))


def query_engine(kind, index, llm, mode, streaming):
    options = {"llm": llm, "response_mode": mode, "streaming": streaming}
    retriever = index.as_retriever(similarity_top_k=3)
    if kind == "index.as_query_engine":
        return index.as_query_engine(similarity_top_k=3, **options)
    if kind == "RetrieverQueryEngine":
        return RetrieverQueryEngine.from_args(retriever, **options)
    if kind == "retriever + synthesizer":
        return RetrieverAndSynthesizer(retriever, get_response_synthesizer(**options))
    return RetrieverAndSynthesizer(retriever, RAGBlendSynthesizer(**options))


KINDS = ["index.as_query_engine", "RetrieverQueryEngine", "retriever + synthesizer", "RAGBlendSynthesizer"]
CELLS = [
    (KINDS[(across + down) % len(KINDS)], mode, style)
    for across, mode in enumerate(MODES)
    for down, style in enumerate(STYLES)
]
# LlamaIndex cannot stream `accumulate`; its own `simple_summarize` shows the model no passage as it stands.
CELLS = [
    (KINDS[-1] if mode == "simple_summarize" else kind, mode, style)
    for kind, mode, style in CELLS
    if not (mode == "accumulate" and "stream" in style)
]


@pytest.mark.parametrize(("kind", "mode", "style"), CELLS)
def test_query_engines_reuse_every_passage(llm, index, own_answer, kind, mode, style):
    with recording() as recorder:
        text, sources = query(query_engine(kind, index, llm, mode, "stream" in style), style)
    assert {source.node.node_id for source in sources} == IDS
    assert len(recorder.ends) == (3 if mode in {"refine", "accumulate"} else 1)
    assert text.strip()
    assert recorder.ends[-1].response.message.content in text
    assert_all_reused(llm, recorder, own_answer)


def assert_all_reused(llm, recorder, own_answer):
    """Every retrieved passage was found, had its KV, and the answers are the engine's own."""
    assert {node for kv in recorder.kv for node in kv["chunks"]} == IDS
    assert [kv["misses"] for kv in recorder.kv] == [0] * len(recorder.kv)
    assert [kv["hits"] for kv in recorder.kv] == [len(kv["chunks"]) for kv in recorder.kv]
    for event in recorder.ends:
        own = own_answer(llm.backend.engine, event)
        text = event.response.text if hasattr(event.response, "text") else event.response.message.content
        # The chat engines' writers of histories strip the message they were given.
        assert text.strip() == own.text.strip()
        assert event.response.raw["kv"]["reused"] == own.report.tokens.reused


def memory():
    """LlamaIndex's default memory is a database that it never closes."""
    return ChatMemoryBuffer.from_defaults(token_limit=4000)


def chat(engine, style):
    async def asked():
        if "stream" not in style:
            return str(await engine.achat(QUESTION, chat_history=HISTORY))
        response = await engine.astream_chat(QUESTION, chat_history=HISTORY)
        return "".join([t async for t in response.async_response_gen()])

    if "async" in style:
        return asyncio.run(asked())
    if style == "sync":
        return str(engine.chat(QUESTION, chat_history=HISTORY))
    return "".join(engine.stream_chat(QUESTION, chat_history=HISTORY).response_gen)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("mode", "calls"), [("condense_plus_context", 2), ("context", 1)])
def test_chat_engines_reuse_every_passage(llm, index, own_answer, mode, calls, style):
    engine = index.as_chat_engine(chat_mode=mode, llm=llm, similarity_top_k=3, memory=memory())
    with recording() as recorder:
        text = chat(engine, style)
    assert len(recorder.ends) == calls
    assert text.strip() == recorder.ends[-1].response.message.content.strip()
    assert_all_reused(llm, recorder, own_answer)


@pytest.mark.parametrize("style", ["sync", "async stream"])
def test_a_chat_without_retrieval_reuses_pasted_passages(llm, index, own_answer, style):
    with recording() as recorder:
        text = chat(SimpleChatEngine.from_defaults(llm=llm, memory=memory()), style)
    [event] = recorder.ends
    assert event.response.raw["kv"]["chunks"] == []
    assert text.strip() == own_answer(llm.backend.engine, event).text.strip()
    with recording() as recorder:
        SimpleChatEngine.from_defaults(llm=llm, memory=memory()).chat("\n\n".join([*TEXTS, QUESTION]))
    assert_all_reused(llm, recorder, own_answer)


def test_the_stock_simple_summarize_shows_the_model_a_list(llm, index):
    """LlamaIndex's #22392: escaped newlines, so no node is found with its metadata. Once fixed, drop our mode."""
    with recording() as recorder:
        query(query_engine("index.as_query_engine", index, llm, "simple_summarize", False), "sync")
    assert not IDS & set(recorder.kv[0]["chunks"])
    assert "\\n\\n" in recorder.ends[0].messages[-1].content
