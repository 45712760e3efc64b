"""Importing loads only what was asked for, and lets OpenMP's threads sleep before torch is loaded."""

import os
import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "sentence_transformers", "chromadb", "gradio", "llama_index"}
HEAVY |= {"langchain", "langchain_core", "langchain_classic", "langchain_chroma"}
NAMES = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"
LIGHT_MODULES = "ragblend.kvstore.sqlite, ragblend.integrations.passages, ragblend.kvstore.policy"
LANGCHAIN = (
    "from ragblend.integrations.langchain import *\n"
    "ChatRAGBlend(home='nowhere', max_tokens=4); RAGBlendLLM(model='nothing')"
)
LLAMA_INDEX = (
    "from ragblend.integrations.llama_index import *\n"
    "RAGBlendLLM(max_new_tokens=4, ratio=0.2); RAGBlendEmbedding()"
)
SEARCH = (
    "from ragblend.app.workspace import Workspace; from ragblend.app.answering import conversation\n"
    "from ragblend.app.answering.retrieval import search\n"
    "assert Workspace.open('home').reranker is None and search([], 'x', 3) == []"
)


@pytest.mark.parametrize(
    ("statement", "loads", "loads_not", "policy"),
    [
        ("import ragblend", set(), HEAVY | {"numpy", "pydantic"}, None),
        ("import ragblend.app.cli.main", {"typer"}, HEAVY | {"numpy", "sqlite3", "rich"}, "PASSIVE"),
        (LANGCHAIN, {"langchain_core"}, HEAVY - {"langchain_core"}, "PASSIVE"),
        (LLAMA_INDEX, {"llama_index"}, HEAVY - {"llama_index"}, "PASSIVE"),
        ("from ragblend import Engine", {"torch"}, HEAVY - {"torch", "transformers"}, "PASSIVE"),
        # torch has read the variables by then.
        ("import torch; from ragblend import Engine", {"torch"}, set(), None),
        (f"import {LIGHT_MODULES}", set(), {"torch"}, None),
        (SEARCH, set(), {"torch", "transformers", "ragblend.app.answering.rerank"}, "PASSIVE"),
        # Gradio and the hub's library read the environment when they are imported.
        ("import ragblend.ui.serving", set(), {"gradio", "huggingface_hub"}, "PASSIVE"),
    ],
    ids=["ragblend", "command line", "langchain", "llama_index", "engine", "torch first", "light", "search", "page"],
)  # fmt: skip
def test_importing_loads_nothing_before_it_is_asked_for(tmp_path, statement, loads, loads_not, policy):
    """And a program that imports the engine has threads that sleep: on a busy CPU a framework's first token took 82 s
    instead of 4.5.
    """
    code = f"import os, sys\n{statement}\nprint(os.environ.get('OMP_WAIT_POLICY'), *sys.modules)"
    program = [sys.executable, "-c", code]
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        program, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found, *loaded = done.stdout.split()
    assert loads <= set(loaded)
    assert loads_not & set(loaded) == set()
    assert found == str(policy)
