"""Encodes passages before the first question: a whole index, or nodes as they are ingested."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.bridge.pydantic import SerializeAsAny
from llama_index.core.indices.base import BaseIndex
from llama_index.core.schema import BaseNode, TransformComponent

from ragblend.integrations.llama_index.llm import RAGBlendLLM
from ragblend.integrations.llama_index.nodes import alternative_passages_of, passages_of
from ragblend.kvstore.errors import UsageError


class EncodeNodes(TransformComponent):
    """An ingestion step that stores each node's KV and returns the nodes unchanged.

    Put it last: splitters and metadata extractors change the text of prompts.
    """

    llm: SerializeAsAny[RAGBlendLLM]
    show_progress: bool = False

    @classmethod
    def class_name(cls) -> str:
        return "EncodeNodes"

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        encode_nodes(nodes, self.llm, self.show_progress)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        return await asyncio.to_thread(self, nodes, **kwargs)


def encode_index(index: BaseIndex[Any], llm: RAGBlendLLM, show_progress: bool = True) -> int:
    """Store the KV of every node of an index; stored KV is skipped. Returns the number of passages.

    The nodes come from the index's docstore, or from a vector store with texts (Chroma). If it is interrupted, finished
    nodes stay. Raises UsageError for an index whose nodes cannot be listed.
    """
    return encode_nodes(nodes_of(index), llm, show_progress)


def encode_nodes(nodes: Sequence[BaseNode], llm: RAGBlendLLM, show_progress: bool = True) -> int:
    """Store the KV of a list of nodes, as `encode_index` does for an index."""
    llm.backend.remember(alternative_passages_of(nodes))
    return llm.backend.encode(passages_of(nodes), show_progress)


def nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """All nodes of an index, and their parents (for auto-merging), which are only in its docstore."""
    docstore_nodes, store = index.docstore.docs, getattr(index, "vector_store", None)
    if docstore_nodes:
        return _without_deleted(index, docstore_nodes)
    if store is None:
        return []
    try:
        return list(store.get_nodes(None))
    except (NotImplementedError, ValueError) as error:
        raise UsageError(
            f"the nodes of this index cannot be listed: its docstore is empty, and {type(store).__name__} does not "
            f"list what it holds ({error}); encode a list of nodes with `encode_nodes(nodes, llm)`"
        ) from error


def _without_deleted(index: BaseIndex[Any], docstore_nodes: Mapping[str, BaseNode]) -> list[BaseNode]:
    """Drop the nodes of deleted documents, which `delete_ref_doc` leaves in the docstore.

    Parents are not in the index, but belong to the same documents as their leaves. An index over a vector store with
    texts does not list its nodes by default.
    """
    listed = getattr(index.index_struct, "nodes_dict", None)
    stores_text = getattr(getattr(index, "vector_store", None), "stores_text", False)
    if listed is None or (stores_text and not getattr(index, "_store_nodes_override", False)):
        return list(docstore_nodes.values())
    documents = {
        docstore_nodes[node_id].ref_doc_id for node_id in listed.values() if node_id in docstore_nodes
    }
    return [node for node in docstore_nodes.values() if node.ref_doc_id in documents]
