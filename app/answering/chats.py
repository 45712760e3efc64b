"""Stored conversations: titles, messages with their sources, the cost of answers. Deleting erases the bytes too."""

import json
import sqlite3
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.citations import with_marks
from ragblend.app.database import Database, folded, now, storable
from ragblend.kvstore.errors import LibraryError, UsageError

TITLE_CHARACTERS = 60
SNIPPET_CHARACTERS = 120
DELETED_TEXT = "(The document was deleted, or changed: this passage is no longer in the library.)"
KnownNodes = Callable[[Sequence[str]], Container[str]]  # returns the given node ids that are in the library
UNFINISHED = "unfinished"  # a key in the report of an answer that is being written
# AUTOINCREMENT: the id of a deleted message must not be reused, since a page may still hold it.
TABLES = (
    "CREATE TABLE chats (id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, created_at TEXT NOT NULL, "
    "updated_at TEXT NOT NULL, used INTEGER NOT NULL)",
    "CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, "
    "chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE, "
    "role TEXT NOT NULL CHECK (role IN ('user', 'assistant')), text TEXT NOT NULL, sources TEXT NOT NULL, "
    "report TEXT NOT NULL, created_at TEXT NOT NULL)",
    "CREATE INDEX messages_by_chat ON messages (chat_id, id)",
    "CREATE INDEX chats_by_use ON chats (used)",
)
# For messages that were rescued from a damaged file without their conversations.
RESTORE_CHATS = (
    "INSERT OR IGNORE INTO chats SELECT chat_id, '', min(created_at), max(created_at), max(id) FROM messages "
    "GROUP BY chat_id"
)
INTERRUPTED = "RAGBlend ended while this answer was being written, so it is incomplete."
Role = Literal["user", "assistant"]
SELECT_CHATS = (
    "SELECT chats.*, (SELECT count(*) FROM messages WHERE chat_id = chats.id) AS messages FROM chats"
)


@dataclass(frozen=True)
class Chat:
    """One conversation. messages: how many it has."""

    id: int
    title: str
    created_at: str
    updated_at: str
    messages: int


