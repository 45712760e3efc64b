"""RAGBlend in LlamaIndex: swap the LLM, keep the application. Start with `RAGBlendLLM`."""

from ragblend.integrations.llama_index.embedding import RAGBlendEmbedding
from ragblend.integrations.llama_index.errors import ContextWindowError
from ragblend.integrations.llama_index.ingest import EncodeNodes, encode_index, encode_nodes
from ragblend.integrations.llama_index.llm import RAGBlendLLM
from ragblend.integrations.llama_index.packing import configure
from ragblend.integrations.llama_index.retrieval import PrefetchingRetriever, RegisterNodes
from ragblend.integrations.llama_index.synthesizer import RAGBlendSynthesizer

__all__ = [
    "ContextWindowError",
    "EncodeNodes",
    "PrefetchingRetriever",
    "RAGBlendEmbedding",
    "RAGBlendLLM",
    "RAGBlendSynthesizer",
    "RegisterNodes",
    "configure",
    "encode_index",
    "encode_nodes",
]
