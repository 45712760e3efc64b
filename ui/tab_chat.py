"""The Chat tab: conversations, the running answer, sources and under the hood. Wiring only."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import gradio as gr

from ragblend.app import samples
from ragblend.app.citations import cite
from ragblend.app.conversation import AskOptions
from ragblend.app.documents import State
from ragblend.app.highlight import locate_source
from ragblend.app.hood import Hood
from ragblend.app.models import machine_of, offers
from ragblend.engine.files import DEFAULT
from ragblend.kvstore.errors import RagBlendError
from ragblend.ui import layout_chat, views
from ragblend.ui.coalesce import coalesced
from ragblend.ui.context import QUEUED, QUICK, Context
from ragblend.ui.layout_chat import HOOD, SOURCE, Parts
from ragblend.ui.views import problem

if TYPE_CHECKING:
    from ragblend.app.models import Offer
    from ragblend.app.turn import Turn

Updates = dict[Any, Any]
LOG = logging.getLogger(__name__)
CHATS_PER_PAGE = 50


def build(context: Context) -> Parts:
    """Lay the tab out and connect it."""
    with gr.Row(elem_id="rb-chat"):
        side = layout_chat.side()
        middle = layout_chat.middle(context.desk.workspaces.names())
        more = layout_chat.more()
    parts = Parts(chat_id=gr.State(None), limit=gr.State(CHATS_PER_PAGE), **side, **middle, **more)
    _connect(ChatTab(context, parts), parts)
    return parts


def _connect(tab: "ChatTab", parts: Parts) -> None:
    choices = [parts.chat_id, parts.collections, parts.mode]
    streamed = [
        parts.hello,
        parts.transcript,
        parts.live,
        parts.question,
        parts.chat_id,
        parts.chats,
        parts.send,
        parts.stop,
        parts.hood,
        parts.panel,
        parts.export,
    ]
    parts.send.click(tab.send, [parts.question, *choices], streamed, **QUEUED)
    parts.transcript.submit(tab.again, choices, streamed, **QUEUED)
    parts.stop.click(tab.stop, None, None, **QUICK)
    parts.hello.click(tab.add_samples, None, [parts.hello], **QUICK)
    opened = [*streamed, parts.source]
    parts.new.click(tab.new, None, opened, **QUICK)
    parts.search.change(
        tab.search,
        [parts.search, parts.chat_id, parts.limit],
        [parts.chats],
        trigger_mode="always_last",
        **QUICK,
    )
    parts.chats.click(
        tab.in_list,
        [parts.chat_id, parts.search, parts.limit],
        [*opened, parts.limit],
        concurrency_limit=None,
        show_progress="hidden",
    )
    parts.transcript.click(
        tab.in_transcript,
        [parts.chat_id],
        [parts.panel, parts.source, parts.hood, parts.transcript],
        concurrency_limit=None,
        show_progress="hidden",
        trigger_mode="multiple",
    )
    parts.hood.click(tab.measure, [parts.chat_id], [parts.hood], concurrency_limit=4, show_progress="hidden")


class ChatTab:
    """The callbacks: they call the app and hand what it gives to the functions that draw."""

    def __init__(self, context: Context, parts: Parts) -> None:
        self._context, self._parts = context, parts
        self._desk, self._sessions = context.desk, context.sessions

    # --- asking

    def send(
        self, question: str, chat_id: int | None, collections: list[str], mode: str, request: gr.Request
    ) -> Iterator[Updates]:
        if not question.strip():
            return
        if chat_id is None:
            chat_id = self._desk.chats.create().id
        ask = self._desk.conversations.ask
        options = _options(collections, mode)
        yield from self._answer(request, chat_id, question, lambda: ask(chat_id, question, options))

    def again(
        self, chat_id: int | None, collections: list[str], mode: str, event: gr.EventData, request: gr.Request
    ) -> Iterator[Updates]:
        """Regenerate the last answer, or edit a question and ask it anew."""
        if chat_id is None:
            return
        options, conversations = _options(collections, mode), self._desk.conversations
        if event.act == "edit":
            message_id, text = int(event.id), str(event.text)
            yield from self._answer(
                request, chat_id, text, lambda: conversations.edit(message_id, text, options)
            )
        else:
            yield from self._answer(request, chat_id, "", lambda: conversations.regenerate(chat_id, options))

    def _answer(
        self, request: gr.Request, chat_id: int, question: str, begin: "Callable[[], Turn]"
    ) -> Iterator[Updates]:
        """Draw a turn while it is being answered; whatever happens, the page is as before afterwards."""
        parts, session = self._parts, request.session_hash or ""
        self._sessions.begin(session)
        self._sessions.show(session, chat_id)
        yield {
            parts.chat_id: chat_id,
            parts.question: "",
            parts.send: gr.update(visible=False),
            parts.stop: gr.update(visible=True),
            parts.live: views.chat.live_turn(question, "", "Looking for passages …"),
        }
        try:
            turn = begin()
        except RagBlendError as error:
            yield self._ended(session, chat_id, problem(str(error)))
            return
        except Exception:
            yield self._ended(session, chat_id, "")
            raise
        try:
            self._sessions.run(session, turn)
            yield from self._draw(session, chat_id, turn)
        except RagBlendError:
            pass  # it is stored with the answer, and drawn from there
        except Exception:
            LOG.exception("an answer failed")  # stored and drawn as well
        except GeneratorExit:  # the page went away
            turn.stop()
            raise
        finally:
            turn.stop()
            self._sessions.end(session, turn)
        self._note_store()
        yield self._ended(session, chat_id, "")

    def _note_store(self) -> None:
        with suppress(RagBlendError):  # it is a curve on another tab, and no reason to fail
            self._context.note_store()

    def _draw(self, session: str, chat_id: int, turn: "Turn") -> Iterator[Updates]:
        parts = self._parts
        if self._sessions.shows(session, chat_id):
            yield {parts.transcript: self._transcript(chat_id, True), parts.chats: self._chats(chat_id)}
        reading = f"Reading {len(turn.sources)} passages …" if turn.sources else "Thinking …"
        text = ""
        for piece in coalesced(turn):
            text += piece
            if (piece or not text) and self._sessions.shows(session, chat_id):
                yield {parts.live: views.chat.live_turn("", text, "" if text else reading, turn.notice)}

    def _ended(self, session: str, chat_id: int, note: str) -> Updates:
        parts = self._parts
        resting = {parts.send: gr.update(visible=True), parts.stop: gr.update(visible=False)}
        if not self._sessions.shows(session, chat_id):
            return resting
        return resting | self._shown(chat_id) | {parts.live: note}

    def opening(self) -> Updates:
        """What a page shows when it opens."""
        parts = self._parts
        return {
            parts.chats: self._chats(None),
            parts.hello: self.welcome(),
            parts.transcript: "",
            parts.export: "",
        }

    def stop(self, request: gr.Request) -> None:
        self._sessions.stop(request.session_hash or "")

    # --- conversations

    def new(self, request: gr.Request) -> Updates:
        return self._open(request, None) | {self._parts.question: ""}

    def in_list(
        self, chat_id: int | None, search: str, limit: int, event: gr.EventData, request: gr.Request
    ) -> Updates:
        """A click in the list of conversations."""
        chats, parts = self._desk.chats, self._parts
        try:
            if event.act == "open-chat":
                return self._open(request, int(event.id))
            if event.act == "more-chats":
                return {
                    parts.limit: limit + CHATS_PER_PAGE,
                    parts.chats: self._chats(chat_id, search, limit + CHATS_PER_PAGE),
                }
            if event.act == "rename":
                chats.rename(int(event.id), str(event.text))
            if event.act == "delete-chat":
                chats.delete(int(event.id))
                self._desk.conversations.forget(int(event.id))
                if int(event.id) == chat_id:
                    return self._open(request, None)
        except RagBlendError as error:
            gr.Warning(str(error))
        return {parts.chats: self._chats(chat_id, search, limit)}

    def search(self, text: str, chat_id: int | None, limit: int) -> Updates:
        return {self._parts.chats: self._chats(chat_id, text, limit)}

    def _open(self, request: gr.Request, chat_id: int | None) -> Updates:
        session = request.session_hash or ""
        self._sessions.stop(session)
        self._sessions.show(session, chat_id)
        return {**self._shown(chat_id), self._parts.live: "", self._parts.source: views.passage.empty()}

    def _shown(self, chat_id: int | None) -> Updates:
        """Everything that shows a conversation."""
        parts, messages = self._parts, self._desk.chats.messages(chat_id) if chat_id is not None else []
        answers = [message for message in messages if message.role == "assistant"]
        return {
            parts.chat_id: chat_id,
            parts.hello: gr.skip() if messages else self.welcome(),
            parts.transcript: self._transcript(chat_id),
            parts.chats: self._chats(chat_id),
            parts.hood: self._hood(answers[-1].id) if answers else views.hood.empty(),
            parts.export: views.chat.export_links(chat_id if messages else None),
        }

    def _chats(self, chat_id: int | None, search: str = "", limit: int = CHATS_PER_PAGE) -> str:
        if search.strip():
            return views.chat.found_conversations(self._desk.chats.search(search), chat_id)
        return views.chat.conversations(self._desk.chats.page(limit=limit), chat_id)

    def _transcript(self, chat_id: int | None, is_asking: bool = False) -> str:
        messages = self._desk.chats.messages(chat_id) if chat_id is not None else []
        if not messages:
            return ""
        cited = [cite(m.text, m.sources) if m.role == "assistant" else None for m in messages]
        return views.chat.transcript(messages, cited, is_asking)

    def welcome(self) -> str:
        workspaces = self._desk.workspaces
        library = workspaces.first.library
        ready = sum(library.counts_by_state(name).get("done", 0) for name in workspaces.names())
        questions = self._answerable_samples()
        note = workspaces.settings.manner.note
        return views.chat.welcome(ready, questions, note, [] if ready else self._larger_models())

    def add_samples(self) -> str:
        """The one thing of what an empty conversation offers that is not done in the browser."""
        settings = self._desk.workspaces.settings
        try:
            self._desk.jobs.add([samples.documents_folder()], settings.collection)
        except RagBlendError as error:
            return problem(str(error)) + self.welcome()
        return views.chat.reading_samples()

    def _larger_models(self) -> "Sequence[Offer]":
        """What the newcomer is told of: those of the hub that fit this machine, where the bundled one is in use."""
        workspaces = self._desk.workspaces
        if workspaces.settings.model != DEFAULT:
            return []
        workspace = workspaces.first
        try:
            return offers(machine_of(workspace))
        except RagBlendError:  # such as a device that is gone: the banner says that
            return []

    def _answerable_samples(self) -> list[str]:
        """Suggested ones whose documents are in the library: others would be answered wrongly."""
        settings = self._desk.workspaces.settings
        library, folder = self._desk.workspaces.library, samples.documents_folder()
        found = (library.document(settings.collection, str(path)) for path in folder.iterdir())
        there = {document.name for document in found if document is not None and document.state is State.DONE}
        return [
            each.question
            for each in samples.questions()
            if each.suggested and there.issuperset(each.documents)
        ]

    # --- one answer

    def in_transcript(self, chat_id: int | None, event: gr.EventData) -> Updates:
        """A click on a citation or on an answer's speed."""
        parts = self._parts
        try:
            if event.act == "cite":
                return {
                    parts.source: self._source(int(event.message), int(event.number), str(event.at)),
                    parts.panel: gr.Tabs(selected=SOURCE),
                }
            if event.act == "hood":
                return {parts.hood: self._hood(int(event.message)), parts.panel: gr.Tabs(selected=HOOD)}
        except RagBlendError as error:
            return {parts.source: problem(str(error)), parts.panel: gr.Tabs(selected=SOURCE)}
        return {parts.panel: gr.skip()}

    def _source(self, message_id: int, number: int, at: str) -> str:
        """at: where the citation is in the answer; "" for the first of that number that has a sentence."""
        message = self._desk.chats.message(message_id)
        source = next((each for each in message.sources if each.number == number), None)
        if source is None:
            return problem(f"Source {number} is no longer here.", "warning")
        library = self._desk.workspaces.of(source.collection).library
        cited = [c for c in cite(message.text, message.sources).citations if c.number == number]
        places = [c.place for c in cited if at in ("", str(c.start)) and c.place is not None]
        found = locate_source(library, source, places[0] if places else None)
        return views.passage.view(source, found, missing=bool(at) and not places)

    def _hood(self, message_id: int) -> str:
        return views.hood.view(Hood.from_json(self._desk.chats.message(message_id).report), message_id)

    def measure(self, chat_id: int | None, event: gr.EventData) -> Iterator[Updates]:
        """Run full prefill of that answer's prompt, and show it beside the answer's own."""
        parts, message_id = self._parts, int(event.message)
        yield {
            parts.hood: problem("Running full prefill over the same prompt …", "info")
            + self._hood(message_id)
        }
        try:
            self._desk.conversations.measure_full(message_id)
        except RagBlendError as error:
            yield {parts.hood: problem(str(error)) + self._hood(message_id)}
            return
        yield {parts.hood: self._hood(message_id)}


def _options(collections: list[str], mode: str) -> AskOptions:
    return AskOptions(collections=tuple(collections or ()), mode="chat" if mode == "chat" else "documents")
