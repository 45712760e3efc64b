"""RAGBlendLLM on a tiny model: the prompt as it is, documents found by their text or by `passages=`."""

import asyncio

import pytest
from langchain_core.exceptions import ContextOverflowError, ModelInvalidRequestError
from langchain_core.language_models import BaseLLM
from watching import Watcher, engine_answer

from ragblend.integrations.langchain import RAGBlendLLM, encode_documents


@pytest.fixture
def model(tiny_options):
    return RAGBlendLLM(**tiny_options, max_tokens=8)


def test_the_answer_is_the_engines_own(model, documents):
    encode_documents(documents, model, show_progress=False)
    text = f"Notes: {documents[2].page_content}\n\n{documents[0].page_content}\n\nWho?"
    expected = engine_answer(model.backend.engine, text, documents, max_new_tokens=8)
    result = model.generate([text])
    [[generation]] = result.generations
    assert isinstance(model, BaseLLM)
    assert model.invoke(text) == generation.text == expected.text
    assert generation.generation_info["kv"]["chunks"] == ["lamp", "tides"]
    assert generation.generation_info["kv"]["hits"] == 2
    assert result.llm_output["token_usage"]["prompt_tokens"] == len(expected.prompt.token_ids)
    assert result.llm_output["model_name"] == model.model


def test_all_ways_to_call_give_the_same(model):
    whole = model.invoke("hello")

    async def ways():
        watcher = Watcher()
        streamed = [piece async for piece in model.astream("hello", {"callbacks": [watcher]})]
        return await model.ainvoke("hello"), streamed, await model.abatch(["hello", "there"]), watcher

    awaited, streamed, batched, watcher = asyncio.run(ways())
    pieces = list(model.stream("hello"))
    assert awaited == "".join(streamed) == "".join(pieces) == batched[0] == whole
    assert len([piece for piece in pieces if piece]) > 3
    [seen] = watcher.calls
    assert "".join(seen.tokens) == whole
    assert len(seen.tokens) == len(streamed)
    assert seen.kv["fresh"] > 0
    assert model.batch(["hello", "there"]) == batched


def test_invoke_with_streaming_reports_every_piece_once(model, tiny_options):
    streaming = RAGBlendLLM(**tiny_options, max_tokens=8, streaming=True)
    for ask in (streaming.invoke, lambda *given: asyncio.run(streaming.ainvoke(*given))):
        watcher = Watcher()
        assert ask("hello", {"callbacks": [watcher]}) == model.invoke("hello")
        [seen] = watcher.calls
        assert "".join(seen.tokens) == seen.text == model.invoke("hello")
        assert len([token for token in seen.tokens if token]) > 3
    watcher = Watcher()
    model.invoke("hello", {"callbacks": [watcher]})
    assert not watcher.calls[0].tokens


def test_documents_named_in_the_call_are_found(model, documents):
    [[plain], [named]] = model.generate(
        ["one two three", f"{documents[1].page_content} Who?"], passages=documents
    ).generations
    assert plain.generation_info["kv"]["fresh"] == len(model.get_token_ids("one two three"))
    assert named.generation_info["kv"]["chunks"] == ["bell"]


def test_errors_are_langchains(model):
    with pytest.raises(ContextOverflowError):
        model.invoke("why " * 3000)
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.invoke("")
    for wrong in ({"temperature": -1}, {"max_tokens": 2.5}, {"timeout": "long"}, {"presence_penalty": 1}):
        with pytest.raises(ModelInvalidRequestError, match=next(iter(wrong)).removeprefix("max_")):
            list(model.stream("hello", **wrong))
