"""Answers questions: searches the collections, builds the prompt, streams the answer, stores it.

Main path: `Conversations.ask` (stored) or `answer` (not stored) -> `retrieval.search_in_stages` -> `context.fit` ->
`Engine.stream`, returned as an `AnswerStream`. The command line, the page, the server and `comparing` use this path.
"""

import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from ragblend.app.answering.answer import AnswerSource
from ragblend.app.answering.answer_stream import UNSAVED_ID, AnswerStream, PreparedQuestion
from ragblend.app.answering.breakdown import full_prefill_fields, has_breakdown
from ragblend.app.answering.chats import ChatMessage, Chats
from ragblend.app.answering.context import (
    PromptWording,
    build_prompt,
    fit,
    new_sources,
    past_turns,
    questions_with_answers,
    wording_for,
)
from ragblend.app.answering.digest import DocumentSummariser, DocumentSummary
from ragblend.app.answering.retrieval import is_incomplete, nearest, search_in_stages
from ragblend.app.database import now, storable
from ragblend.app.library.documents import Document
from ragblend.app.library.word_search import missing_codes
from ragblend.app.progress import OnProgress, silent
from ragblend.app.settings import Settings
from ragblend.app.workspace import Workspaces
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.scheduling.queue import Cancel
from ragblend.kvstore.errors import LibraryError, UsageError

if TYPE_CHECKING:
    from ragblend.engine.interface import EngineInterface
    from ragblend.engine.prompts.session import Session
    from ragblend.engine.results import Stream

MAX_SESSIONS = 2  # conversations whose KV is kept in memory
MODES = ("documents", "chat")
# The settings that `AskOptions` can replace for one question.
OVERRIDABLE_SETTINGS = ("method", "ratio", "top_k", "max_new_tokens", "temperature")


@dataclass(frozen=True)
class AskOptions:
    """How to answer one question; None and () mean the settings' value.

    collections: the names of the collections to search. mode `documents`: answer from passages only; if none is found,
    the answer says so, and the model is not run. `chat`: with passages if any are found. top_k: passages to retrieve.
    client: the user's name, for sharing the device fairly. cancel: checked during retrieval, which then raises
    Cancelled. documents: ids of the only documents to search.
    """

    collections: tuple[str, ...] = ()
    mode: Literal["documents", "chat"] = "documents"
    method: str | None = None
    ratio: float | str | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    client: str = ""
    cancel: Cancel | None = None
    documents: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise UsageError(f"the mode {self.mode!r} is unknown; pass {' or '.join(MODES)}")

    def settings(self, base: Settings) -> Settings:
        """The settings with these options. Raises SettingsError for an invalid one."""
        overrides = {name: getattr(self, name) for name in OVERRIDABLE_SETTINGS}
        if self.method not in (None, base.method) and self.ratio is None:
            overrides["ratio"] = Settings.ratio  # the settings' ratio was chosen for another method
        return base.changed(overrides)


