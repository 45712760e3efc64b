"""LlamaIndex's messages as turns, and prompts that remember which passages were put into them."""

from collections.abc import Sequence

from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    ContentBlock,
    MessageRole,
    TextBlock,
    ThinkingBlock,
)

from ragblend.integrations.backend import Turn
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
# A hint for hosted models' caches, and what a reasoning model thought last time: neither is ever sent back as text.
SILENT = (CachePoint, ThinkingBlock)


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
    if not messages:
        raise UsageError("there is no message to answer: the list of messages is empty; give at least one")
    return [Turn(ROLES[message.role], (text_of(message),)) for message in messages]


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
