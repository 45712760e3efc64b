"""How nodes become passages of prompts: registered, named, encoded ahead, edited, and in each response mode."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from llama_helpers import STORIES, HashEmbedding, recording, story_nodes, user
from llama_index.core import StorageContext, SummaryIndex, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.chat_engine import CondenseQuestionChatEngine
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import HierarchicalNodeParser, SentenceSplitter, get_leaf_nodes
from llama_index.core.postprocessor import MetadataReplacementPostProcessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import Document, ImageNode, NodeWithScore, TextNode
from pydantic import BaseModel
from waiting import SOON_S

from ragblend.integrations.llama_index import (
    EncodeNodes,
    PrefetchingRetriever,
    RAGBlendSynthesizer,
    RegisterNodes,
    encode_index,
)
from ragblend.integrations.llama_index.ingest import nodes_of
from ragblend.integrations.llama_index.nodes import ALTERNATIVE_MARK, passage_of, passages_of

NODES = story_nodes()
IDS = [node.node_id for node in NODES]
SCORED = [NodeWithScore(node=node, score=1.0) for node in NODES]
QUESTION = "Who kept two ledgers?"
MODES = ["compact", "refine", "tree_summarize", "accumulate", "compact_accumulate", "simple_summarize"]


class Ledger(BaseModel):
    """What was written down."""

    keeper: str
    books: int


@pytest.fixture
def passive(make_llm):
    """An LLM that registers nothing by itself."""
    return make_llm(register_retrieved=False, learn_from_prompts=False)


def vector_index(nodes=NODES):
    return VectorStoreIndex(nodes, embed_model=HashEmbedding())


def texts_of(nodes):
    return [passage_of(node).text for node in nodes]


def asked(llm, nodes, between="\n\n", /, **named):
    """The statistics of a prompt that holds the nodes' texts."""
    return llm.chat(user(f"{between.join(texts_of(nodes))}\n{QUESTION}"), **named).raw["kv"]


def test_a_passage_is_what_the_model_is_shown_of_a_node():
    metadata = {"file": "a.md", "secret": 1}
    node = TextNode(id_="one", text="\n  Text. \n", metadata=metadata, excluded_llm_metadata_keys=["secret"])
    assert passage_of(node).text == "file: a.md\n\n\n  Text."
    assert passage_of(NodeWithScore(node=node)).node_id == "one"
    assert passages_of([node, TextNode(text=" \n "), ImageNode()]) == [passage_of(node)]


# --- the synthesizer


@pytest.mark.parametrize("mode", MODES)
def test_the_synthesizer_names_every_node_and_prompts_as_the_stock_one_does(passive, mode):
    """But for simple_summarize, where the stock one shows the model a list's repr, escaped newlines and all."""
    synthesizer = RAGBlendSynthesizer(passive, mode)
    with recording() as recorder:
        synthesizer.synthesize(QUESTION, SCORED)
        passive.backend.engine.finish_background()
        answer = synthesizer.synthesize(QUESTION, SCORED)
    half = len(recorder.kv) // 2
    first, again = recorder.kv[:half], recorder.kv[half:]
    assert [node for kv in again for node in kv["chunks"]] == IDS
    assert sum(kv["misses"] for kv in first) == sum(kv["hits"] for kv in again) == 3
    assert len(passive.backend.registry) == 0
    assert [source.node.node_id for source in answer.source_nodes] == IDS
    assert str(answer)
    passive.remember(NODES)
    with recording() as stock:
        get_response_synthesizer(passive, response_mode=mode).synthesize(QUESTION, SCORED)
    ours, theirs = ([[m.content for m in end.messages] for end in each.ends] for each in (recorder, stock))
    if mode == "simple_summarize":
        assert "\\n\\n" in theirs[0][1]
        assert "\n\n".join(texts_of(NODES)) in ours[0][1]
    else:
        assert ours[half:] == theirs


