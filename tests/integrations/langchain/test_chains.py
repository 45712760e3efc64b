"""Stock chains with a real Chroma: the answers are the engine's own, and whole chunks are reused.

Shows the table in docs/frameworks.md: all three retrieved documents are found in the prompts, and their KV is reused.
"""

import asyncio

import pytest

pytest.importorskip("langchain", reason="langchain (the dev extra) is not installed")
pytest.importorskip("langchain_classic", reason="langchain-classic (the dev extra) is not installed")

from chains import CHAT_CHAINS, TEXT_CHAINS
from watching import Watcher, engine_answer

from ragblend.integrations.langchain import ChatRAGBlend, RAGBlendLLM, encode_documents

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The a?apply_and_parse method is deprecated"),
]
QUESTION = {"input": "What is the ringer of the bell paid in?"}


@pytest.fixture(params=[ChatRAGBlend, RAGBlendLLM])
def model(request, tiny_options, documents):
    made = request.param(**tiny_options, max_tokens=8)
    encode_documents(documents, made, show_progress=False)
    return made


@pytest.fixture(scope="module")
def retriever(store):
    """A stock retriever: only the model is ours."""
    return store.as_retriever(search_kwargs={"k": 3})


def assert_answers_are_the_engines(watcher: Watcher, model, documents) -> None:
    assert watcher.share() == (3, 3, 3)
    answered = [seen for seen in watcher.calls if seen.kv]
    assert answered
    for seen in answered:
        expected = engine_answer(model.backend.engine, seen.asked, documents, max_new_tokens=8)
        assert seen.text == expected.text
        assert seen.kv["chunks"] == [chunk.node_id for chunk in expected.prompt.chunks]


@pytest.mark.parametrize(
    ("model", "name"),
    # The stock prompt that reduces texts is too long for the tiny model.
    [(ChatRAGBlend, name) for name in CHAT_CHAINS]
    + [(RAGBlendLLM, name) for name in TEXT_CHAINS if "reduce" not in name],
    indirect=["model"],
)
def test_a_stock_chain_reuses_its_documents(model, name, retriever, documents, watcher):
    """In a task for the text model, and for every other chain of the chat model."""
    chains, config = CHAT_CHAINS if isinstance(model, ChatRAGBlend) else TEXT_CHAINS, {"callbacks": [watcher]}
    chain = chains[name](model, retriever)
    if chains is TEXT_CHAINS or list(chains).index(name) % 2:
        asyncio.run(chain.ainvoke(QUESTION, config))
    else:
        chain.invoke(QUESTION, config)
    assert len(watcher.retrieved) == 3
    assert_answers_are_the_engines(watcher, model, documents)


@pytest.mark.parametrize("name", ["LCEL", "create_retrieval_chain, ours inside"])
@pytest.mark.parametrize("model", [ChatRAGBlend], indirect=True)
def test_sync_async_and_streams_agree(model, name, retriever, watcher):
    chain, config = CHAT_CHAINS[name](model, retriever), {"callbacks": [watcher]}

    async def ways():
        whole = await chain.ainvoke(QUESTION, config)
        return whole, [piece async for piece in chain.astream(QUESTION, config)]

    def text(answer) -> str:
        return answer if isinstance(answer, str) else answer.get("answer", "")

    whole, (awaited, astreamed) = text(chain.invoke(QUESTION, config)), asyncio.run(ways())
    streamed = [text(part) for part in chain.stream(QUESTION, config)]
    assert text(awaited) == "".join(streamed) == "".join(map(text, astreamed)) == whole != ""
    assert len([piece for piece in streamed if piece]) > 1
    assert [seen.kv["hits"] for seen in watcher.calls] == [3] * 4


@pytest.mark.parametrize("model", [ChatRAGBlend], indirect=True)
def test_a_chains_events_carry_pieces_documents_and_statistics(model, retriever, documents, watcher):
    chain = CHAT_CHAINS["create_retrieval_chain"](model, retriever)

    async def collect():
        stream = chain.astream_events(QUESTION, {"callbacks": [watcher]}, version="v2")
        return [event async for event in stream]

    events = asyncio.run(collect())
    pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    [ended] = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
    [found] = [event["data"]["output"] for event in events if event["event"] == "on_retriever_end"]
    assert "".join(piece.text for piece in pieces) == ended.text != ""
    assert len([piece for piece in pieces if piece.text]) > 1
    assert [bool(piece.response_metadata) for piece in pieces].count(True) == 1
    assert {document.id for document in found} == {document.id for document in documents}
    assert ended.response_metadata["kv"]["hits"] == 3
    assert ended.usage_metadata["input_token_details"]["cache_read"] > 0
    assert_answers_are_the_engines(watcher, model, documents)
