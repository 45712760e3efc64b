"""The adapter brings in its own framework and no other, and ragblend brings in none."""

import subprocess
import sys

import pytest

OTHERS = {
    "llama_index",
    "langchain",
    "langchain_classic",
    "langchain_chroma",
    "chromadb",
    "gradio",
    "transformers",
}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import ragblend.integrations.langchain",
        "from ragblend.integrations.langchain import *\n"
        "ChatRAGBlend(home='nowhere', max_tokens=4); RAGBlendLLM(model='nothing')",
    ],
    ids=["importing", "constructing"],
)
def test_only_langchain_core_is_loaded(statement):
    loaded = loaded_after(statement)
    assert "langchain_core" in loaded
    assert loaded & OTHERS == set()


def test_ragblend_itself_loads_no_framework():
    assert loaded_after("import ragblend") & (OTHERS | {"langchain_core", "torch"}) == set()
