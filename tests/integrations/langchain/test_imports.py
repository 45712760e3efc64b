"""The adapter brings in its own framework and no other, and no model's library; ragblend brings in nothing."""

import subprocess
import sys

OTHERS = {
    "llama_index",
    "langchain",
    "langchain_classic",
    "langchain_chroma",
    "chromadb",
    "gradio",
    "sentence_transformers",
    "torch",
    "transformers",
}


def loaded_after(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=True
    )
    return set(done.stdout.split())


def test_importing_and_constructing_load_only_langchain_core():
    loaded = loaded_after(
        "from ragblend.integrations.langchain import *\n"
        "ChatRAGBlend(home='nowhere', max_tokens=4); RAGBlendLLM(model='nothing')"
    )
    assert "langchain_core" in loaded
    assert loaded & OTHERS == set()


def test_ragblend_itself_loads_no_framework():
    assert loaded_after("import ragblend") & (OTHERS | {"langchain_core", "numpy", "pydantic"}) == set()
