"""The bundled embedder for LangChain's vector stores; nothing is downloaded."""

from functools import cached_property

from langchain_core.embeddings import Embeddings

from ragblend.integrations.embeddings import Embedder


class RAGBlendEmbeddings(Embeddings):
    """all-MiniLM-L6-v2, offline, on the CPU; loaded on first use. One vector a text: the mean of its windows'."""

    @cached_property
    def _embedder(self) -> Embedder:
        return Embedder()

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return [vector.tolist() for vector in self._embedder.embed_means(texts)]

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]
