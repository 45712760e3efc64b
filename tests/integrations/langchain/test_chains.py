"""Stock chains on SmolLM2 with a real Chroma: the answers are the engine's own, and whole chunks are reused.

`SHARES` is the table in docs/frameworks.md: of the retrieved documents' places in prompts, those that were resolved and
whose stored KV was reused.
"""

import asyncio

import pytest

pytest.importorskip("langchain", reason="langchain (the dev extra) is not installed")
pytest.importorskip("langchain_classic", reason="langchain-classic (the dev extra) is not installed")

from chains import CHAT_CHAINS, TEXT_CHAINS, lcel, our_retrieval_chain, retrieval_chain
from watching import Watcher, engine_answer

from ragblend.integrations.langchain import RAGBlendLLM

pytestmark = [
    pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The a?apply_and_parse method is deprecated"),
]
QUESTION = {"input": "What is the ringer of the bell paid in?"}
# Places of documents in the prompts of one question on three documents; every one is resolved and reused.
SHARES = dict.fromkeys(CHAT_CHAINS, 3)


@pytest.fixture(scope="module")
def text_model(smollm2):
    return RAGBlendLLM(home=smollm2.home, device="cpu", max_tokens=8)


@pytest.fixture(scope="module")
def retriever(store):
    """A stock one: nothing of ours but the model."""
    return store.as_retriever(search_kwargs={"k": 3})


def asks_as_the_engine(watcher: Watcher, model, documents) -> None:
    engine = model.backend().engine
    answered = [seen for seen in watcher.calls if seen.kv]
    assert answered
    for seen in answered:
        expected = engine_answer(engine, seen.asked, documents, max_new_tokens=8)
        assert seen.text == expected.text
        assert seen.kv["chunks"] == [chunk.node_id for chunk in expected.prompt.chunks]


@pytest.mark.parametrize("name", CHAT_CHAINS)
def test_a_stock_chain(name, smollm2, retriever, documents, watcher):
    CHAT_CHAINS[name](smollm2, retriever).invoke(QUESTION, {"callbacks": [watcher]})
    assert len(watcher.retrieved) == 3
    assert watcher.share() == (SHARES[name],) * 3
    asks_as_the_engine(watcher, smollm2, documents)


@pytest.mark.parametrize("name", CHAT_CHAINS)
def test_a_stock_chain_in_a_task(name, smollm2, retriever, documents, watcher):
    asyncio.run(CHAT_CHAINS[name](smollm2, retriever).ainvoke(QUESTION, {"callbacks": [watcher]}))
    assert watcher.share() == (SHARES[name],) * 3
    asks_as_the_engine(watcher, smollm2, documents)


@pytest.mark.parametrize("name", TEXT_CHAINS)
def test_a_stock_chain_on_the_text_model(name, text_model, retriever, documents, watcher):
    TEXT_CHAINS[name](text_model, retriever).invoke(QUESTION, {"callbacks": [watcher]})
    assert watcher.share() == (3, 3, 3)
    asks_as_the_engine(watcher, text_model, documents)


def test_a_chains_events_carry_the_pieces_the_documents_and_what_was_reused(smollm2, retriever, documents):
    async def heard():
        return [
            event
            async for event in retrieval_chain(smollm2, retriever).astream_events(QUESTION, version="v2")
        ]

    events = asyncio.run(heard())
    pieces = [event["data"]["chunk"] for event in events if event["event"] == "on_chat_model_stream"]
    [ended] = [event["data"]["output"] for event in events if event["event"] == "on_chat_model_end"]
    [found] = [event["data"]["output"] for event in events if event["event"] == "on_retriever_end"]
    assert "".join(piece.text for piece in pieces) == ended.text != ""
    assert len([piece for piece in pieces if piece.text]) > 1
    assert [bool(piece.response_metadata) for piece in pieces].count(True) == 1
    assert {document.id for document in found} == {document.id for document in documents}
    assert ended.response_metadata["kv"]["hits"] == 3
    assert ended.usage_metadata["input_token_details"]["cache_read"] > 0


@pytest.mark.parametrize("make", [lcel, retrieval_chain, our_retrieval_chain], ids=lambda make: make.__name__)
def test_sync_async_and_streams_agree(make, smollm2, retriever, watcher):
    chain = make(smollm2, retriever)
    config = {"callbacks": [watcher]}

    async def ways():
        whole = await chain.ainvoke(QUESTION, config)
        return whole, [piece async for piece in chain.astream(QUESTION, config)]

    def text(answer) -> str:
        return answer if isinstance(answer, str) else answer["answer"]

    def pieces(parts) -> list[str]:
        return [part if isinstance(part, str) else part.get("answer", "") for part in parts]

    whole, (awaited, astreamed) = text(chain.invoke(QUESTION, config)), asyncio.run(ways())
    streamed = pieces(chain.stream(QUESTION, config))
    assert text(awaited) == "".join(streamed) == "".join(pieces(astreamed)) == whole != ""
    assert len([piece for piece in streamed if piece]) > 1
    assert [seen.kv["hits"] for seen in watcher.calls] == [3] * 4