@dataclass(frozen=True)
class ChatMessage:
    """A question or an answer. report: the answer's cost (`breakdown_of`), notices, errors; {} for questions."""

    id: int
    chat_id: int
    role: Role
    text: str
    created_at: str
    sources: tuple[AnswerSource, ...] = ()
    report: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The message for programs, without its ids in this home."""
        return {
            "role": self.role,
            "text": self.text,
            "created_at": self.created_at,
            "sources": [source.to_json() for source in self.sources],
            "report": self.report,
        }

    def to_markdown(self) -> str:
        """The message for people: a heading, the text, notices, numbered sources."""
        doubtful = self.report.get("unsupported_figures", ())
        text = self.text if self.role == "user" else with_marks(self.text, self.sources, unsupported=doubtful)
        parts = [f"## {'Question' if self.role == 'user' else 'Answer'}", text.strip()]
        notices = [str(self.report[key]) for key in ("notice", "error") if self.report.get(key)]
        notices += [INTERRUPTED] if self.report.get("interrupted") else []
        parts += [f"> {notice}" for notice in notices]
        if self.sources:
            lines = (f"- [{s.number}] {s.label} (similarity {s.score:.2f})" for s in self.sources)
            parts.append("\n".join(lines))
        return "\n\n".join(parts)


class Chats(Database):
    """All conversations of one home. Safe for threads, and for several programs at once.

    known: returns the given node ids that are in the library; the text of other passages is not stored with an answer.
    hidden: returns the node ids of passages whose deletion can still be undone; messages are returned without their
    text.
    """

    what, version, tables = "conversations", 3, TABLES
    copied, adopted = ("chats", "messages"), (RESTORE_CHATS,)

    def __init__(
        self,
        path: Path,
        known: KnownNodes | None = None,
        hidden: Callable[[], Container[str]] = frozenset[str],
    ) -> None:
        super().__init__(path)
        self._known, self._hidden = known, hidden

    # --- conversations

    def create(self, title: str = "") -> Chat:
        """A new conversation; without a title, its first question becomes the title."""
        query = (
            "INSERT INTO chats (title, created_at, updated_at, used) "
            "VALUES (?1, ?2, ?2, (SELECT coalesce(max(used), 0) + 1 FROM chats))"
        )
        key = self.execute(query, _shortened(title), now()).lastrowid
        assert key is not None
        return self.get(key)

    def get(self, chat_id: int) -> Chat:
        """One conversation. Raises LibraryError if it does not exist."""
        rows = self.rows(f"{SELECT_CHATS} WHERE id = ?", chat_id)
        if not rows:
            raise LibraryError(f"Opening the conversation {chat_id}: it was deleted. Start a new one.")
        return _chat_of_row(rows[0])

    def page(self, offset: int = 0, limit: int = 50) -> tuple[list[Chat], int]:
        """One page of conversations by their last message, newest first, and how many there are in all."""
        rows = self.rows(f"{SELECT_CHATS} ORDER BY used DESC LIMIT ? OFFSET ?", limit, offset)
        (total,) = self.column("SELECT count(*) FROM chats")
        return [*map(_chat_of_row, rows)], total

    def search(self, text: str, limit: int = 50) -> list[tuple[Chat, str]]:
        """Conversations with all these words in the title or in one message, newest first, each with a snippet."""
        words = folded(text).split()
        if not words:
            return [(chat, "") for chat in self.page(limit=limit)[0]]
        title, message = (
            " AND ".join(f"instr(folded({name}), ?)" for _ in words) for name in ("title", "text")
        )
        rows = self.rows(
            f"{SELECT_CHATS} WHERE ({title}) OR id IN (SELECT chat_id FROM messages WHERE {message}) "
            "ORDER BY used DESC LIMIT ?",
            *words,
            *words,
            limit,
        )
        query = f"SELECT text FROM messages WHERE chat_id = ? AND {message} ORDER BY id LIMIT 1"
        texts = {row["id"]: self.column(query, row["id"], *words) for row in rows}
        return [(_chat_of_row(row), _snippet(texts[row["id"]], words[0])) for row in rows]

    def rename(self, chat_id: int, title: str) -> Chat:
        """Rename a conversation. Raises UsageError for an empty title, LibraryError if it does not exist."""
        if not title.strip():
            raise UsageError("Renaming a conversation: the title is empty. Write a name.")
        self.get(chat_id)
        self.execute("UPDATE chats SET title = ? WHERE id = ?", _shortened(title), chat_id)
        return self.get(chat_id)

    def delete(self, chat_id: int) -> int:
        """Delete a conversation and its bytes in the file. Returns how many bytes of text it had."""
        size = "length(CAST(text AS BLOB)) + length(CAST(sources AS BLOB)) + length(CAST(report AS BLOB))"
        query = f"SELECT coalesce(sum({size}), 0) FROM messages WHERE chat_id = ?"
        with self.transaction() as sql:
            (freed,) = sql.execute(query, (chat_id,)).fetchone()
            sql.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
        self.erase()
        return int(freed)

    # --- messages

    def messages(self, chat_id: int) -> list[ChatMessage]:
        """All messages in order, except unfinished answers. Raises LibraryError if there is no conversation."""
        rows = self.rows("SELECT * FROM messages WHERE chat_id = ? ORDER BY id", chat_id)
        if not rows:
            self.get(chat_id)
        hidden = self._hidden()
        messages = [_without_hidden(_message_of_row(row), hidden) for row in rows]
        return [message for message in messages if UNFINISHED not in message.report]

    def message(self, message_id: int) -> ChatMessage:
        """One message. Raises LibraryError if it does not exist."""
        return _without_hidden(self._load(message_id), self._hidden())

    def _load(self, message_id: int) -> ChatMessage:
        rows = self.rows("SELECT * FROM messages WHERE id = ?", message_id)
        if not rows:
            raise LibraryError(f"Opening the message {message_id}: it was deleted. Reload the conversation.")
        return _message_of_row(rows[0])

    def add(
        self,
        chat_id: int,
        role: Role,
        text: str,
        sources: Sequence[AnswerSource] = (),
        report: dict[str, Any] | None = None,
        question_id: int | None = None,
    ) -> ChatMessage:
        """Append a message durably. Raises LibraryError if its conversation or the question was deleted.

        question_id: of the question that this message answers; it may have been replaced meanwhile.
        """
        chat = self.get(chat_id)
        with self.transaction() as sql:
            if question_id is not None:
                self.message(question_id)  # raises if it was deleted
            key = _insert(sql, chat, role, text, sources, report or {})
        self._erase_texts_deleted_meanwhile(chat_id, sources)
        return self.message(key)

    def add_to_report(self, message_id: int, entries: dict[str, Any]) -> ChatMessage:
        """Add entries to a message's report. Raises LibraryError if the message does not exist."""
        with self.transaction() as sql:
            report = self._load(message_id).report | entries
            sql.execute("UPDATE messages SET report = ? WHERE id = ?", (_json(report), message_id))
        return self.message(message_id)

    def rewrite(self, message: ChatMessage) -> ChatMessage:
        """Replace a message's text, sources and report. Raises LibraryError if it does not exist.

        A passage that was deleted meanwhile stays deleted.
        """
        with self.transaction() as sql:
            deleted = {s.number for s in self._load(message.id).sources if s.text == DELETED_TEXT}
            sources = [_without_text(s) if s.number in deleted else s for s in message.sources]
            report = _report_without_texts(message.report, deleted)
            sql.execute(
                "UPDATE messages SET text = ?, sources = ?, report = ? WHERE id = ?",
                (storable(message.text), _sources_json(sources), _json(report), message.id),
            )
        if UNFINISHED not in report:
            self._erase_texts_deleted_meanwhile(message.chat_id, message.sources)
        return self.message(message.id)

    def _erase_texts_deleted_meanwhile(self, chat_id: int, sources: Sequence[AnswerSource]) -> None:
        """Erase passages that were deleted while these sources were stored: the deletion has missed this message."""
        if sources and self._known is not None:
            self._erase_deleted_texts_in(chat_id, self._known)
            self.erase_log()

    def mark_interrupted(self, chat_id: int | None = None) -> int:
        """Mark unfinished answers of killed programs as interrupted, in one conversation or all. Returns how many.

        Call it before the first question. If a program is still writing such an answer, it overwrites the mark at the
        end.
        """
        query = (
            "UPDATE messages SET report = json_set(json_remove(report, '$.unfinished'), '$.interrupted', json('true')) "
            "WHERE instr(report, '\"unfinished\"') AND json_extract(report, '$.unfinished') "
            "AND chat_id = coalesce(?, chat_id)"
        )
        return self.execute(query, chat_id).rowcount

    def replace_from(self, message_id: int, question: str) -> ChatMessage:
        """Replace a question and all later messages of its conversation by a new question; erases the deleted bytes."""
        chat = self.get(self.message(message_id).chat_id)
        with self.transaction() as sql:
            sql.execute("DELETE FROM messages WHERE chat_id = ? AND id >= ?", (chat.id, message_id))
            key = _insert(sql, chat, "user", question, (), {})
        self.erase()
        return self.message(key)

    # --- deleted documents

    def erase_deleted_texts(self, known: KnownNodes) -> bool:
        """Erase the text of passages that are no longer in the library from all sources and reports.

        Their number, document name and location stay, and so do the answers. Returns False if the bytes are still in
        the file because other processes use it.
        """
        for chat_id in self.column("SELECT DISTINCT chat_id FROM messages WHERE sources != '[]'"):
            self._erase_deleted_texts_in(chat_id, known)
        return self.erase()

    def _erase_deleted_texts_in(self, chat_id: int, known: KnownNodes) -> None:
        with self.transaction() as sql:
            rows = sql.execute("SELECT * FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,)).fetchall()
            messages = [_message_of_row(row) for row in rows]
            sources = [source for message in messages for source in message.sources]
            in_library = known(list({source.node_id for source in sources}))
            deleted = {source.number for source in sources if source.node_id not in in_library}
            for message in messages:
                kept = [s if s.node_id in in_library else _without_text(s) for s in message.sources]
                report = _report_without_texts(message.report, deleted)
                if (tuple(kept), report) != (message.sources, message.report):
                    values = (_sources_json(kept), _json(report), message.id)
                    sql.execute("UPDATE messages SET sources = ?, report = ? WHERE id = ?", values)

    # --- export

    def export_json(self, chat_id: int) -> dict[str, Any]:
        chat, messages = self.get(chat_id), [message.to_json() for message in self.messages(chat_id)]
        described = {name: getattr(chat, name) for name in ("title", "created_at", "updated_at")}
        return {"format": 1, **described, "messages": messages}

    def export_markdown(self, chat_id: int) -> str:
        """The conversation for people: questions, answers, numbered sources."""
        chat = self.get(chat_id)
        parts = [f"# {chat.title or 'Conversation'}", f"{chat.created_at} to {chat.updated_at}"]
        parts += [message.to_markdown() for message in self.messages(chat_id)]
        return "\n\n".join(parts) + "\n"


def _insert(
    sql: sqlite3.Connection,
    chat: Chat,
    role: Role,
    text: str,
    sources: Sequence[AnswerSource],
    report: dict[str, Any],
) -> int:
    """Append a message; returns its id."""
    moment = now()
    key = sql.execute(
        "INSERT INTO messages (chat_id, role, text, sources, report, created_at) VALUES (?, ?, ?, ?, ?, ?)",
        (chat.id, role, storable(text), _sources_json(sources), _json(report), moment),
    ).lastrowid
    title = chat.title or (_shortened(text) if role == "user" else "")
    sql.execute(
        "UPDATE chats SET title = ?, updated_at = ?, used = (SELECT max(used) + 1 FROM chats) WHERE id = ?",
        (title, moment, chat.id),
    )
    assert key is not None
    return key


def _chat_of_row(row: sqlite3.Row) -> Chat:
    return Chat(**{each.name: row[each.name] for each in fields(Chat)})


def _message_of_row(row: sqlite3.Row) -> ChatMessage:
    sources = tuple(map(AnswerSource.from_json, json.loads(row["sources"])))
    return ChatMessage(
        row["id"],
        row["chat_id"],
        row["role"],
        row["text"],
        row["created_at"],
        sources,
        json.loads(row["report"]),
    )


def _sources_json(sources: Sequence[AnswerSource]) -> str:
    return _json([source.to_json() for source in sources])


def _json(value: object) -> str:
    return storable(json.dumps(value, ensure_ascii=False))


def _shortened(title: str) -> str:
    line = storable(" ".join(title.split()))
    return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 1].rstrip() + "…"


