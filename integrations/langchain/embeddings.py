"""The bundled embedder as LangChain's, so that a vector store works with nothing to download."""

from functools import cached_property

import numpy as np
from langchain_core.embeddings import Embeddings

from ragblend.integrations.embeddings import MiniLMEmbedder


class RAGBlendEmbeddings(Embeddings):
    """all-MiniLM-L6-v2, offline, on the CPU; loaded on first use. One vector a text: the mean of its windows'."""

    @cached_property
    def _embedder(self) -> MiniLMEmbedder:
        return MiniLMEmbedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        means = [windows.mean(axis=0) for windows in self._embedder.embed_passages(texts)]
        return [(mean / np.linalg.norm(mean)).tolist() for mean in means]

    def embed_query(self, text: str) -> list[float]:
        return [float(number) for number in self._embedder.embed_question(text)]
