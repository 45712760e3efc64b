"""The Chat tab: conversations, the running answer, its sources, and its details under the hood. Wiring only."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import gradio as gr

from ragblend.app import samples
from ragblend.app.answering.answer_stream import AnswerStream
from ragblend.app.answering.citations import cite
from ragblend.app.answering.conversation import AskOptions
from ragblend.app.answering.highlight import cited_place, locate_source
from ragblend.app.library.documents import DocumentState
from ragblend.app.model_offers import Offer, measure_machine, offers
from ragblend.engine.model.checkpoints import DEFAULT
from ragblend.kvstore.errors import Cancelled, RagBlendError
from ragblend.ui import views
from ragblend.ui.coalesce import coalesced
from ragblend.ui.page_context import (
    DIRECT_CALL,
    EVERY_CLICK,
    QUEUED_CALL,
    UNLABELLED,
    PageContext,
    Updates,
    html_component,
    search_field,
)
from ragblend.ui.page_sessions import MEASUREMENT, PageRequest, session_of
from ragblend.ui.viewer import Viewer
from ragblend.ui.views import problem

LOG = logging.getLogger(__name__)
CHATS_PER_PAGE = 50
SOURCE, HOOD = "source", "hood"


class ChatTab:
    """Lays the tab out and connects it; callbacks call the app and draw its results with `views`."""

    def __init__(self, context: PageContext, viewer: Viewer) -> None:
        self._context, self._services, self._sessions = context, context.services, context.sessions
        with gr.Row(elem_id="rb-chat"):
            with gr.Column(elem_id="rb-side", scale=0):
                self._lay_out_conversations()
            with gr.Column(elem_id="rb-middle"):
                self._lay_out_conversation(context.services.workspaces.names())
            with gr.Column(elem_id="rb-more", scale=0):
                html_component("rb-more-close", views.parts.close_cover())
                with gr.Tabs(elem_id="rb-panel") as self.panel:
                    with gr.Tab("Source", id=SOURCE):
                        self.source = html_component("rb-source", views.passage.empty())
                    with gr.Tab("Under the hood", id=HOOD):
                        self.hood = html_component("rb-hood", views.hood.empty())
        self.chat_id = gr.State(None)
        self.document_id = gr.State("")  # of the only document to search; "": search all
        self._connect()
        self.source.click(viewer.show, None, [viewer.component], **DIRECT_CALL)

    def _lay_out_conversations(self) -> None:
        html_component("rb-side-close", views.parts.close_cover())
        self.new_button = gr.Button("New conversation", elem_id="rb-new", size="sm")
        self.search_box = search_field("Search  ( / )", "Search conversations", "rb-chat-search")
        self.chats = html_component("rb-chats")
        self.export = html_component("rb-export", has_buttons=False)

    def _lay_out_conversation(self, names: list[str]) -> None:
        """The transcript and the form for a question; names: the collections."""
        with gr.Column(elem_id="rb-scroll"):
            # Shown while there is no conversation. A component of its own, so that a redraw hides no transcript.
            self.hello = html_component("rb-hello")
            self.transcript = html_component("rb-transcript")
            self.live = html_component("rb-live", has_buttons=False)
        with gr.Column(elem_id="rb-composer"):
            self.asked_document = html_component("rb-asked-document")
            self.question = gr.Textbox(
                "",
                placeholder="Ask your documents",
                label="Your question",
                lines=2,
                max_lines=8,
                elem_id="rb-question",
                autofocus=True,
                max_length=20_000,
                **UNLABELLED,
            )
            with gr.Row(elem_id="rb-choices"):
                self.collections = gr.Dropdown(
                    names,
                    value=names[:1],
                    visible=len(names) > 1,
                    multiselect=True,
                    label="Collections",
                    elem_id="rb-collections",
                    scale=3,
                    min_width=140,
                    **UNLABELLED,
                )
                modes = [("Documents only", "documents"), ("Chat", "chat")]
                self.mode = gr.Radio(
                    modes,
                    value="documents",
                    label="Mode",
                    elem_id="rb-mode",
                    scale=3,
                    min_width=200,
                    **UNLABELLED,
                )
                html_component("rb-attach", views.chat.attach())
                self.send_button = gr.Button(
                    "Send", variant="primary", elem_id="rb-send", scale=1, min_width=84
                )
                self.stop_button = gr.Button("Stop", elem_id="rb-stop", scale=1, min_width=84, visible=False)

    def _connect(self) -> None:
        choices = [self.chat_id, self.collections, self.mode, self.document_id]
        panel = [self.hood, self.panel]
        answered = [self.transcript, self.live, self.question, self.chat_id, self.chats]
        self.streamed = [self.hello, *answered, self.send_button, self.stop_button, *panel, self.export]
        self.send_button.click(self.send, [self.question, *choices], self.streamed, **QUEUED_CALL)
        self.transcript.submit(self.again, choices, self.streamed, **QUEUED_CALL)
        self.stop_button.click(self.stop, None, None, **DIRECT_CALL)
        self.asked_document.click(self.ask_all, None, [self.document_id, self.asked_document], **DIRECT_CALL)
        self.hello.click(self.add_samples, None, [self.hello], **DIRECT_CALL)
        opened = [*self.streamed, self.source]
        self.new_button.click(self.new, None, opened, **DIRECT_CALL)
        self.search_box.change(self.search, [self.search_box, self.chat_id], [self.chats], **DIRECT_CALL)
        every_click = QUEUED_CALL | EVERY_CLICK
        self.chats.click(self.click_in_list, [self.chat_id], opened, **every_click)
        in_transcript = [*panel, self.source, self.transcript]
        self.transcript.click(self.click_in_transcript, None, in_transcript, **every_click)
        measuring = QUEUED_CALL | {"concurrency_limit": 4}
        self.hood.click(self.measure, None, [self.hood], **measuring)

    # --- asking

    def send(
        self,
        question: str,
        chat_id: int | None,
        collections: list[str],
        mode: str,
        document: str,
        request: gr.Request,
    ) -> Iterator[Updates]:
        if not question.strip():
            return
        if chat_id is None:
            chat_id = self._services.chats.create().id
        begin = partial(self._services.conversations.ask, chat_id, question)
        yield from self._answer(request, chat_id, question, begin, _options(collections, mode, document))

    def again(
        self,
        chat_id: int | None,
        collections: list[str],
        mode: str,
        document: str,
        event: gr.EventData,
        request: gr.Request,
    ) -> Iterator[Updates]:
        """Answer the last question again, or edit a question and ask it again."""
        if chat_id is None:
            return
        options, conversations = _options(collections, mode, document), self._services.conversations
        if event.act == "edit":
            text = str(event.text)
            begin = partial(conversations.edit, int(event.id), text)
            yield from self._answer(request, chat_id, text, begin, options)
        else:
            yield from self._answer(request, chat_id, "", partial(conversations.regenerate, chat_id), options)

    def ask_document(self, event: gr.EventData) -> Updates:
        """Search only the document that a button of the library names, until `ask_all`."""
        if event.act != "ask-document":
            return {self.document_id: gr.skip()}
        name = views.chat.asked_document(str(event.name))
        return {self.document_id: str(event.id), self.asked_document: name}

    def ask_all(self) -> Updates:
        return {self.document_id: "", self.asked_document: ""}

    def digest(self, event: gr.EventData, request: gr.Request) -> Iterator[Updates]:
        """Summarise a document of the library, in a conversation of its own."""
        services = self._services
        document = services.workspaces.library.documents_with([str(event.id)]).get(str(event.id))
        if document is None:
            return
        chat_id, digest = services.chats.create().id, services.conversations.digest
        question = f"Summarise {document.name}."
        yield from self._answer(request, chat_id, question, lambda _: digest(document, chat_id), AskOptions())

    def _answer(
        self,
        request: gr.Request,
        chat_id: int,
        question: str,
        begin: Callable[[AskOptions], AnswerStream],
        options: AskOptions,
    ) -> Iterator[Updates]:
        """Draw an answer while it is being written, and make the form ready again afterwards, whatever happens.

        begin: searches with these options and starts the answer; Stop cancels it by `options.cancel`.
        """
        page_request = self._sessions.begin(session_of(request))
        ended = partial(self._final_updates, page_request, chat_id, question)
        self._sessions.set_shown(page_request.session, chat_id)
        yield {
            self.chat_id: chat_id,
            self.question: "",
            self.send_button: gr.update(visible=False),
            self.stop_button: gr.update(visible=True),
            self.live: views.chat.live_turn(question, "", "Looking for passages …"),
        }
        try:
            turn = begin(replace(options, cancel=page_request.stopped))
        except Cancelled:  # the conversation says that the question was not answered
            yield ended()
            return
        except RagBlendError as error:
            yield ended(problem(str(error)))
            return
        except Exception:
            yield ended()
            raise
        with page_request.running(turn.stop):
            try:
                yield from self._draw(page_request, chat_id, turn)
            except RagBlendError:
                pass  # it is stored with the answer, and drawn from there
            except Exception:
                LOG.exception("an answer failed")  # stored and drawn as well
        with suppress(RagBlendError):  # only the curve on the Store tab needs it
            self._context.note_hit_counts()
        yield ended()

    def _draw(self, page_request: PageRequest, chat_id: int, turn: AnswerStream) -> Iterator[Updates]:
        def may_draw() -> bool:
            return self._sessions.is_shown(page_request.session, chat_id) and not page_request.is_outdated

        if may_draw():
            listed = self._draw_list(page_request.session, chat_id)
            yield {self.transcript: self._transcript(chat_id, True), self.chats: listed}
        text = ""
        for piece in coalesced(turn):
            text += piece
            if (piece or not text) and may_draw():
                yield {self.live: views.chat.live_turn("", text, "" if text else turn.status, turn.notice)}

    def _final_updates(
        self, page_request: PageRequest, chat_id: int, question: str, note: str = ""
    ) -> Updates:
        if page_request.is_outdated:
            return {self.live: gr.skip()}  # Gradio would repeat the last update
        form_ready = {self.send_button: gr.update(visible=True), self.stop_button: gr.update(visible=False)}
        if not self._sessions.is_shown(page_request.session, chat_id):
            return form_ready
        try:
            return form_ready | self._draw_conversation(page_request.session, chat_id) | {self.live: note}
        except RagBlendError as error:  # the conversation was deleted: keep the question for a new one
            self._sessions.set_shown(page_request.session, None)
            kept_question = {self.question: question or gr.skip()}
            return (
                form_ready
                | self._draw_conversation(page_request.session, None)
                | kept_question
                | {self.live: problem(str(error))}
            )

    def load(self, request: gr.Request) -> Updates:
        first = {self.chats: self._draw_list(session_of(request), None), self.hello: self.welcome()}
        return first | {self.transcript: "", self.export: ""}

    def stop(self, request: gr.Request) -> None:
        self._sessions.stop(session_of(request))

    # --- conversations

    def new(self, request: gr.Request) -> Updates:
        return self._open(request, None) | {self.question: ""}

    def click_in_list(self, chat_id: int | None, event: gr.EventData, request: gr.Request) -> Updates:
        chats, session = self._services.chats, session_of(request)
        try:
            if event.act == "open-chat":
                return self._open(request, int(event.id))
            if event.act == "more-chats":
                search, limit = self._listing(session)
                self._sessions.set_listing(session, search, limit + CHATS_PER_PAGE)
            if event.act == "rename":
                chats.rename(int(event.id), str(event.text))
            if event.act == "delete-chat":
                chats.delete(int(event.id))
                self._services.conversations.forget(int(event.id))
                if int(event.id) == chat_id:
                    return self._open(request, None)
        except RagBlendError as error:
            gr.Warning(str(error))
        return {self.chats: self._draw_list(session, chat_id)}

    def search(self, text: str, chat_id: int | None, request: gr.Request) -> Updates:
        session = session_of(request)
        self._sessions.set_listing(session, text, self._listing(session)[1])
        return {self.chats: self._draw_list(session, chat_id)}

    def _open(self, request: gr.Request, chat_id: int | None) -> Updates:
        session = session_of(request)
        if chat_id is not None:
            self._services.chats.get(chat_id)  # raises before anything is stopped
        self._sessions.stop(session)
        self._sessions.stop(session_of(request, MEASUREMENT))
        self._sessions.set_shown(session, chat_id)
        return {
            **self._draw_conversation(session, chat_id),
            self.live: "",
            self.source: views.passage.empty(),
        }

    def _draw_conversation(self, session: str, chat_id: int | None) -> Updates:
        messages = self._services.chats.messages(chat_id) if chat_id is not None else []
        answers = [message for message in messages if message.role == "assistant"]
        return {
            self.chat_id: chat_id,
            self.hello: gr.skip() if messages else self.welcome(),
            self.transcript: self._transcript(chat_id),
            self.chats: self._draw_list(session, chat_id),
            self.hood: self._hood(answers[-1].id) if answers else views.hood.empty(),
            self.export: views.chat.export_links(chat_id if messages else None),
        }

    def _draw_list(self, session: str, chat_id: int | None) -> str:
        search, limit = self._listing(session)
        if search.strip():
            return views.chat.found_conversations(self._services.chats.search(search), chat_id)
        return views.chat.conversations(*self._services.chats.page(limit=limit), chat_id)

    def _listing(self, session: str) -> tuple[str, int]:
        """What the page searches conversations for, and how many it lists without a search."""
        return self._sessions.listing(session) or ("", CHATS_PER_PAGE)

    def _transcript(self, chat_id: int | None, is_asking: bool = False) -> str:
        messages = self._services.chats.messages(chat_id) if chat_id is not None else []
        if not messages:
            return ""
        cited = [
            cite(m.text, m.sources, m.report.get("unsupported_figures", ()))
            if m.role == "assistant"
            else None
            for m in messages
        ]
        return views.chat.transcript(messages, cited, is_asking)

    def welcome(self) -> str:
        ready = self._services.workspaces.count_documents(DocumentState.DONE)
        questions, note = self._answerable_samples(), self._services.settings.style.note
        return views.chat.welcome(ready, questions, note, [] if ready else self._larger_models())

    def add_samples(self) -> Updates:
        """Ingest the sample documents; the other buttons of an empty conversation work in the browser."""
        try:
            self._services.jobs.add([samples.documents_folder()], self._services.settings.collection)
        except RagBlendError as error:
            return {self.hello: problem(str(error)) + self.welcome()}
        return {self.hello: views.chat.reading_samples()}

    def _larger_models(self) -> Sequence[Offer]:
        """Models of the hub that fit this machine, to suggest while the bundled one is in use."""
        settings = self._services.settings
        if settings.model != DEFAULT or settings.vllm:
            return []
        try:
            return offers(measure_machine(self._services.workspaces.first))
        except RagBlendError:  # such as a missing device, which the banner reports
            return []

    def _answerable_samples(self) -> list[str]:
        """Suggested questions whose documents are in the library: without them, answers would be wrong."""
        library, collection = self._services.workspaces.library, self._services.settings.collection
        found = (library.document(collection, str(path)) for path in samples.documents_folder().iterdir())
        ready = {
            document.name
            for document in found
            if document is not None and document.state is DocumentState.DONE
        }
        return [
            each.question
            for each in samples.questions()
            if each.suggested and ready.issuperset(each.documents)
        ]

    # --- one answer

    def click_in_transcript(self, event: gr.EventData) -> Updates:
        """A click on a citation or on an answer's speed."""
        try:
            if event.act == "cite":
                return {
                    self.source: self._source(int(event.message), int(event.number), str(event.at)),
                    self.panel: gr.Tabs(selected=SOURCE),
                }
            if event.act == "hood":
                return {self.hood: self._hood(int(event.message)), self.panel: gr.Tabs(selected=HOOD)}
        except RagBlendError as error:
            return {self.source: problem(str(error)), self.panel: gr.Tabs(selected=SOURCE)}
        return {self.panel: gr.skip()}

    def _source(self, message_id: int, number: int, at: str) -> str:
        source, place = cited_place(self._services.chats.message(message_id), number, at)
        found = locate_source(self._services.workspaces.library, source, place)
        origin = {"document": source.document_id, "message": message_id, "number": number, "at": at}
        return views.passage.view(source, found, origin, missing=bool(at) and place is None)

    def _hood(self, message_id: int) -> str:
        return views.hood.view(self._services.chats.message(message_id).report, message_id)

    def measure(self, event: gr.EventData, request: gr.Request) -> Iterator[Updates]:
        """Run full prefill of that answer's prompt, and show its time beside the answer's."""
        message_id, message = int(event.message), ""
        page_request = self._sessions.begin(session_of(request, MEASUREMENT))
        yield {
            self.hood: problem("Running full prefill over the same prompt …", "info") + self._hood(message_id)
        }
        try:
            self._services.conversations.measure_full(message_id, page_request.stopped)
        except Cancelled:  # another answer is measured, or another conversation opened
            yield {self.hood: gr.skip()}
            return
        except RagBlendError as error:
            message = problem(str(error))
        yield {self.hood: message + self._hood(message_id)}


def _options(collections: list[str], mode: str, document: str) -> AskOptions:
    documents = (document,) if document else ()
    return AskOptions(
        tuple(collections or ()), "chat" if mode == "chat" else "documents", documents=documents
    )
