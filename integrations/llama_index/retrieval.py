"""Steps between retrieval and the prompt: one registers the retrieved nodes, one also prefetches their KV."""

import asyncio
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import SerializeAsAny
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts.mixin import PromptMixinType
from llama_index.core.schema import NodeWithScore, QueryBundle

from ragblend.integrations.llama_index.llm import RAGBlendLLM
from ragblend.integrations.llama_index.nodes import passages_of


class RegisterNodes(BaseNodePostprocessor):
    """A postprocessor that registers its nodes without changing them.

    Put it last, because the prompt contains the texts that other postprocessors make (a window around a sentence, a
    shorter text). Retrieved nodes are registered without it, by LlamaIndex's events.
    """

    llm: SerializeAsAny[RAGBlendLLM]

    @classmethod
    def class_name(cls) -> str:
        return "RegisterNodes"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        self.llm.remember(nodes)
        return nodes


class PrefetchingRetriever(BaseRetriever):
    """Wraps any retriever, and loads the stored KV of its nodes while the prompt is being made."""

    def __init__(self, retriever: BaseRetriever, llm: RAGBlendLLM, **options: Any) -> None:
        options.setdefault("callback_manager", getattr(retriever, "callback_manager", None))
        super().__init__(**options)
        self._retriever, self._llm = retriever, llm

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = self._retriever.retrieve(query_bundle)
        self._register_and_prefetch(nodes)
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = await self._retriever.aretrieve(query_bundle)
        await asyncio.to_thread(self._register_and_prefetch, nodes)
        return nodes

    def _register_and_prefetch(self, nodes: list[NodeWithScore]) -> None:
        self._llm.remember(nodes)
        self._llm.backend.prefetch(passages_of(nodes))

    def _get_prompt_modules(self) -> PromptMixinType:
        return {"retriever": self._retriever}