async def test_the_synthesizer_streams_where_a_chat_engine_wants_it(make_llm):
    llm = make_llm(method="full")
    queries = RetrieverQueryEngine(SummaryIndex(nodes=NODES).as_retriever(), RAGBlendSynthesizer(llm))
    history = [ChatMessage(QUESTION), ChatMessage("The harbour master.", role="assistant")]

    def engine():
        memory = ChatMemoryBuffer.from_defaults(token_limit=4000)
        return CondenseQuestionChatEngine.from_defaults(queries, llm=llm, memory=memory)

    whole = engine().chat("Where were they?", chat_history=history)
    streamed = engine().stream_chat("Where were they?", chat_history=history)
    assert "".join(streamed.response_gen) == whole.response
    stream = await engine().astream_chat("Where were they?", chat_history=history)
    assert "".join([piece async for piece in stream.async_response_gen()]) == whole.response
    assert engine().chat("Where were they?", chat_history=history).response == whole.response


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize"])
async def test_the_synthesizer_gives_objects_of_a_class(make_llm, mode):
    synthesizer = RAGBlendSynthesizer(make_llm(max_new_tokens=50, method="full"), mode, output_cls=Ledger)
    found = synthesizer.synthesize(QUESTION, SCORED).response
    assert isinstance(found, Ledger)
    assert (await synthesizer.asynthesize(QUESTION, SCORED)).response == found


# --- registered on the way


def test_the_postprocessor_registers_what_it_is_given(passive):
    assert RegisterNodes(llm=passive).postprocess_nodes(SCORED, query_str=QUESTION) == SCORED
    assert len(passive.backend.registry) == 6  # with metadata and without
    assert asked(passive, NODES[1:2])["chunks"] == ["node-1"]


def test_metadata_that_contains_the_whole_text_is_an_alternative_text_of_the_node(llm):
    """A sentence's window, which replaces its text only after the retrieval was announced."""
    nodes = [
        TextNode(id_=f"s{n}", text=text[:40], metadata={"window": text}) for n, text in enumerate(STORIES)
    ]
    for node in nodes:
        node.excluded_llm_metadata_keys = node.excluded_embed_metadata_keys = ["window"]
    replace = MetadataReplacementPostProcessor(target_metadata_key="window")
    vector_index(nodes).as_query_engine(llm=llm, node_postprocessors=[replace]).query(QUESTION)
    windows = [f"s{n}{ALTERNATIVE_MARK}window" for n in range(3)]
    assert set(windows[:1]) < set(llm.last_stats["kv"]["chunks"]) < set(windows)


@pytest.mark.parametrize("is_async", [False, True])
def test_the_retriever_registers_and_prefetches_what_it_finds(passive, monkeypatch, is_async):
    prefetched, backend = [], type(passive.backend)
    original = backend.prefetch
    monkeypatch.setattr(backend, "prefetch", lambda self, p: prefetched.append(list(p)) or original(self, p))
    retriever = PrefetchingRetriever(vector_index().as_retriever(similarity_top_k=2), passive)
    found = asyncio.run(retriever.aretrieve(QUESTION)) if is_async else retriever.retrieve(QUESTION)
    assert [node.node_id for node in found] == [passage.node_id for passage in prefetched[0]]
    assert len(passive.backend.registry) == 4  # with metadata and without
    assert passive.backend.engine.finish_background(SOON_S)
    assert "loaded" in passive.backend.engine.runtime.__dict__


def test_registering_known_nodes_again_writes_nothing(passive):
    """It happens at every retrieval, also in an event loop."""
    nodes = [TextNode(id_=str(n), text=f"{n}: {STORIES[n % 3]}") for n in range(20)]
    passive.remember(nodes[:1])
    with closing(sqlite3.connect(Path(passive.home) / "nodes.sqlite")) as watching:
        # The version changes whenever another connection has written.
        versions = [watching.execute("PRAGMA data_version").fetchone()]
        for again in (nodes, nodes):
            passive.remember(again)
            versions.append(watching.execute("PRAGMA data_version").fetchone())
    assert versions[0] != versions[1] == versions[2]


# --- encoded ahead


