"""Turns LangChain's messages into chat turns: text, and the passages that content blocks and artifacts name."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from ragblend.engine.prompts.segments import ToolCall
from ragblend.integrations.backend import ChatTurn, drop_empty_turns
from ragblend.integrations.langchain.documents import is_stored_document, passages_of, stripped_passage
from ragblend.integrations.passages import Passage
from ragblend.integrations.resolve import Piece
from ragblend.kvstore.errors import UsageError

ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "tool"}
CHAT_ROLES = {"developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"} | ROLES
AUTOMATIC_ID_PREFIX = "lc_"  # of ids that LangChain's block constructors generate
# Blocks of an assistant's message that are not sent back as text.
NOT_TEXT = {
    "reasoning",
    "thinking",
    "redacted_thinking",
    "refusal",
    "tool_call",
    "tool_use",
    "invalid_tool_call",
}


def turns_of(messages: Sequence[BaseMessage]) -> list[ChatTurn]:
    """A turn for every non-empty message. Raises UsageError for content that the model does not support."""
    return drop_empty_turns([_turn(message) for message in messages])


def _turn(message: BaseMessage) -> ChatTurn:
    role, pieces = _role(message), tuple(_pieces(message))
    if isinstance(message, ToolMessage):
        return ChatTurn(role, pieces, (), message.tool_call_id, message.name)
    calls = message.tool_calls if isinstance(message, AIMessage) else []
    return ChatTurn(role, pieces, tuple(ToolCall(c["name"], c["args"], c["id"] or "") for c in calls))


def artifact_passages(messages: Sequence[BaseMessage]) -> list[Passage]:
    """Passages of the documents in tools' artifacts, which may also hold other objects."""
    found: list[Document | Mapping[str, Any]] = []
    for message in messages:
        artifact = getattr(message, "artifact", None)
        items: Sequence[Any] = artifact if isinstance(artifact, list | tuple) else [artifact]
        found += [item for item in items if isinstance(item, Document) or is_stored_document(item)]
    return passages_of(found)


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        name, known = message.role, CHAT_ROLES
    else:
        name, known = message.type.removesuffix("MessageChunk").lower(), ROLES
    if name not in known:
        raise UsageError(
            f"messages of the type {name!r} are not supported; the types are {', '.join(sorted(known))}"
        )
    return known[name]


def _pieces(message: BaseMessage) -> list[Piece]:
    """The message's text; every content block with its own id is a passage, except an assistant's, whose ids are not
    documents'.
    """
    is_assistant = isinstance(message, AIMessage)
    blocks = [message.content] if isinstance(message.content, str) else message.content
    return [piece for block in blocks for piece in _block_pieces(block, is_assistant) if piece]


def _block_pieces(block: str | dict[str, Any], is_assistant: bool) -> list[Piece]:
    if isinstance(block, str):
        return [block]
    kind, text = block.get("type"), block.get("text")
    if is_assistant and kind in NOT_TEXT:
        return []
    if kind not in ("text", "text-plain") or not isinstance(text, str):
        raise UsageError(
            f"a content block of the type {kind!r} cannot be read: this model reads text only; remove the block, or "
            "describe its content in words"
        )
    node_id = block.get("id")
    if is_assistant or not node_id or str(node_id).startswith(AUTOMATIC_ID_PREFIX):
        return [text]
    return _as_passage(text, str(node_id))


def _as_passage(text: str, node_id: str) -> list[Piece]:
    """The whole text as a passage; white space around it stays text."""
    found = stripped_passage(text, node_id)
    if found is None:
        return [text]
    before, _, after = text.partition(found.text)
    return [before, found, after]
