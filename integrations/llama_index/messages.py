"""LlamaIndex's messages as turns, and prompts that remember which passages were put into them."""

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
from ragblend.integrations.backend import Turn, checked_turns
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
# A hint for hosted models' caches, what a reasoning model thought last time, and calls: none is sent back as text.
SILENT = (CachePoint, ThinkingBlock, ToolCallBlock)


class FilledMessages(list[ChatMessage]):
    """Messages that `LLM.predict` made from a template, with the passages that its caller said are in them.

    `predict` hands the list on to `chat` as it is, but drops every keyword argument: so the list carries them.
    """

    def __init__(self, messages: Sequence[ChatMessage], passages: Sequence[Passage]) -> None:
        super().__init__(messages)
        self.passages = tuple(passages)


class FilledText(str):
    """The same for a model without a chat template, for which `predict` makes a text.

    parts: as `Backend.text_prompt` wants them.
    """

    passages: tuple[Passage, ...] = ()
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str, passages: Sequence[Passage], parts: Sequence[str] = ()) -> "FilledText":
        filled = cls(text)
        filled.passages, filled.parts = tuple(passages), tuple(parts)
        return filled


def turns_of(messages: Sequence[ChatMessage]) -> list[Turn]:
    """Raises UsageError (a ValueError) for no message at all, and for content that is not text."""
    return checked_turns([_turn(message) for message in messages])


def _turn(message: ChatMessage) -> Turn:
    text, told = text_of(message), message.additional_kwargs
    made = [block for block in message.blocks if isinstance(block, ToolCallBlock)]
    calls = tuple(ToolCall(b.tool_name, arguments_of(b), b.tool_call_id or "") for b in made)
    pieces = (text,) if text else ()
    return Turn(ROLES[message.role], pieces, calls, told.get("tool_call_id"), told.get("name"))


def arguments_of(block: ToolCallBlock) -> dict[str, Any]:
    """A dictionary, or its JSON."""
    given = block.tool_kwargs
    try:
        found = json.loads(given or "{}") if isinstance(given, str) else given
    except ValueError as error:
        raise UsageError(
            f"the arguments of a call of {block.tool_name} are no JSON: {given!r:.200}"
        ) from error
    return dict(found)


def with_text(message: ChatMessage, text: str) -> ChatMessage:
    """The same message with that text in the place of all its blocks."""
    return message.model_copy(update={"blocks": [TextBlock(text=text)]})


def text_of(message: ChatMessage) -> str:
    """A message's text blocks, joined as `ChatMessage.content` joins them."""
    blocks = [block for block in message.blocks if not isinstance(block, SILENT)]
    return "\n".join(_text(block) for block in blocks)


def _text(block: ContentBlock) -> str:
    if isinstance(block, TextBlock):
        return block.text
    raise UsageError(
        f"RAGBlendLLM reads text only, and a message holds a block of the kind {block.block_type!r}; "
        "put its text into a TextBlock, or use a model that reads such content"
    )
