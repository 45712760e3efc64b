"""LangChain's own programs (benchmarks/programs_langchain.py) reuse what was retrieved, by the third question."""

import pytest

pytest.importorskip("langchain", reason="langchain (the dev extra) is not installed")
pytest.importorskip("langchain_classic", reason="langchain-classic (the dev extra) is not installed")

from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from programs import assert_half_is_reused

from benchmarks.programs_langchain import PROGRAMS, LangChainDocuments, as_compression

pytestmark = pytest.mark.filterwarnings("ignore::langchain_core._api.LangChainDeprecationWarning")
QUESTIONS = ("What is the ringer paid in?", "Who keeps the tide table?", "What does the lamp burn?")


@pytest.fixture
def library(documents) -> LangChainDocuments:
    """Other texts than elsewhere: other tests' models are still alive, and register what is retrieved here."""
    own = [
        Document(
            f"From the parish book of Harrow Sound, as the sexton copied it. {each.page_content}",
            metadata=each.metadata,
        )
        for each in documents
    ]
    return LangChainDocuments(own, DeterministicFakeEmbedding(size=16), chunk=400, overlap=0, child=120)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_reuses_half_of_what_was_retrieved_by_the_third_question(
    program, make_tiny, library
) -> None:
    """And its answers are the engine's own to the same token ids."""
    assert_half_is_reused(program, make_tiny(), library, QUESTIONS)


def test_text_written_by_a_model_is_not_registered(make_tiny, library) -> None:
    llm = make_tiny(learn_from_prompts=False, max_tokens=40)  # longer than the shortest passage
    as_compression(llm, library)(QUESTIONS[0])
    assert len(library.found.texts) > len(library.documents)
    assert len(llm.backend.registry) == len(library.documents)
