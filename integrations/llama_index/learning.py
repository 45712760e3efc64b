"""Learning passages from LlamaIndex's own events, so that swapping the LLM is all that an application has to change.

Every retriever announces what it found (`RetrievalEndEvent`) before anything is synthesized; one handler at the root of
LlamaIndex's dispatchers registers those nodes with the LLMs that are alive.
"""

from typing import Any

from llama_index.core.base.base_retriever import dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from ragblend.integrations.llama_index.nodes import further_passages_of, passages_of
from ragblend.integrations.parameters import Learners


class RetrievalListener(BaseEventHandler):
    """Registers what retrievers find."""

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendRetrievalListener"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            LEARNERS.learn([*passages_of(event.nodes), *further_passages_of(event.nodes)])


LEARNERS = Learners(lambda: dispatcher.root.add_event_handler(RetrievalListener()))
