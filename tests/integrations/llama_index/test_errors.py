"""Bad input: errors as LlamaIndex expects them, with advice."""

import pytest
from llama_index.core import SummaryIndex
from llama_index.core.base.llms.types import CachePoint, ChatMessage, TextBlock, ThinkingBlock
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.llms.mock import MockLLM
from llama_index.core.response_synthesizers import get_response_synthesizer

from ragblend.integrations.llama_index import (
    RAGBlendLLM,
    RAGBlendSynthesizer,
    encode_index,
)
from ragblend.integrations.llama_index.messages import text_of
from ragblend.kvstore.errors import PromptTooLongError


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"context_window": 0}, "context_window"),
        ({"temprature": 1}, "did you mean 'temperature"),
        ({"device_map": "auto"}, "did you mean 'device"),
        ({"model": "a", "model_name": "b"}, "mean the same"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_given(options, word):
    with pytest.raises(ValidationError, match=word):
        RAGBlendLLM(**options)


def test_text_blocks_are_joined_and_hints_left_out():
    blocks = [
        ThinkingBlock(content="hm"),
        TextBlock(text="one"),
        CachePoint(cache_control={"type": "ephemeral"}),
        TextBlock(text="two"),
    ]
    message = ChatMessage(role="assistant", blocks=blocks)
    assert text_of(message) == message.content == "one\ntwo"


@pytest.mark.parametrize("mode", ["refine", "tree_summarize"])
def test_a_synthesizer_raises_it_instead_of_an_empty_response(llm, mode):
    """`Refine` takes every ValueError of the LLM for a badly formed answer, logs it and says "Empty Response"."""
    helper = get_response_synthesizer(MockLLM())._prompt_helper
    helper.context_window = 100_000
    for options in ({}, {"structured_answer_filtering": True}):
        synthesizer = get_response_synthesizer(llm, response_mode=mode, prompt_helper=helper, **options)
        with pytest.raises(PromptTooLongError, match="configure"):
            synthesizer.get_response("Who?", ["word " * 3000])


def test_the_synthesizer_refuses_other_llms_and_modes_without_passages(llm):
    with pytest.raises(ValueError, match="RAGBlendLLM, not with MockLLM"):
        RAGBlendSynthesizer(MockLLM())
    with pytest.raises(ValueError, match="there are compact"):
        RAGBlendSynthesizer(llm, "no_text")


def test_an_index_whose_nodes_cannot_be_listed_is_refused(llm):
    class Silent:
        def get_nodes(self, node_ids):
            raise NotImplementedError("get_nodes not implemented")

    index = SummaryIndex(nodes=[])
    index.vector_store = Silent()
    with pytest.raises(ValueError, match="encode_nodes"):
        encode_index(index, llm)
