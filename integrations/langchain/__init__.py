"""RAGBlend in LangChain: a chat model, a text model, a retriever and a chain that reuse their documents' KV.

Start with `ChatRAGBlend`: it replaces any chat model, and finds the documents in its prompts.
"""

from ragblend.integrations.langchain.chains import create_ragblend_stuff_documents_chain
from ragblend.integrations.langchain.chat_models import ChatRAGBlend
from ragblend.integrations.langchain.documents import encode_documents
from ragblend.integrations.langchain.embeddings import RAGBlendEmbeddings
from ragblend.integrations.langchain.llms import RAGBlendLLM
from ragblend.integrations.langchain.retrievers import RAGBlendRetriever

__all__ = [
    "ChatRAGBlend",
    "RAGBlendEmbeddings",
    "RAGBlendLLM",
    "RAGBlendRetriever",
    "create_ragblend_stuff_documents_chain",
    "encode_documents",
]
