"""The adapter knows its own framework only, and the package knows none."""

import subprocess
import sys

import pytest


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{m.split('.')[0] for m in sys.modules}})))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=280
    )
    return set(done.stdout.split())


MODELS = {"torch", "transformers", "sentence_transformers"}


@pytest.mark.parametrize("made", ["", "; m.RAGBlendLLM(max_new_tokens=4, ratio=0.2); m.RAGBlendEmbedding()"])
def test_the_adapter_imports_no_langchain_and_no_library_of_models(made):
    found = modules_after(f"import ragblend.integrations.llama_index as m{made}")
    assert "llama_index" in found
    assert {name for name in found if name.startswith("lang")} == set()
    assert not found & (MODELS | {"chromadb", "gradio"})


@pytest.mark.parametrize("statement", ["import ragblend", "import ragblend.integrations.backend"])
def test_nothing_else_imports_llama_index(statement):
    assert not {"llama_index", "llama_index_instrumentation"} & modules_after(statement)
