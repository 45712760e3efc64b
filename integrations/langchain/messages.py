"""From LangChain's messages to turns: text, and the passages that content blocks and artifacts name."""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, ToolMessage

from ragblend.engine.prompts.segments import ToolCall
from ragblend.integrations.backend import Turn, checked_turns
from ragblend.integrations.langchain.documents import passages_of, pieces_of
from ragblend.integrations.passages import Passage
from ragblend.integrations.resolve import Piece
from ragblend.kvstore.errors import UsageError

ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool", "function": "tool"}
CHAT_ROLES = {"developer": "system", "user": "user", "assistant": "assistant", "model": "assistant"} | ROLES
AUTOMATIC_ID = "lc_"  # what LangChain's own block constructors put where no id was given
# What an assistant's message may hold beside its words: shown to nobody again.
UNSPOKEN = {
    "reasoning",
    "thinking",
    "redacted_thinking",
    "refusal",
    "tool_call",
    "tool_use",
    "invalid_tool_call",
}


def turns_of(messages: Sequence[BaseMessage]) -> list[Turn]:
    """A turn for every message with something in it. Raises UsageError for what the model cannot read."""
    return checked_turns([_turn(message) for message in messages])


def _turn(message: BaseMessage) -> Turn:
    pieces = tuple(pieces_in(message))
    if isinstance(message, ToolMessage):
        return Turn(role_of(message), pieces, (), message.tool_call_id, message.name)
    made = message.tool_calls if isinstance(message, AIMessage) else []
    return Turn(role_of(message), pieces, tuple(ToolCall(c["name"], c["args"], c["id"] or "") for c in made))


def named_in(messages: Sequence[BaseMessage]) -> list[Passage]:
    """Passages of the documents that tools handed over as artifacts."""
    found = (getattr(message, "artifact", None) for message in messages)
    return [passage for artifact in found for passage in passages_of(_documents_in(artifact))]


def _documents_in(artifact: Any) -> list[Document | Mapping[str, Any]]:
    """Artifacts hold anything; what is no document is left alone."""
    items = artifact if isinstance(artifact, list | tuple) else [artifact]
    return [item for item in items if _is_document(item)]


def _is_document(item: Any) -> bool:
    return isinstance(item, Document) or (
        isinstance(item, Mapping) and isinstance(item.get("page_content"), str)
    )


def role_of(message: BaseMessage) -> str:
    name = (
        message.role
        if isinstance(message, ChatMessage)
        else message.type.removesuffix("MessageChunk").lower()
    )
    known = CHAT_ROLES if isinstance(message, ChatMessage) else ROLES
    if name not in known:
        raise UsageError(
            f"a message of the type {name!r} cannot be put to the model; there are {', '.join(sorted(known))}"
        )
    return known[name]


def pieces_in(message: BaseMessage) -> list[Piece]:
    """The message's text; every content block with an id of its own is a passage."""
    if isinstance(message.content, str):
        return [message.content] if message.content else []
    spoken = isinstance(message, AIMessage)
    return [piece for block in message.content for piece in _block_pieces(block, spoken)]


def _block_pieces(block: str | dict[str, Any], spoken: bool) -> list[Piece]:
    """spoken: by the assistant, whose blocks have ids that name no document."""
    if isinstance(block, str):
        return [block] if block else []
    kind = block.get("type")
    if spoken and kind in UNSPOKEN:
        return []
    if kind not in ("text", "text-plain") or not isinstance(block.get("text"), str):
        raise UsageError(
            f"a content block of the type {kind!r} cannot be read: this model reads text only; remove the block, or "
            "put what it shows in words"
        )
    node_id = block.get("id")
    if spoken or not node_id or str(node_id).startswith(AUTOMATIC_ID):
        return [block["text"]] if block["text"] else []
    return pieces_of(block["text"], str(node_id))