class Conversations:
    """Answers questions over one home, and stores conversations. Thread-safe; answers share the device.

    An answer is returned when its prompt is ready; iterating over it waits for the text.
    """

    def __init__(self, workspaces: Workspaces) -> None:
        self._workspaces = workspaces
        self._sessions: OrderedDict[int, Session] = OrderedDict()
        self._lock = threading.Lock()
        self._answers: weakref.WeakSet[AnswerStream] = (
            weakref.WeakSet()
        )  # includes all that are still running

    @property
    def settings(self) -> Settings:
        return self._workspaces.settings

    @property
    def engine(self) -> "EngineInterface":
        """One engine serves all collections, because each passage names the collection of its KV."""
        return self._workspaces.first.engine

    def ask(self, chat_id: int, question: str, options: AskOptions | None = None) -> AnswerStream:
        """Store the question, search, and start the answer, which is stored too.

        Raises UsageError, SettingsError, LibraryError, PromptTooLongError. The question stays stored after
        an error, unless it is empty or an option is invalid.
        """
        options = options or AskOptions()
        self._check(question, options)
        return self._answer_to(self._chats.add(chat_id, "user", question.strip()), options)

    def answer(
        self, question: str, options: AskOptions | None = None, earlier: Sequence[ChatMessage] = ()
    ) -> AnswerStream:
        """Answer without storing anything. earlier: the messages before the question. Raises as `ask` does."""
        options = options or AskOptions()
        return self._answer_stream(self._unsaved_stages(question, options, earlier), options.client, None)

    def prepare(self, question: str, options: AskOptions) -> PreparedQuestion:
        """Search, and build a prompt that fits the window, without answering. Raises as `ask` does."""
        *_, last = self._unsaved_stages(question, options, ())
        return last

    def digest(
        self, document: Document, chat_id: int | None = None, show: OnProgress = silent
    ) -> DocumentSummary:
        """Summarise a document of the library, and store the summary if a conversation is given."""
        request = f"Summarise {document.name}."
        if chat_id is None:
            return self._summary(document, ChatMessage(1, UNSAVED_ID, "user", request, now()), None, show)
        return self._summary(document, self._chats.add(chat_id, "user", request), self._chats, show)

    def edit(self, message_id: int, question: str, options: AskOptions | None = None) -> AnswerStream:
        """Replace a question, and delete all messages after it. Raises as `ask` does."""
        message = self._chats.message(message_id)
        if message.role != "user" or not question.strip():
            raise UsageError(
                "Editing a message: only your own questions can be edited, and not to an empty text."
            )
        options = options or AskOptions()
        self._check(question, options)  # before anything is deleted
        return self._answer_to(self._chats.replace_from(message_id, question.strip()), options)

    def regenerate(self, chat_id: int, options: AskOptions | None = None) -> AnswerStream:
        """Answer the last question again. Raises as `ask` does, and UsageError if there is none."""
        messages = self._chats.messages(chat_id)
        questions = [message for message in messages if message.role == "user"]
        if not questions:
            raise UsageError("Answering again: this conversation has no question yet. Write one.")
        last = questions[-1]
        # If the answer is a summary, its report has the document's id.
        digests = [a.report.get("digest") for q, a in questions_with_answers(messages) if q.id == last.id]
        document_id = str(digests[-1]) if digests else ""
        if document := self._workspaces.library.documents_with([document_id]).get(document_id):
            return self._summary(document, self._chats.replace_from(last.id, last.text), self._chats)
        return self.edit(last.id, last.text, options)

    def measure_full(self, message_id: int, cancel: threading.Event | None = None) -> dict[str, Any]:
        """Run full prefill of a stored answer's prompt, store its time with the answer, and return the answer's report.

        Raises UsageError if it cannot be measured (any more), and Cancelled once `cancel` is set.
        """
        answer, engine = self._chats.message(message_id), self.engine
        if not has_breakdown(answer.report):
            raise UsageError(
                "Measuring full prefill: this is not a finished answer of the model. Choose another."
            )
        model, device, dtype = (answer.report[name] for name in ("model", "device", "dtype"))
        if (model, device, dtype) != (engine.model_name, engine.device, engine.dtype):
            raise UsageError(
                f"Measuring full prefill: this answer was computed by {model} on {device} in {dtype}. Choose these in "
                "the settings."
            )
        prompt = self._rebuild_prompt(answer, self._chats.messages(answer.chat_id))
        if len(prompt.token_ids) != answer.report["tokens"]["prompt"]:
            raise UsageError(
                "Measuring full prefill: the answer's prompt cannot be rebuilt (a passage was deleted, or RAGBlend or "
                "the model changed). Ask again."
            )
        prefilled = engine.prefill(prompt, method="full", cancel=cancel)
        measured = full_prefill_fields(prefilled.report.timings.prefill_ms, "measured")
        return self._chats.add_to_report(message_id, measured).report

    def stop_all(self) -> None:
        """Stop all running answers, and wait until the device is free."""
        for answer in list(self._answers):
            answer.close()

    def forget(self, chat_id: int) -> None:
        """Free the KV of a conversation that is kept in memory."""
        with self._lock:
            self._sessions.pop(chat_id, None)

    def warm_up(self) -> None:
        """Load what retrieval needs (embedder, index, reranker), so that the first question is not delayed."""
        first = self._workspaces.first
        if first.library.has_passages(first.settings.collection):
            nearest(first, first.embedder.embed_question("warm up"), 1)
        else:
            first.embedder.load()
        if first.reranker is not None:
            first.reranker.load()

    # --- inside

    @property
    def _chats(self) -> Chats:
        return self._workspaces.chats

    def _check(self, question: str, options: AskOptions) -> None:
        options.settings(self.settings)
        if options.method is not None:
            from ragblend.engine.selection import policy_named  # imports torch

            policy_named(options.method)
        if not question.strip():
            raise UsageError("Asking: the question is empty. Write what you want to know.")

    def _answer_to(self, asked: ChatMessage, options: AskOptions) -> AnswerStream:
        """Answer a stored question; the answer is stored too."""
        messages = [message for message in self._chats.messages(asked.chat_id) if message.id < asked.id]
        return self._answer_stream(
            self._prepare_in_stages(asked, messages, options), options.client, self._chats
        )

    def _summary(
        self, document: Document, asked: ChatMessage, chats: Chats | None, show: OnProgress = silent
    ) -> DocumentSummary:
        summariser = DocumentSummariser(self._workspaces.of(document.collection), document, show)
        summary = DocumentSummary(PreparedQuestion(asked, self.settings), summariser, chats)
        self._answers.add(summary)
        return summary

    def _unsaved_stages(
        self, question: str, options: AskOptions, earlier: Sequence[ChatMessage]
    ) -> Iterator[PreparedQuestion]:
        self._check(question, options)
        messages = [replace(message, id=number) for number, message in enumerate(earlier, start=1)]
        asked = ChatMessage(len(messages) + 1, UNSAVED_ID, "user", storable(question).strip(), now())
        return self._prepare_in_stages(asked, messages, options)

    def _prepare_in_stages(
        self, question: ChatMessage, messages: Sequence[ChatMessage], options: AskOptions
    ) -> Iterator[PreparedQuestion]:
        """The question with its prompt after each stage of retrieval (such as before and after reranking).

        The last one is to be answered. messages: those before the question.
        """
        settings = options.settings(self.settings)
        self.engine.check_text(len(question.text))  # raises before the search
        turns, begun = past_turns(messages), time.perf_counter()
        collections = self._collections(options)
        has_earlier_sources = any(turn.sources for turn in turns)
        complete = (turn.question for turn in reversed(turns) if not is_incomplete(turn.question))
        for found, notice in self._search(
            collections, question.text, next(complete, ""), settings.top_k, options
        ):
            retrieve_ms = (time.perf_counter() - begun) * 1e3
            wording = wording_for(options.mode, settings.system, bool(found) or has_earlier_sources)
            if not found:
                without_passages = options.mode == "chat" and not has_earlier_sources
                notice = notice or _nothing_found_notice(collections, without_passages)
                if options.mode == "documents":  # earlier questions' passages do not answer this one
                    yield PreparedQuestion(question, settings, None, notice, retrieve_ms)
                    continue
            room_tokens = self.engine.context_window - settings.answer_tokens
            context = fit(self.engine, room_tokens, wording, messages, question.text, found, options.cancel)
            missing = _missing_codes_notice(question.text, context.all_sources)
            notices = " ".join(text for text in (notice, missing, context.notice) if text) or None
            yield PreparedQuestion(question, settings, context, notices, retrieve_ms)

    def _answer_stream(
        self, stages: Iterator[PreparedQuestion], client: str, chats: Chats | None
    ) -> AnswerStream:
        """Start the answer to the last stage; it is stored in `chats`, if given."""
        engine, stream = self.engine, None
        prepared = next(stages)
        if prepared.context is not None:
            session = None if chats is None else self._session(prepared.question.chat_id)
            arguments = prepared.settings.answering | {"session": session, "client": client}
            # On a CPU the reranker and a prefill would only slow each other down.
            if prepared.settings.reranker and engine.device != "cpu":
                prepared, stream = self._stream_in_stages(prepared, stages, arguments)
            else:
                prepared = [prepared, *stages][-1]
                stream = engine.stream(prepared.prompt, **arguments)
        answer = AnswerStream(prepared, engine, stream, chats)
        self._answers.add(answer)
        return answer

    def _stream_in_stages(
        self, prepared: PreparedQuestion, stages: Iterator[PreparedQuestion], arguments: dict[str, Any]
    ) -> "tuple[PreparedQuestion, Stream]":
        """Start the stream, and return it with the last stage.

        The device prefills the prompt of each stage while the next stage is prepared.
        """
        prompts = SimpleQueue[Prompt | None]()
        stream = self.engine.stream_staged(iter(prompts.get, None), **arguments)
        try:
            prompts.put(prepared.prompt)
            for prepared in stages:
                prompts.put(prepared.prompt)
        except BaseException:
            stream.stop()
            prompts.put(prepared.prompt)  # wakes the stream, which then sees that it was stopped
            raise
        prompts.put(None)
        return prepared, stream

    def _search(
        self, collections: Sequence[str], question: str, previous: str, top_k: int, options: AskOptions
    ) -> Iterator[tuple[list[AnswerSource], str | None]]:
        """The best passages of all collections after each stage, and a notice about empty collections.

        previous: the last complete question before this one, which may refer to it.
        """
        names = list(dict.fromkeys(collections))
        if unknown := [name for name in names if name not in self._workspaces.names()]:
            raise UsageError(f"Asking: there is no collection {_quoted(unknown)}. Choose one that exists.")
        filled = [name for name in names if self._workspaces.library.has_passages(name)]
        empty = [name for name in names if name not in filled]
        notice = f"Nothing has been ingested in {_quoted(empty)} yet." if empty else None
        workspaces, documents = [self._workspaces.of(name) for name in filled], options.documents
        for found in search_in_stages(workspaces, question, top_k, previous, options.cancel, documents):
            yield found, notice

    def _collections(self, options: AskOptions) -> Sequence[str]:
        """The collections to search. Raises LibraryError if a chosen document is missing, or none of them has text."""
        if not options.documents:
            return options.collections or (self.settings.collection,)
        found = self._workspaces.library.documents_with(options.documents)
        if len(found) < len(set(options.documents)):
            raise LibraryError("Asking: a chosen document is no longer in the library. Choose another.")
        if not any(document.passages for document in found.values()):
            named = ", ".join(document.name for document in found.values())
            raise LibraryError(f"Asking: nothing was read of {named}. The list of documents says why.")
        return [document.collection for document in found.values()]

    def _rebuild_prompt(self, answer: ChatMessage, messages: Sequence[ChatMessage]) -> Prompt:
        """Build the prompt of a stored answer again. messages: all messages of its conversation."""
        question = next(q for q, a in questions_with_answers(messages) if a.id == answer.id)
        turns = past_turns([message for message in messages if message.id < question.id])
        turns = [turn for turn in turns if turn.id >= answer.report["first_id"]]
        wording = PromptWording(answer.report["system"], answer.report["closing"])
        return build_prompt(self.engine, wording, turns, question.text, new_sources(answer))

    def _session(self, chat_id: int) -> "Session":
        """The conversation's KV in memory. Frees that of the least recently used conversations above MAX_SESSIONS."""
        from ragblend.engine.prompts.session import Session

        with self._lock:
            session = self._sessions.setdefault(chat_id, Session())
            self._sessions.move_to_end(chat_id)
            while len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
            return session


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _missing_codes_notice(question: str, sources: Sequence[AnswerSource]) -> str | None:
    """Name the question's codes that no source has: a small model would answer about a similar code instead."""
    codes = missing_codes(question, (f"{source.label}\n{source.text}" for source in sources))
    return f"No passage that was found has {', '.join(codes)}." if codes else None


def _nothing_found_notice(collections: Sequence[str], without_passages: bool) -> str:
    notice = f"Nothing about this was found in {_quoted(collections)}."
    return f"{notice} The answer is the model's own." if without_passages else notice
