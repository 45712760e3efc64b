"""RAGBlendRetriever around stores and retrievers, and documents that cannot be encoded."""

import asyncio

import pytest
from langchain_classic.retrievers import ContextualCompressionRetriever
from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from pydantic import ValidationError

from ragblend.integrations.langchain import RAGBlendRetriever, encode_documents
from ragblend.kvstore.errors import PromptError

QUESTION = "Who rings the bell?"


class Fixed(BaseRetriever):
    """A retriever without a number of documents."""

    documents: list[Document]

    def _get_relevant_documents(self, query, *, run_manager):
        return self.documents


class Filtered(BaseRetriever):
    """One with another argument, but no number."""

    documents: list[Document]

    def _get_relevant_documents(self, query, *, run_manager, filter=None):
        return self.documents


class Reranker(BaseDocumentCompressor):
    """Reverses the documents, and records how many it got."""

    shown: list[int]

    def compress_documents(self, documents, query, callbacks=None):
        self.shown.append(len(documents))
        return documents[::-1]


def asked(model, documents):
    """Chunks and hits of a prompt that holds the documents as plain text."""
    text = "\n\n".join(document.page_content for document in documents)
    kv = model.invoke(f"{text}\n\n{QUESTION}").response_metadata["kv"]
    return kv["chunks"], kv["hits"]


@pytest.mark.parametrize("kind", ["vectorstore", "retriever", "fixed", "runnable"])
def test_it_returns_the_inner_documents_and_registers_them(make_tiny, store, documents, kind):
    model = make_tiny(register_retrieved=False)
    assert asked(model, documents) == ([], 0)
    fixed = Fixed(documents=documents)
    inside = {
        "vectorstore": {"vectorstore": store},
        "retriever": {"retriever": store.as_retriever()},
        "fixed": {"retriever": fixed},
        "runnable": {"retriever": RunnableLambda(lambda query: documents)},
    }[kind]
    retriever = RAGBlendRetriever(llm=model, **inside)
    found = retriever.invoke(QUESTION)
    assert sorted(document.id for document in found) == ["bell", "lamp", "tides"]
    assert sorted(asked(model, documents)[0]) == ["bell", "lamp", "tides"]
    assert len(retriever.invoke(QUESTION, k=2)) == 2
    assert len(asyncio.run(retriever.ainvoke(QUESTION, k=1))) == 1
    assert len(RAGBlendRetriever(llm=model, k=1, **inside).invoke(QUESTION)) == 1


def test_an_inner_reranker_sees_more_documents_than_are_returned(make_tiny, store, documents):
    reranker = Reranker(shown=[])
    inside = ContextualCompressionRetriever(base_compressor=reranker, base_retriever=store.as_retriever())
    whole = inside.invoke(QUESTION)
    retriever = RAGBlendRetriever(llm=make_tiny(), retriever=inside, k=1)
    assert retriever.invoke(QUESTION) == whole[:1]
    assert retriever.invoke(QUESTION, k=2) == whole[:2]
    assert reranker.shown == [3, 3, 3]
    filtered = RAGBlendRetriever(llm=make_tiny(), retriever=Filtered(documents=documents), k=1)
    assert filtered.invoke(QUESTION) == documents[:1]


def test_stored_kv_is_prefetched(make_tiny, store, documents, monkeypatch):
    from ragblend.engine.engine import Engine

    announced = []
    ahead = Engine.prefetch
    monkeypatch.setattr(
        Engine, "prefetch", lambda engine, chunks: (announced.append(chunks), ahead(engine, chunks))
    )
    model = make_tiny()
    encode_documents(documents, model, show_progress=False)
    RAGBlendRetriever(llm=model, vectorstore=store, k=2).invoke(QUESTION)
    assert [len(chunks) for chunks in announced] == [2]
    assert {chunk.node_id for chunk in announced[0]} <= {"bell", "lamp", "tides"}
    RAGBlendRetriever(llm=model, vectorstore=store, prefetch=False).invoke(QUESTION)
    assert len(announced) == 1


def test_wrong_arguments_are_refused(make_tiny, store):
    model = make_tiny()
    for wrong in ({}, {"vectorstore": store, "retriever": store.as_retriever()}):
        with pytest.raises(ValidationError, match="not both"):
            RAGBlendRetriever(llm=model, **wrong)
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        RAGBlendRetriever(llm=model, vectorstore=store, k=0)
    with pytest.raises(ValueError, match="k must be at least 1"):
        RAGBlendRetriever(llm=model, vectorstore=store).invoke(QUESTION, k=0)


def test_documents_without_text_are_left_out_and_other_things_refused(make_tiny, documents):
    model = make_tiny()
    assert encode_documents([*documents, Document("  ")], model, show_progress=False) == 3
    with pytest.raises(ValueError, match="not int"):
        encode_documents([7], model, show_progress=False)


def test_a_text_with_half_a_surrogate_pair_is_refused_by_name(make_tiny):
    """It ended in a UnicodeEncodeError, or the tokenizer's TypeError."""
    with pytest.raises(PromptError, match="half of a surrogate pair"):
        encode_documents([Document("The mole \udcff was dredged.")], make_tiny(), show_progress=False)
