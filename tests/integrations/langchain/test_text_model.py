"""RAGBlendLLM on a tiny model: the prompt as it is, documents found by their text or by `passages=`."""

import asyncio

import pytest
from watching import Watcher

from ragblend.integrations.langchain import RAGBlendLLM


@pytest.fixture
def model(tiny_options):
    return RAGBlendLLM(**tiny_options, max_tokens=8)


def test_generations_tell_of_each_prompt_and_counts_are_added_up(model, documents):
    texts = ["one two three", f"{documents[1].page_content} Who?"]
    result = model.generate(texts, passages=documents)
    [[plain], [named]] = result.generations
    assert plain.generation_info["kv"]["fresh"] == len(model.get_token_ids("one two three"))
    assert named.generation_info["kv"]["chunks"] == ["bell"]
    assert result.llm_output["token_usage"]["prompt_tokens"] == sum(map(len, map(model.get_token_ids, texts)))
    assert result.llm_output["model_name"] == model.model
    assert model.batch(texts) == asyncio.run(model.abatch(texts))
    with pytest.raises(ValueError, match="the prompt is empty"):
        model.invoke("")


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
