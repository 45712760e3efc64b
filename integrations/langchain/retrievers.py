"""RAGBlendRetriever: wraps a retriever or vector store, and loads the found documents' KV in the background."""

import asyncio
import inspect
from typing import Any, Self

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langchain_core.vectorstores import VectorStore, VectorStoreRetriever
from pydantic import ConfigDict, Field, model_validator

from ragblend.integrations.langchain.chat_models import ChatRAGBlend
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.errors import langchain_errors
from ragblend.integrations.langchain.llms import RAGBlendLLM

DEFAULT_K = 4


class RAGBlendRetriever(BaseRetriever):
    """Wraps a retriever or vector store, and registers the found documents with `llm`.

    So they are found in its prompts, and their stored KV is prefetched.

    ```python
    retriever = RAGBlendRetriever(vectorstore=store, llm=llm, k=4)
    retriever = RAGBlendRetriever(retriever=any_other_retriever, llm=llm)
    retriever.invoke("Who built the bridge?", k=2)
    ```
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: ChatRAGBlend | RAGBlendLLM
    retriever: Runnable[str, list[Document]] | None = None
    vectorstore: VectorStore | None = None
    search_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More arguments for the vector store's search, such as `filter`."""
    k: int | None = Field(default=None, ge=1)
    """The most documents; None for as many as the retriever inside returns, or 4 of a vector store."""
    prefetch: bool = True
    """Whether to load the model and the documents' KV while the prompt is being made."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.retriever is None) == (self.vectorstore is None):
            raise ValueError("pass either retriever= or vectorstore=, so that there is one place to look")
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        wanted = self._wanted(k)
        config: Any = {"callbacks": run_manager.get_child()}
        found = self._inside.invoke(query, config, **self._arguments(wanted, kwargs))[:wanted]
        self._announce(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        wanted = self._wanted(k)
        config: Any = {"callbacks": run_manager.get_child()}
        found = (await self._inside.ainvoke(query, config, **self._arguments(wanted, kwargs)))[:wanted]
        await asyncio.to_thread(self._announce, found)
        return found

    @property
    def _inside(self) -> Runnable[str, list[Document]]:
        if self.vectorstore is not None:
            return self.vectorstore.as_retriever(search_kwargs={"k": DEFAULT_K, **self.search_kwargs})
        assert self.retriever is not None, "there is one source"
        return self.retriever

    def _wanted(self, k: int | None) -> int | None:
        if k is not None and k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return self.k if k is None else k

    def _arguments(self, wanted: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Pass `k` to retrievers that take it; other retrievers' results are cut."""
        inside = self._inside
        takes_it = isinstance(inside, VectorStoreRetriever) or (
            isinstance(inside, BaseRetriever)
            and "k" in inspect.signature(inside._get_relevant_documents).parameters
        )
        return kwargs if wanted is None or not takes_it else {**kwargs, "k": wanted}

    def _announce(self, documents: list[Document]) -> None:
        passages = passages_of(documents)
        with langchain_errors():
            self.llm.backend.remember(passages)
            if self.prefetch:
                self.llm.backend.prefetch(passages)
