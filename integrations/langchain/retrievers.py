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
    """The most documents; None: as many as the wrapped retriever returns, or 4 from a vector store."""
    prefetch: bool = True
    """Whether to load the model and the documents' KV while the prompt is being made."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.retriever is None) == (self.vectorstore is None):
            raise ValueError("pass either retriever= or vectorstore=, and not both")
        return self

    def _get_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        limit = self._checked_k(k)
        config: Any = {"callbacks": run_manager.get_child()}
        found = self._wrapped.invoke(query, config, **self._arguments(limit, kwargs))[:limit]
        self._register_and_prefetch(found)
        return found

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, k: int | None = None, **kwargs: Any
    ) -> list[Document]:
        limit = self._checked_k(k)
        config: Any = {"callbacks": run_manager.get_child()}
        found = (await self._wrapped.ainvoke(query, config, **self._arguments(limit, kwargs)))[:limit]
        await asyncio.to_thread(self._register_and_prefetch, found)
        return found

    @property
    def _wrapped(self) -> Runnable[str, list[Document]]:
        if self.vectorstore is not None:
            return self.vectorstore.as_retriever(search_kwargs={"k": DEFAULT_K, **self.search_kwargs})
        assert self.retriever is not None, "there is exactly one source"
        return self.retriever

    def _checked_k(self, k: int | None) -> int | None:
        """The call's `k`, or else the retriever's. Raises ValueError if it is below 1."""
        if k is not None and k < 1:
            raise ValueError(f"k must be at least 1, not {k}")
        return self.k if k is None else k

    def _arguments(self, limit: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Pass `k` to retrievers that take it; other retrievers' results are cut."""
        wrapped = self._wrapped
        takes_k = isinstance(wrapped, VectorStoreRetriever) or (
            isinstance(wrapped, BaseRetriever)
            and "k" in inspect.signature(wrapped._get_relevant_documents).parameters
        )
        return kwargs if limit is None or not takes_k else {**kwargs, "k": limit}

    def _register_and_prefetch(self, documents: list[Document]) -> None:
        passages = passages_of(documents)
        with langchain_errors():
            self.llm.backend.remember(passages)
            if self.prefetch:
                self.llm.backend.prefetch(passages)
