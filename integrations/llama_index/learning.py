"""Learning passages from LlamaIndex's own events, so that swapping the LLM is all that an application has to change.

Every retriever announces what it found (`RetrievalEndEvent`) before anything is synthesized. One handler at the root of
LlamaIndex's dispatchers registers those nodes with the LLMs that asked for it. What is learnt is a fact about a text
(its hash and its node's id), not about a request: it cannot come out stale when streams interleave, as context
variables set by a handler do.
"""

import logging
import threading
import weakref
from typing import Any, Protocol

from llama_index.core.base.base_retriever import dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent

from ragblend.integrations.llama_index.nodes import Nodes

log = logging.getLogger("ragblend")


class Learner(Protocol):
    """Something that remembers nodes."""

    def remember(self, nodes: Nodes, encode: bool = False) -> None: ...


_learners: "weakref.WeakValueDictionary[int, Learner]" = weakref.WeakValueDictionary()
_guard = threading.Lock()


class RetrievalListener(BaseEventHandler):
    """Registers what retrievers find, with every learner that is alive."""

    @classmethod
    def class_name(cls) -> str:
        return "RAGBlendRetrievalListener"

    def handle(self, event: Any, **kwargs: Any) -> None:
        if not isinstance(event, RetrievalEndEvent):
            return
        with _guard:
            learners = list(_learners.values())
        for learner in learners:
            try:
                learner.remember(event.nodes)
            except Exception:  # the dispatcher would swallow it in silence
                log.warning("retrieved nodes could not be registered; they will not be reused", exc_info=True)


def listen(learner: Learner) -> None:
    """Have it remember what is retrieved from now on, for as long as it lives."""
    root = dispatcher.root
    with _guard:
        _learners[id(learner)] = learner
        if not any(isinstance(handler, RetrievalListener) for handler in root.event_handlers):
            root.add_event_handler(RetrievalListener())