def _snippet(texts: Sequence[str], word: str) -> str:
    """About SNIPPET_CHARACTERS around the first occurrence of a folded word in the first text; "" without a text."""
    line = " ".join("".join(texts[:1]).split())
    at = folded(line).find(word)
    start = max(0, at - SNIPPET_CHARACTERS // 3)
    piece = line[start : start + SNIPPET_CHARACTERS]
    return ("… " if start else "") + piece + (" …" if start + len(piece) < len(line) else "")


def _without_hidden(message: ChatMessage, hidden: Container[str]) -> ChatMessage:
    """The message without the text of hidden passages, as if they had been deleted."""
    numbers = {source.number for source in message.sources if source.node_id in hidden}
    if not numbers:
        return message
    sources = tuple(_without_text(each) if each.number in numbers else each for each in message.sources)
    return replace(message, sources=sources, report=_report_without_texts(message.report, numbers))


def _without_text(source: AnswerSource) -> AnswerSource:
    """The source without its text, and without its id, which is a digest of the text."""
    return replace(source, node_id=f"removed-{source.number}", text=DELETED_TEXT)


def _report_without_texts(report: dict[str, Any], numbers: set[int]) -> dict[str, Any]:
    """The report without the beginnings of the texts of the sources with these numbers."""
    segments = [
        {**segment, "text": ""} if segment.get("number") in numbers else segment
        for segment in report.get("segments", [])
    ]
    return {**report, "segments": segments} if segments else report
