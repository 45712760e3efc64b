"""LLMs on the tiny model, each test with its own home."""

import pytest
from llama_index.core import Settings
from transformers.utils import logging as transformers_logging

from ragblend.integrations.llama_index import RAGBlendLLM
from ragblend.integrations.llama_index.listener import LIVE_MODELS

transformers_logging.disable_progress_bar()


@pytest.fixture
def make_llm(place):
    """Makes RAGBlendLLMs on the tiny model, in float32, on one empty home by default."""
    yield lambda **options: RAGBlendLLM(**place | {"max_new_tokens": 8} | options)
    LIVE_MODELS.models.clear()  # a living LLM would register the next test's retrievals


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
