"""LangChain's own programs (benchmarks/programs_langchain.py): on the third question what was retrieved is reused."""

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
    """Texts of its own: other tests' models are still alive, and learn what is retrieved here."""
    own = [
        Document(
            f"From the parish book of Harrow Sound, as the sexton copied it. {each.page_content}",
            metadata=each.metadata,
        )
        for each in documents
    ]
    return LangChainDocuments(own, DeterministicFakeEmbedding(size=16), chunk=400, overlap=0, child=120)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_of_the_third_question_half_of_what_was_retrieved_comes_from_the_store(
    program, make_tiny, library
) -> None:
    """And what the program says is the engine's own answer to the same ids."""
    assert_half_is_reused(program, make_tiny(), library, QUESTIONS)


def test_what_a_model_wrote_is_no_document(make_tiny, library) -> None:
    llm = make_tiny(learn_from_prompts=False, max_tokens=40)  # longer than what is too short to be kept
    as_compression(llm, library)(QUESTIONS[0])
    assert len(library.found.texts) > len(library.documents)
    assert len(llm.backend.registry) == len(library.documents)
