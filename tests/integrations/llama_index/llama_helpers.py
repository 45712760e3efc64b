"""Helpers of the LlamaIndex tests: documents, a deterministic embedding, a recorder of events, ways to call."""

import asyncio
import hashlib
from contextlib import contextmanager
from typing import Any

from llama_index.core.base.base_retriever import dispatcher
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMCompletionEndEvent
from llama_index.core.schema import TextNode

STORIES = [
    "The harbour master of Orrery kept two ledgers. In the first he wrote the names of the ships, the hour they came "
    "and what they carried; in the second, which nobody was shown, what the captains had paid him. Both were in the "
    "lamp room when the storm of the ninth of November broke the northern mole.",
    "Ilse Marrow drove the last tram of the old line. She kept the brass controller handle in a drawer, and her "
    "granddaughter gave it to the museum in 1987, together with a diary that names every passenger of that night "
    "and says which of them sang on the way to the fish market.",
    "Electricity came from the mill at Tarn weir. When the river was low the trams stood still, and the council paid "
    "the passengers' ferry fares out of a fund that was called the dry purse. It was emptied in the summer of 1921, "
    "which was the hottest that anybody in the lower town remembered.",
]


def story_nodes(stories=STORIES, prefix="node"):
    """Nodes with metadata, as readers make them: the model is shown the file's name above the text."""
    return [
        TextNode(id_=f"{prefix}-{i}", text=text, metadata={"file_name": f"{prefix}{i}.md", "page": i})
        for i, text in enumerate(stories)
    ]


class HashEmbedding(BaseEmbedding):
    """Words hashed into 64 buckets: deterministic, and texts that share words are near to each other."""

    def _get_text_embedding(self, text: str) -> list[float]:
        vector = [0.0] * 64
        for word in text.lower().split():
            vector[hashlib.sha256(word.strip(".,;?'").encode()).digest()[0] % 64] += 1.0
        length = sum(x * x for x in vector) ** 0.5 or 1.0
        return [x / length for x in vector]

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return self._get_text_embedding(query)


class Recorder(BaseEventHandler):
    """Records every event."""

    _events: list[Any] = PrivateAttr(default_factory=list)

    def handle(self, event: Any, **kwargs: Any) -> None:
        self._events.append(event)

    def named(self, *names: str) -> list[Any]:
        return [event for event in self._events if event.class_name() in names]

    @property
    def ends(self) -> list[Any]:
        """The ends of the LLM's calls, with the messages and the whole response."""
        return [e for e in self._events if isinstance(e, LLMChatEndEvent | LLMCompletionEndEvent)]

    @property
    def kv(self) -> list[dict[str, Any]]:
        return [event.response.raw["kv"] for event in self.ends]


@contextmanager
def recording():
    """A Recorder at the root of LlamaIndex's dispatchers."""
    recorder = Recorder()
    handlers = dispatcher.root.event_handlers
    handlers.append(recorder)
    try:
        yield recorder
    finally:
        handlers.remove(recorder)


def user(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


METHODS = [f"{prefix}{kind}" for kind in ("chat", "complete") for prefix in ("", "stream_", "a", "astream_")]


def call(llm: Any, method: str, text: str, /, **kwargs: Any) -> list[Any]:
    """All responses of any of the eight methods; those that do not stream give one."""
    asked = user(text) if method.endswith("chat") else text

    async def gather():
        answer = await getattr(llm, method)(asked, **kwargs)
        return [item async for item in answer] if "stream" in method else [answer]

    if method.startswith("a"):
        return asyncio.run(gather())
    answer = getattr(llm, method)(asked, **kwargs)
    return list(answer) if "stream" in method else [answer]


def text_of(response: Any) -> str:
    return response.text if hasattr(response, "text") else response.message.content