def test_nodes_that_were_deleted_from_an_index_are_not_encoded_again(passive):
    """`delete_ref_doc` leaves them in the docstore, from where the next `encode_index` took them."""
    documents = [Document(text=text, id_=f"story-{n}") for n, text in enumerate(STORIES)]
    index = VectorStoreIndex.from_documents(documents, embed_model=HashEmbedding())
    assert encode_index(index, passive, show_progress=False) == 3
    deleted = index.ref_doc_info["story-0"].node_ids
    index.delete_ref_doc("story-0")
    passive.forget(deleted)
    index.update_ref_doc(Document(text=f"{STORIES[1]} So they say.", id_="story-1"))
    assert encode_index(index, passive, show_progress=False) == 2
    assert passive.backend.registry.find(STORIES[0]) == []
    assert sorted(node.text for node in nodes_of(index)) == sorted([f"{STORIES[1]} So they say.", STORIES[2]])
    for name in ("story-1", "story-2"):
        index.delete_ref_doc(name)
    assert encode_index(index, passive, show_progress=False) == 0


def test_an_indexs_nodes_include_parents_but_not_those_of_other_indexes():
    parser = HierarchicalNodeParser.from_defaults(chunk_sizes=[120, 60, 30])
    texts = [" ".join(STORIES), " ".join(reversed(STORIES))]
    nodes = parser.get_nodes_from_documents(
        [Document(text=text, id_=f"doc-{n}") for n, text in enumerate(texts)]
    )
    storage = StorageContext.from_defaults()
    storage.docstore.add_documents([*nodes, *NODES])
    ours = [node for node in nodes if node.ref_doc_id == "doc-1"]
    leaves = get_leaf_nodes(ours)
    index = VectorStoreIndex(leaves, storage_context=storage, embed_model=HashEmbedding())
    assert nodes_of(index) == ours
    assert len(ours) > len(leaves)


def test_nodes_are_encoded_while_they_are_ingested(passive):
    splitter = SentenceSplitter(chunk_size=60, chunk_overlap=0)
    pipeline = IngestionPipeline(transformations=[splitter, EncodeNodes(llm=passive)])
    nodes = pipeline.run(documents=[Document(text=" ".join(STORIES), id_="doc")])
    assert len(nodes) > 3
    assert len(passive.backend.registry) == len(nodes)
    assert asked(passive, nodes)["hits"] == len(nodes)
    assert asyncio.run(EncodeNodes(llm=passive).acall(nodes)) == nodes


# --- forgotten, cut, and read by another model


def test_forgetting_a_node_keeps_nodes_whose_ids_begin_with_its_own(passive):
    """`https://x.org/guide#bell` was taken for an alternative text of `https://x.org/guide`."""
    page, part = (
        TextNode(text=text, id_=name, metadata={"window": f"{text} So it is told."})
        for text, name in zip(STORIES, ("https://x.org/guide", "https://x.org/guide#bell"), strict=False)
    )
    passive.remember([page, part])
    assert len(passive.backend.registry) == 6
    passive.forget([page.node_id])
    assert passive.backend.registry.find(page.metadata["window"]) == []
    [found] = passive.backend.registry.find(part.text)
    assert found.node_id.startswith(part.node_id)
    assert len(passive.backend.registry) == 3


def test_an_index_that_another_model_encoded_is_encoded_again(make_llm, other_folder):
    """One home, two models: both find the texts, each has its own KV."""
    index = vector_index()
    encode_index(index, make_llm(), show_progress=False)
    other = make_llm(model=str(other_folder))
    engine = index.as_query_engine(llm=other, similarity_top_k=3)
    answer = str(engine.query(QUESTION))
    first = other.last_stats["kv"]
    assert (sorted(first["chunks"]), first["hits"], first["misses"]) == (IDS, 0, 3)
    assert other.backend.engine.finish_background()
    engine.query(QUESTION)
    assert (other.last_stats["kv"]["hits"], other.last_stats["kv"]["misses"]) == (3, 0)
    plain = make_llm(model=str(other_folder), method="full")
    assert str(index.as_query_engine(llm=plain, similarity_top_k=3).query(QUESTION)) == answer
