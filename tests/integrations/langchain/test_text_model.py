"""RAGBlendLLM on a tiny model: the prompt as it is, documents found by their text or by `passages=`."""

import asyncio

import pytest
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
