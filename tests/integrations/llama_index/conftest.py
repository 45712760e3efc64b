"""LLMs on private homes, on the tiny model."""

import pytest
from llama_index.core import Settings
from transformers.utils import logging as transformers_logging

from ragblend.integrations.llama_index import RAGBlendLLM
from ragblend.integrations.llama_index.listener import LIVE_MODELS

transformers_logging.disable_progress_bar()


@pytest.fixture
def make_llm(place):
    """RAGBlendLLMs on the tiny model, in float32, all on one empty home unless told."""
    yield lambda **options: RAGBlendLLM(**place | {"max_new_tokens": 8} | options)
    LIVE_MODELS.models.clear()  # an LLM that is still alive would go on learning from the next test's retrievals


@pytest.fixture
def llm(make_llm):
    return make_llm()


@pytest.fixture
def settings():
    """LlamaIndex's global settings, as they were before the test."""
    names = ("_llm", "_embed_model", "_prompt_helper", "_chat_prompt_helper", "_callback_manager")
    before = {name: getattr(Settings, name) for name in names}
    yield Settings
    for name, value in before.items():
        setattr(Settings, name, value)
