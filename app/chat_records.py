"""What is kept of a conversation, and how it is written out for programs and for people."""

from dataclasses import dataclass, field
from typing import Any, Literal

from ragblend.app.citations import SourceRow

Role = Literal["user", "assistant"]


@dataclass(frozen=True)
class Chat:
    """One conversation; messages counts them."""

    id: int
    title: str
    created_at: str
    updated_at: str
    messages: int


@dataclass(frozen=True)
class Message:
    """One turn of one side. report: what the answer cost (`hood.Hood.to_json`), notices, errors; {} for questions."""

    id: int
    chat_id: int
    role: Role
    text: str
    created_at: str
    sources: tuple[SourceRow, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """For programs: all but its numbers in this home."""
        return {
            "role": self.role,
            "text": self.text,
            "created_at": self.created_at,
            "sources": [source.to_json() for source in self.sources],
            "report": self.report,
        }

    def to_markdown(self) -> str:
        """For people: a heading, the text, notices, numbered sources."""
        parts = [f"## {'Question' if self.role == 'user' else 'Answer'}", self.text.strip()]
        notices = [str(self.report[key]) for key in ("notice", "error") if self.report.get(key)]
        parts += [f"> {notice}" for notice in notices]
        if self.sources:
            parts.append("\n".join(_source_line(source) for source in self.sources))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class ChatPage:
    """Some conversations, and how many there are in all."""

    chats: tuple[Chat, ...]
    total: int


@dataclass(frozen=True)
class FoundChat:
    """A conversation that a search found, and the first place where it did."""

    chat: Chat
    snippet: str


def _source_line(source: SourceRow) -> str:
    place = f", {source.location}" if source.location else ""
    return f"- [{source.number}] {source.document}{place} (similarity {source.score:.2f})"
