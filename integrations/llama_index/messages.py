"""Turns LlamaIndex's messages into chat turns, and lets rendered templates carry their passages."""

import json
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)

from ragblend.engine.prompts.segments import ToolCall
from ragblend.integrations.backend import ChatTurn, drop_empty_turns
from ragblend.integrations.passages import Passage
from ragblend.kvstore.errors import UsageError

ROLES = {
    MessageRole.SYSTEM: "system",
    MessageRole.DEVELOPER: "system",
    MessageRole.USER: "user",
    MessageRole.ASSISTANT: "assistant",
    MessageRole.CHATBOT: "assistant",
    MessageRole.MODEL: "assistant",
    MessageRole.TOOL: "tool",
    MessageRole.FUNCTION: "tool",
}
# A hint for hosted models' caches, earlier reasoning, and calls: none is sent back as text.
NOT_TEXT = (CachePoint, ThinkingBlock, ToolCallBlock)


class FilledMessages(list[ChatMessage]):
    """Messages that `LLM.predict` rendered from a template, with the passages that its caller named.

    `predict` passes this list to `chat`, but drops all keyword arguments, so the list carries the passages.
    """

    def __init__(self, messages: Sequence[ChatMessage], passages: Sequence[Passage]) -> None:
        super().__init__(messages)
        self.passages = tuple(passages)


class FilledText(str):
    """The same for a model without a chat template, for which `predict` makes a text.

    parts: as in `Backend.text_prompt`.
    """

    passages: tuple[Passage, ...] = ()
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, passages: Sequence[Passage], parts: Sequence[str]) -> "FilledText":
        filled = cls(text)
        filled.passages, filled.parts = tuple(passages), tuple(parts)
        return filled


def turns_of(messages: Sequence[ChatMessage]) -> list[ChatTurn]:
    """The messages as turns. Raises UsageError (a ValueError) if there is none, and for content that is not text."""
    return drop_empty_turns([_turn(message) for message in messages])


def _turn(message: ChatMessage) -> ChatTurn:
    text, more = text_of(message), message.additional_kwargs
    blocks = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    calls = tuple(ToolCall(b.tool_name, arguments_of(b), b.tool_call_id or "") for b in blocks)
    pieces = (text,) if text else ()
    return ChatTurn(ROLES[message.role], pieces, calls, more.get("tool_call_id"), more.get("name"))


def arguments_of(block: ToolCallBlock) -> dict[str, Any]:
    """A call's arguments, which may be a dictionary or its JSON. Raises UsageError."""
    given = block.tool_kwargs
    try:
        found = json.loads(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(
            f"the arguments of a call of {block.tool_name} are not JSON: {given!r:.200}"
        ) from error
    return dict(found)


def text_of(message: ChatMessage) -> str:
    """A message's text blocks, joined as `ChatMessage.content` joins them."""
    blocks = [block for block in message.blocks if not isinstance(block, NOT_TEXT)]
    return "\n".join(_text(block) for block in blocks)


def _text(block: ContentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    raise UsageError(
        f"RAGBlendLLM reads text only, and a message holds a block of the kind {block.block_type!r}; "
        "put its text into a TextBlock, or use a model that reads such content"
    )
