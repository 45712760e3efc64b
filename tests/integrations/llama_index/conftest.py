"""LLMs on private homes, on a tiny random model or on the bundled one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode puts no folder of tests on the path
sys.path.insert(0, str(Path(__file__).parents[2] / "engine"))

import tiny_models
from llama_index.core import Settings
from transformers.utils import logging as transformers_logging

from ragblend.integrations.llama_index import RAGBlendLLM, learning

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_models.save_model("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="session")
def judged(tmp_path_factory):
    """Where the gate's verdict on the tiny model is kept, so that it is made once a session."""
    return tmp_path_factory.mktemp("judged")


@pytest.fixture
def make_llm(tiny_folder, judged, tmp_path):
    """RAGBlendLLMs on the tiny model, in float32, all on one empty home unless told."""
    made = []
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "models").symlink_to(judged, target_is_directory=True)

    def make(**options):
        plain = {
            "model": str(tiny_folder),
            "home": str(tmp_path / "home"),
            "device": "cpu",
            "dtype": "float32",
        }
        made.append(RAGBlendLLM(**(plain | {"max_new_tokens": 8} | options)))
        return made[-1]

    yield make
    for llm in made:
        if llm._backend is not None and "engine" in llm._backend.__dict__:
            llm.backend.engine.close()
        if llm._backend is not None and "registry" in llm._backend.__dict__:
            llm.backend.registry.close()
    learning._learners.clear()  # an LLM that is still alive would go on learning from the next test's retrievals


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
