"""Records what the models of a chain were asked and reported, and asks the engine the same."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document

from ragblend import Chunk, Literal, Prompt
from ragblend.engine.prompts.segments import Message, Segment
from ragblend.engine.results import Result

ROLES = {"human": "user", "ai": "assistant", "system": "system", "tool": "tool"}


@dataclass
class Seen:
    """One call of a model: the messages or text, and what came back."""

    asked: Any
    text: str = ""
    kv: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    tokens: list[str] = field(default_factory=list)
    error: BaseException | None = None


class Watcher(BaseCallbackHandler):
    """A callback that records a `Seen` for every model call, in the order of their starts."""

    def __init__(self) -> None:
        self.seen: dict[Any, Seen] = {}
        self.retrieved: list[Document] = []

    def on_chat_model_start(self, serialized, messages, *, run_id, **kwargs) -> None:
        assert len(messages) == 1
        self.seen[run_id] = Seen(messages[0])

    def on_llm_start(self, serialized, prompts, *, run_id, **kwargs) -> None:
        assert len(prompts) == 1
        self.seen[run_id] = Seen(prompts[0])

    def on_llm_new_token(self, token, *, run_id, **kwargs) -> None:
        self.seen[run_id].tokens.append(token)

    def on_llm_end(self, response, *, run_id, **kwargs) -> None:
        [[generation]] = response.generations
        seen, message = self.seen[run_id], getattr(generation, "message", None)
        seen.text = generation.text
        metadata = generation.generation_info if message is None else message.response_metadata
        seen.kv = metadata.get("kv", {})  # none where a test answers for the model
        seen.usage = None if message is None else message.usage_metadata

    def on_llm_error(self, error, *, run_id, **kwargs) -> None:
        self.seen[run_id].error = error

    def on_retriever_end(self, documents, **kwargs) -> None:
        self.retrieved += documents

    @property
    def calls(self) -> list[Seen]:
        return list(self.seen.values())

    def share(self) -> tuple[int, int, int]:
        """The number of retrieved documents in prompts, of those that were found, and of those that were reused."""
        there = sum(
            plain_text(seen.asked).count(document.page_content)
            for seen in self.calls
            for document in {d.page_content: d for d in self.retrieved}.values()
        )
        reports = [seen.kv for seen in self.calls if seen.kv]
        return there, sum(len(kv["chunks"]) for kv in reports), sum(kv["hits"] for kv in reports)


def plain_text(asked: Any) -> str:
    return asked if isinstance(asked, str) else "\n".join(message.text for message in asked)


def engine_answer(engine: Any, asked: Any, documents: Sequence[Document], **options: Any) -> Result:
    """The engine's answer to what a chain asked, in a prompt that is made here, by plain search for the documents."""
    if isinstance(asked, str):
        prompt = Prompt(segments_of(asked, documents, verbatim=False))
    else:
        spoken = [m for m in asked if m.text or m.type != "ai"]  # a tool call alone is no turn
        prompt = engine.chat([Message(ROLES[m.type], tuple(segments_of(m.text, documents))) for m in spoken])
    return engine.generate(prompt, **options)


def segments_of(text: str, documents: Sequence[Document], verbatim: bool = True) -> list[Segment]:
    found = [(text.find(d.page_content), d) for d in documents if d.page_content in text]
    if not found:
        return [Literal(text, verbatim=verbatim)] if text else []
    at, first = min(found, key=lambda pair: pair[0])
    before, after = text[:at], text[at + len(first.page_content) :]
    middle = Chunk(first.page_content, first.id)
    return [
        *segments_of(before, [], verbatim),
        middle,
        *segments_of(after, documents, verbatim),
    ]
