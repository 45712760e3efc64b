"""Conversations, kept: titles, messages, their sources and what the answers cost. Never lost; deleted for good."""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragblend.app.chat_records import Chat, ChatPage, FoundChat, Message, Role
from ragblend.app.citations import SourceRow
from ragblend.app.database import Database, Layout, now
from ragblend.kvstore.closing import Closing
from ragblend.kvstore.errors import LibraryError, UsageError

TITLE_CHARACTERS = 60
SNIPPET_CHARACTERS = 120
DELETED_TEXT = "(The document was deleted.)"
# AUTOINCREMENT: the number of a deleted message must not come back, somebody may still hold it.
TABLES = """
CREATE TABLE chats (
    id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, created_at TEXT NOT NULL, updated_at TEXT NOT NULL,
    used INTEGER NOT NULL);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    role TEXT NOT NULL CHECK (role IN ('user', 'assistant')), text TEXT NOT NULL, sources TEXT NOT NULL,
    report TEXT NOT NULL, created_at TEXT NOT NULL);
CREATE INDEX messages_by_chat ON messages (chat_id, id);
CREATE INDEX chats_by_use ON chats (used)
"""
CHATS = "SELECT chats.*, (SELECT count(*) FROM messages WHERE chat_id = chats.id) AS messages FROM chats"


class Chats(Closing):
    """All conversations of one home. Safe for threads, and for several programs at once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(cls, path: Path) -> "Chats":
        """Open or make the file. Raises LibraryError."""
        return cls(Database(path, Layout("conversations", TABLES)))

    def close(self) -> None:
        self._database.close()

    # --- conversations

    def create(self, title: str = "") -> Chat:
        """A new conversation; without a title it takes the first question for one."""
        with self._database.transaction() as sql:
            moment = now()
            values = (_shortened(title), moment, moment)
            key = sql.execute(
                "INSERT INTO chats (title, created_at, updated_at, used) "
                "VALUES (?, ?, ?, (SELECT coalesce(max(used), 0) + 1 FROM chats))",
                values,
            ).lastrowid
        assert key is not None
        return self.get(key)

    def get(self, chat_id: int) -> Chat:
        """Raises LibraryError if it is gone."""
        rows = self._database.rows(f"{CHATS} WHERE id = ?", chat_id)
        if not rows:
            raise LibraryError(
                f"Opening the conversation {chat_id}: it is not there any more. Start a new one."
            )
        return Chat(**_without(rows[0], "used"))

    def page(self, offset: int = 0, limit: int = 50) -> ChatPage:
        """The conversations by their last message, newest first."""
        rows = self._database.rows(f"{CHATS} ORDER BY used DESC LIMIT ? OFFSET ?", limit, offset)
        total = self._database.rows("SELECT count(*) AS n FROM chats")[0]["n"]
        return ChatPage(tuple(Chat(**_without(row, "used")) for row in rows), total)

    def search(self, text: str, limit: int = 50) -> list[FoundChat]:
        """Conversations in whose title or one message all these words stand, newest first."""
        words = text.casefold().split()
        if not words:
            return [FoundChat(chat, "") for chat in self.page(limit=limit).chats]
        title, message = (
            " AND ".join(f"instr(folded({name}), ?)" for _ in words) for name in ("title", "text")
        )
        rows = self._database.rows(
            f"{CHATS} WHERE ({title}) OR id IN (SELECT chat_id FROM messages WHERE {message}) "
            "ORDER BY used DESC LIMIT ?",
            *words,
            *words,
            limit,
        )
        chats = [Chat(**_without(row, "used")) for row in rows]
        return [FoundChat(chat, self._place(chat, message, words)) for chat in chats]

    def rename(self, chat_id: int, title: str) -> Chat:
        """Raises UsageError for an empty title, LibraryError if the conversation is gone."""
        if not title.strip():
            raise UsageError("Renaming a conversation: the title is empty. Write a name.")
        self.get(chat_id)
        with self._database.transaction() as sql:
            sql.execute("UPDATE chats SET title = ? WHERE id = ?", (_shortened(title), chat_id))
        return self.get(chat_id)

    def delete(self, chat_id: int) -> int:
        """Remove a conversation and its bytes in the file. Returns how many bytes of text went."""
        size = "length(CAST(text AS BLOB)) + length(CAST(sources AS BLOB)) + length(CAST(report AS BLOB))"
        query = f"SELECT coalesce(sum({size}), 0) AS n FROM messages WHERE chat_id = ?"
        with self._database.transaction() as sql:
            freed = int(sql.execute(query, (chat_id,)).fetchone()["n"])
            sql.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
        self._database.erase_log()
        return freed

    # --- messages

    def messages(self, chat_id: int) -> list[Message]:
        """All messages, in order. Raises LibraryError if the conversation is gone."""
        rows = self._database.rows("SELECT * FROM messages WHERE chat_id = ? ORDER BY id", chat_id)
        if not rows:
            self.get(chat_id)
        return [_message(row) for row in rows]

    def message(self, message_id: int) -> Message:
        """Raises LibraryError if it is gone."""
        rows = self._database.rows("SELECT * FROM messages WHERE id = ?", message_id)
        if not rows:
            raise LibraryError(
                f"Opening the message {message_id}: it is not there any more. Reload the conversation."
            )
        return _message(rows[0])

    def add(
        self,
        chat_id: int,
        role: Role,
        text: str,
        sources: Sequence[SourceRow] = (),
        report: dict[str, Any] | None = None,
    ) -> Message:
        """Append a message; on disk when this returns. Raises LibraryError if the conversation is gone."""
        chat, moment = self.get(chat_id), now()
        with self._database.transaction() as sql:
            key = sql.execute(
                "INSERT INTO messages (chat_id, role, text, sources, report, created_at) VALUES (?, ?, ?, ?, ?, ?)",
                (chat_id, role, _storable(text), _sources_json(sources), _json(report or {}), moment),
            ).lastrowid
            title = chat.title or (_shortened(text) if role == "user" else "")
            sql.execute(
                "UPDATE chats SET title = ?, updated_at = ?, used = (SELECT max(used) + 1 FROM chats) WHERE id = ?",
                (title, moment, chat_id),
            )
        assert key is not None
        return self.message(key)

    def set_report(self, message_id: int, report: dict[str, Any]) -> Message:
        """Put another report in the place of a message's."""
        with self._database.transaction() as sql:
            sql.execute("UPDATE messages SET report = ? WHERE id = ?", (_json(report), message_id))
        return self.message(message_id)

    def replace_from(self, message_id: int) -> None:
        """Remove that message and all after it in its conversation, and their bytes."""
        message = self.message(message_id)
        with self._database.transaction() as sql:
            sql.execute("DELETE FROM messages WHERE chat_id = ? AND id >= ?", (message.chat_id, message_id))
        self._database.erase_log()

    # --- documents that went

    def citing(self, document_id: str) -> list[Chat]:
        """Conversations with a passage of that document among their sources."""
        return [self.get(chat_id) for chat_id in sorted({m.chat_id for m in self._citing(document_id)})]

    def forget_document(self, document_id: str) -> int:
        """Take the text of its passages out of all sources; number, name and place stay. Returns how many."""
        count = 0
        with self._database.transaction() as sql:
            for message in self._citing(document_id):
                mine = [s.document_id == document_id and s.text != DELETED_TEXT for s in message.sources]
                count += sum(mine)
                rows = [
                    replace(source, text=DELETED_TEXT) if own else source
                    for source, own in zip(message.sources, mine, strict=True)
                ]
                report = _without_texts(
                    message.report, {s.number for s, own in zip(rows, mine, strict=True) if own}
                )
                sql.execute(
                    "UPDATE messages SET sources = ?, report = ? WHERE id = ?",
                    (_sources_json(rows), _json(report), message.id),
                )
        self._database.erase_log()
        return count

    # --- out of here

    def export_json(self, chat_id: int) -> dict[str, Any]:
        """The whole conversation, for programs."""
        messages = [message.to_json() for message in self.messages(chat_id)]
        chat = self.get(chat_id)
        return {
            "format": 1,
            "title": chat.title,
            "created_at": chat.created_at,
            "updated_at": chat.updated_at,
            "messages": messages,
        }

    def export_markdown(self, chat_id: int) -> str:
        """The whole conversation, for people: questions, answers, numbered sources."""
        chat = self.get(chat_id)
        parts = [f"# {chat.title or 'Conversation'}", f"{chat.created_at} to {chat.updated_at}"]
        parts += [message.to_markdown() for message in self.messages(chat_id)]
        return "\n\n".join(parts) + "\n"

    # --- inside

    def _citing(self, document_id: str) -> list[Message]:
        rows = self._database.rows("SELECT * FROM messages WHERE instr(sources, ?)", document_id)
        found = (_message(row) for row in rows)
        return [m for m in found if any(source.document_id == document_id for source in m.sources)]

    def _place(self, chat: Chat, condition: str, words: Sequence[str]) -> str:
        query = f"SELECT text FROM messages WHERE chat_id = ? AND {condition} ORDER BY id LIMIT 1"
        rows = self._database.rows(query, chat.id, *words)
        return _around(rows[0]["text"], words[0]) if rows else ""


