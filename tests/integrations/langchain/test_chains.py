"""Stock chains with a real Chroma: the answers are the engine's own, and whole chunks are reused.

Shows what docs/frameworks.md says: all three retrieved documents are found in the prompts, and their KV is reused.
"""

import asyncio

import pytest

pytest.importorskip("langchain", reason="langchain (the dev extra) is not installed")
pytest.importorskip("langchain_classic", reason="langchain-classic (the dev extra) is not installed")

from chains import CHAT_CHAINS, TEXT_CHAINS
from programs import assert_all_is_reused

from benchmarks.reused_tokens import record_answers
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


def text_of(answer) -> str:
    return answer if isinstance(answer, str) else answer.get("answer", "")


@pytest.mark.parametrize(
    ("model", "name"),
    # The stock prompt that reduces texts is too long for the tiny model.
    [(ChatRAGBlend, name) for name in CHAT_CHAINS]
    + [(RAGBlendLLM, name) for name in TEXT_CHAINS if "reduce" not in name],
    indirect=["model"],
)
def test_a_stock_chain_reuses_its_documents(model, name, retriever, documents):
    """In a task for the text model, and for every other chain of the chat model."""
    chains = CHAT_CHAINS if isinstance(model, ChatRAGBlend) else TEXT_CHAINS
    chain = chains[name](model, retriever)
    with record_answers() as answers:
        if chains is TEXT_CHAINS or list(chains).index(name) % 2:
            asyncio.run(chain.ainvoke(QUESTION))
        else:
            chain.invoke(QUESTION)
    texts = [document.page_content for document in documents]
    assert_all_is_reused(model.backend.engine, answers, texts, max_new_tokens=8)


@pytest.mark.parametrize("name", ["LCEL", "create_retrieval_chain, ours inside"])
@pytest.mark.parametrize("model", [ChatRAGBlend], indirect=True)
def test_sync_async_and_streams_agree(model, name, retriever):
    chain = CHAT_CHAINS[name](model, retriever)

    async def ways():
        whole = await chain.ainvoke(QUESTION)
        return whole, [piece async for piece in chain.astream(QUESTION)]

    whole, (awaited, astreamed) = text_of(chain.invoke(QUESTION)), asyncio.run(ways())
    streamed = list(map(text_of, chain.stream(QUESTION)))
    assert text_of(awaited) == "".join(streamed) == "".join(map(text_of, astreamed)) == whole != ""
    assert len([piece for piece in streamed if piece]) > 1


@pytest.mark.parametrize("model", [ChatRAGBlend], indirect=True)
def test_a_chains_events_carry_pieces_documents_and_statistics(model, retriever, documents):
    chain = CHAT_CHAINS["create_retrieval_chain"](model, retriever)

    async def collect():
        return [event async for event in chain.astream_events(QUESTION, version="v2")]

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
