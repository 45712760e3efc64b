"""LLMs on private homes, on a tiny random model or on the bundled one."""

import gc
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "engine")]  # importlib mode puts no folder of tests on the path

import tiny_models
from llama_index.core import Settings
from transformers.utils import logging as transformers_logging

from ragblend.integrations.llama_index import RAGBlendLLM

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def make_llm(tiny_folder, tmp_path):
    """RAGBlendLLMs on the tiny model, in float32, all on one empty home unless told."""
    made = []

    def make(**options):
        plain = {"model": str(tiny_folder), "home": str(tmp_path / "home"), "device": "cpu", "dtype": "float32"}
        made.append(RAGBlendLLM(**(plain | {"max_new_tokens": 8} | options)))
        return made[-1]

    yield make
    for llm in made:
        if llm._backend is not None and "engine" in llm._backend.__dict__:
            llm.backend.engine.close()
        if llm._backend is not None and "registry" in llm._backend.__dict__:
            llm.backend.registry.close()
    made.clear()
    gc.collect()  # an LLM that is still alive would go on learning from the next test's retrievals


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
