"""LlamaIndex's own programs (benchmarks/programs_llama_index.py): what was retrieved is reused."""

import pytest
from llama_helpers import STORIES, HashEmbedding
from llama_index.core import Document
from programs import assert_half_is_reused

from benchmarks.programs_llama_index import PROGRAMS, LlamaIndexDocuments

# What the framework's own agent makes its context with.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
QUESTIONS = ("Who kept two ledgers?", "Who kept the two ledgers?", "And who kept two ledgers?")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_of_the_third_question_half_of_what_was_retrieved_comes_from_the_store(program, make_llm) -> None:
    """And what the program says is the engine's own answer to the same ids."""
    llm = make_llm()
    documents = [
        Document(text=text, metadata={"file_name": f"story{number}.md"})
        for number, text in enumerate(STORIES)
    ]
    library = LlamaIndexDocuments(documents, HashEmbedding(), chunk=256, overlap=0)
    assert_half_is_reused(program, llm, library, QUESTIONS)