def _message(row: sqlite3.Row) -> Message:
    values = dict(row)
    sources = tuple(SourceRow.from_json(value) for value in json.loads(values.pop("sources")))
    return Message(**values | {"sources": sources, "report": json.loads(values["report"])})


def _without(row: sqlite3.Row, name: str) -> dict[str, Any]:
    values = dict(row)
    del values[name]
    return values


def _sources_json(sources: Sequence[SourceRow]) -> str:
    return _json([source.to_json() for source in sources])


def _json(value: object) -> str:
    return _storable(json.dumps(value, ensure_ascii=False))


def _storable(text: str) -> str:
    """Without halves of surrogate pairs, which a model's tokens and a browser can give, and SQLite cannot keep."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shortened(title: str) -> str:
    line = _storable(" ".join(title.split()))
    return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 1].rstrip() + "…"


def _around(text: str, word: str) -> str:
    """About 120 characters around the first place of a folded word."""
    line = " ".join(text.split())
    at = line.casefold().find(word)
    start = max(0, at - SNIPPET_CHARACTERS // 3)
    piece = line[start : start + SNIPPET_CHARACTERS]
    return ("… " if start else "") + piece + (" …" if start + len(piece) < len(line) else "")


def _without_texts(report: dict[str, Any], numbers: set[int]) -> dict[str, Any]:
    """The report, without the beginnings of those sources' texts in its segments."""
    segments = [
        {**segment, "text": ""} if segment.get("number") in numbers else segment
        for segment in report.get("segments", [])
    ]
    return {**report, "segments": segments} if segments else report
