"""The bundled embedder as LlamaIndex's `embed_model`: an index can be built offline."""

import asyncio
from typing import Any

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.bridge.pydantic import PrivateAttr

from ragblend.integrations.embeddings import BUNDLED, Embedder


class RAGBlendEmbedding(BaseEmbedding):
    """all-MiniLM-L6-v2, 384 dimensions, on the CPU; loaded on first use, nothing is downloaded.

    A text longer than the model's window has the mean of its windows' vectors. Raises ModelNotFoundError where the
    embedder's package is not installed.
    """

    model_name: str = BUNDLED
    _embedder: Embedder = PrivateAttr(default_factory=Embedder)

    def __init__(self, **data: Any) -> None:
        data.setdefault("embed_batch_size", 64)
        super().__init__(**data)

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embeddings([query])[0]

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._get_text_embeddings([text])[0]

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return [vector.tolist() for vector in self._embedder.embed_means(texts)]

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)
