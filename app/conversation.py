"""One question in a conversation: search the collections, build the context, stream the answer, keep all of it.

`Conversations.ask` -> `context.fit` -> `Engine.stream` -> `Turn`, which stores the answer.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

from ragblend.app.chat_records import Message
from ragblend.app.chats import DELETED_TEXT, Chats
from ragblend.app.citations import SourceRow, cite
from ragblend.app.context import Context, Words, build, fit, past_turns, words_for
from ragblend.app.hood import Hood, look
from ragblend.app.retrieval import Nearest, nearest, without_duplicates
from ragblend.app.settings import Settings
from ragblend.app.turn import Turn
from ragblend.app.workspaces import Workspaces
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine
    from ragblend.engine.results import Result
    from ragblend.engine.session import Session

# Cosine similarity below which a passage has nothing to do with a question. Measured with MiniLM over the samples: the
# best passage of the 24 sample questions had 0.47 to 0.78, that of 20 questions about other things 0.11 to 0.33.
LEAST_SCORE = 0.25
SESSIONS = 2  # conversations whose context stays in memory
MODES = ("documents", "chat")


@dataclass(frozen=True)
class AskOptions:
    """How one question is answered; None and () mean what the settings say.

    documents: from passages alone, and if none is found that is said without asking the model; chat: passages where
    they are found, else a plain conversation.
    """

    collections: tuple[str, ...] = ()
    mode: Literal["documents", "chat"] = "documents"
    method: str | None = None
    ratio: float | str | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"the mode {self.mode!r} is unknown; pass {' or '.join(MODES)}")

    def settings(self, base: Settings) -> Settings:
        """The settings for this question. Raises SettingsError."""
        names = ("method", "ratio", "top_k", "max_new_tokens", "temperature")
        return base.changed({name: getattr(self, name) for name in names})


class Conversations:
    """Asks questions over one home, and keeps what was said. Safe for threads; the device serves one at a time."""

    def __init__(self, workspaces: Workspaces, chats: Chats) -> None:
        self._workspaces, self._chats = workspaces, chats
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._turns: weakref.WeakSet[Turn] = weakref.WeakSet()

    def ask(self, chat_id: int, question: str, options: AskOptions | None = None) -> Turn:
        """Store the question, search, and begin to answer. Raises UsageError, SettingsError, LibraryError,
        PromptTooLongError; the question stays in the conversation all the same, unless it is empty.
        """
        options = options or AskOptions()
        settings = options.settings(self._workspaces.settings)
        if not question.strip():
            raise UsageError("Asking: the question is empty. Write what you want to know.")
        messages = self._chats.messages(chat_id)
        asked = self._chats.add(chat_id, "user", question.strip())
        turn = self._answer(asked, messages, options, settings)
        self._turns.add(turn)
        return turn

    def edit(self, message_id: int, question: str, options: AskOptions | None = None) -> Turn:
        """Ask something else in the place of a question: it and all after it are replaced. Raises as `ask` does."""
        message = self._chats.message(message_id)
        if message.role != "user" or not question.strip():
            raise UsageError(
                "Editing a message: it must be a question, and stay one. Edit a question of yours."
            )
        (options or AskOptions()).settings(self._workspaces.settings)  # before anything is removed
        self._chats.replace_from(message_id)
        return self.ask(message.chat_id, question, options)

    def regenerate(self, chat_id: int, options: AskOptions | None = None) -> Turn:
        """Answer the last question again. Raises as `ask` does, and UsageError if nothing was asked."""
        questions = [message for message in self._chats.messages(chat_id) if message.role == "user"]
        if not questions:
            raise UsageError("Answering again: nothing was asked in this conversation yet. Write a question.")
        return self.edit(questions[-1].id, questions[-1].text, options)

    def measure_full(self, message_id: int, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Read that answer's prompt in full, for the clock; its report, with the measured time, stored.

        Raises UsageError where there is nothing to measure, Cancelled.
        """
        answer = self._chats.message(message_id)
        hood = Hood.from_json(answer.report)
        if hood is None:
            raise UsageError(
                "Measuring full prefill: this message is no finished answer of the model. Take another."
            )
        messages = [m for m in self._chats.messages(answer.chat_id) if m.id < message_id]
        prompt = self._prompt_of(answer, messages)
        prefilled = self._engine.prefill(prompt, method="full", cancel=cancel)
        report = {**answer.report, **hood.measured(round(prefilled.report.timings.prefill_ms, 1)).to_json()}
        return self._chats.set_report(message_id, report).report

    def stop_all(self) -> None:
        """Stop every answer that is under way, and wait until the device is free."""
        for turn in list(self._turns):
            turn.close()

    def forget(self, chat_id: int) -> None:
        """Let go of what is in memory of a conversation."""
        with self._lock:
            self._sessions.pop(chat_id, None)

    def warm_up(self) -> None:
        """Load the embedder and, in the background, the model, before the first question."""
        self._workspaces.of(self._workspaces.settings.collection).embedder.load()
        self._engine.prefetch(())

    # --- inside

    @property
    def _engine(self) -> "Engine":
        """Any collection's: each passage says which collection's KV it has."""
        return self._workspaces.of(self._workspaces.settings.collection).engine

    def _answer(
        self, asked: Message, messages: Sequence[Message], options: AskOptions, settings: Settings
    ) -> Turn:
        turns = past_turns(messages)
        begun = time.perf_counter()
        before = turns[-1].question if turns else None
        collections = options.collections or (self._workspaces.settings.collection,)
        found, notice = self._search(collections, asked.text, before, settings.top_k)
        retrieve_ms = (time.perf_counter() - begun) * 1e3
        known = any(turn.sources for turn in turns)
        if not found:
            notice = notice or _nothing_found(collections, alone=options.mode == "chat" and not known)
            if options.mode == "documents" and not known:
                return self._nothing(asked, notice)
        words = words_for(options.mode, settings.system, bool(found) or known)
        room = self._engine.context_window - settings.max_new_tokens
        first_id = _first_id(messages)
        context = fit(self._engine, room, words, turns, first_id, asked.text, found, messages)
        notices = [text for text in (notice, context.notice) if text]
        return self._stream(asked, context, words, settings, retrieve_ms, " ".join(notices) or None, messages)

    def _stream(
        self,
        asked: Message,
        context: Context,
        words: Words,
        settings: Settings,
        retrieve_ms: float,
        notice: str | None,
        messages: Sequence[Message],
    ) -> Turn:
        engine = self._engine
        stream = engine.stream(context.prompt, session=self._session(asked.chat_id), **settings.answering)
        present = _present(context, messages)

        def describe(result: "Result") -> dict[str, Any]:
            said = " ".join(text for text in (notice, result.report.warning) if text) or None
            return look(
                result.report,
                result.prompt,
                {source.node_id: (source.number, _label(source)) for source in present.values()},
                model=engine.model_name,
                device=engine.device,
                dtype=engine.dtype,
                retrieve_ms=retrieve_ms,
                profile=engine.known_profile,
                notice=said,
            ).to_json()

        def kept(text: str) -> list[SourceRow]:
            """What was found, and what the answer cites of earlier turns."""
            mine = {source.number for source in context.sources}
            cited = {citation.number for citation in cite(text, list(present.values())).citations}
            others = [source for number, source in present.items() if number in cited - mine]
            return [*context.sources, *others]

        basis = {"first_id": context.first_id, "system": words.system, "closing": words.closing}
        return Turn(self._chats, asked, context.sources, notice, stream, describe, kept, basis)

    def _nothing(self, asked: Message, text: str) -> Turn:
        """An answer that needs no model."""
        return Turn(self._chats, asked, (), text, None, lambda _: {}, lambda _: (), {"found": False}, text)

    def _search(
        self, collections: Sequence[str], question: str, before: str | None, top_k: int
    ) -> tuple[list[SourceRow], str | None]:
        """The best passages of all collections, and what must be said about those that hold none.

        A follow-up ("and who owns it?") is looked for as it is, and behind the question before it; each way gives every
        second passage, because a change of topic is as likely as a pronoun.
        """
        names = list(dict.fromkeys(collections))
        if unknown := [name for name in names if name not in self._workspaces.names()]:
            raise UsageError(f"Asking: there is no collection {_listed(unknown)}. Choose one that there is.")
        full = [name for name in names if self._workspaces.library.has_passages(name)]
        ways = [question] if before is None else [question, f"{before} {question}"]
        ranked = [self._ranked(full, way, top_k) for way in ways]
        mixed = [hit for place in zip_longest(*ranked) for hit in place if hit is not None]
        empty = [name for name in names if name not in full]
        notice = f"Nothing has been ingested in {_listed(empty)} yet." if empty else None
        return [_row(hit) for hit in without_duplicates(mixed)[:top_k]], notice

    def _ranked(self, collections: Sequence[str], question: str, top_k: int) -> list[Nearest]:
        found = [hit for name in collections for hit in nearest(self._workspaces.of(name), question, top_k)]
        return sorted((hit for hit in found if hit.score >= LEAST_SCORE), key=lambda hit: -hit.score)

    def _prompt_of(self, answer: Message, messages: Sequence[Message]) -> Any:
        """The prompt that the answer was made from, built again from what was stored."""
        question = messages[-1].text
        turns = [turn for turn in past_turns(messages[:-1]) if turn.id >= answer.report["first_id"]]
        words = Words(answer.report["system"], answer.report["closing"])
        sources = [s for s in answer.sources if not s.earlier and s.text != DELETED_TEXT]
        return build(self._engine, words, turns, question, sources)

    def _session(self, chat_id: int) -> "Session":
        """The conversation's context in memory; that of the conversation that waited longest goes."""
        from ragblend.engine.session import Session

        with self._lock:
            session = self._sessions.setdefault(chat_id, Session())
            self._sessions.move_to_end(chat_id)
            while len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
            return session


def _row(hit: Nearest) -> SourceRow:
    passage = hit.passage
    place = (hit.collection, hit.document, passage.location, round(hit.score, 4), passage.text)
    return SourceRow(0, passage.node_id, passage.document_id, *place)


def _present(context: Context, messages: Sequence[Message]) -> dict[int, SourceRow]:
    """All passages that are before the model, by number."""
    earlier = {
        source.number: replace(source, earlier=True)
        for turn in past_turns(messages)
        if turn.id >= context.first_id
        for source in turn.sources
    }
    return earlier | {source.number: source for source in context.sources}


def _first_id(messages: Sequence[Message]) -> int:
    """Where the last context began: what was left out once stays out."""
    return next((int(m.report["first_id"]) for m in reversed(messages) if "first_id" in m.report), 0)


def _label(source: SourceRow) -> str:
    return f"{source.document}, {source.location}" if source.location else source.document


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _nothing_found(collections: Sequence[str], alone: bool) -> str:
    said = f"Nothing about this was found in {_listed(collections)}."
    return f"{said} The answer is the model's own." if alone else said
