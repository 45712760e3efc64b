"""Registers the nodes that LlamaIndex's retrievers find, so that an application changes only the LLM.

Every retriever emits its nodes (`RetrievalEndEvent`) before anything is synthesized; one handler at the root of
LlamaIndex's dispatchers registers them with all living LLMs.
"""

from typing import Any

from llama_index.core.base.base_retriever import dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from ragblend.integrations.llama_index.nodes import alternative_passages_of, passages_of
from ragblend.integrations.parameters import LiveModels


class RetrievalListener(BaseEventHandler):
    """Registers what retrievers find."""

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendRetrievalListener"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            LIVE_MODELS.register([*passages_of(event.nodes), *alternative_passages_of(event.nodes)])


LIVE_MODELS = LiveModels(lambda: dispatcher.root.add_event_handler(RetrievalListener()))
