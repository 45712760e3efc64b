"""Each adapter imports its own framework only, and no model library; ragblend itself imports nothing."""

import subprocess
import sys

import pytest

MODELS = {"torch", "transformers", "sentence_transformers", "chromadb", "gradio"}
LANGCHAIN = {"langchain", "langchain_core", "langchain_classic", "langchain_chroma"}
LLAMA_INDEX = {"llama_index", "llama_index_instrumentation"}


@pytest.mark.parametrize(
    ("statement", "imported", "not_imported"),
    [
        ("import ragblend", set(), MODELS | LANGCHAIN | LLAMA_INDEX | {"numpy", "pydantic"}),
        ("import ragblend.integrations.parameters", set(), LANGCHAIN | LLAMA_INDEX),
        (
            "from ragblend.integrations.langchain import *\n"
            "ChatRAGBlend(home='nowhere', max_tokens=4); RAGBlendLLM(model='nothing')",
            {"langchain_core"},
            MODELS | LLAMA_INDEX | LANGCHAIN - {"langchain_core"},
        ),
        (
            "from ragblend.integrations.llama_index import *\n"
            "RAGBlendLLM(max_new_tokens=4, ratio=0.2); RAGBlendEmbedding()",
            {"llama_index"},
            MODELS | LANGCHAIN,
        ),
    ],
    ids=["ragblend", "what both share", "langchain", "llama_index"],
)
def test_importing_and_constructing_load_only_the_own_framework(statement, imported, not_imported):
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    loaded = set(done.stdout.split())
    assert imported <= loaded
    assert loaded & not_imported == set()
