"""The page: its header, its tabs, and the updates while documents are being ingested.

Main path: a click -> a callback of a tab -> the app's services -> `views`, which draws the result.
"""

from typing import Any

import gradio as gr

from ragblend.app.library.jobs import QueueOverview
from ragblend.app.models import OFFLINE_DEMO
from ragblend.app.settings import Settings
from ragblend.app.words import plural
from ragblend.ui import tab_chat, tab_compare, tab_library, tab_settings, tab_store, views
from ragblend.ui.callback_checks import check_callbacks, dismiss
from ragblend.ui.page_context import (
    DIRECT_CALL,
    EVERY_CLICK,
    QUEUED_CALL,
    PageContext,
    Updates,
    html_component,
)
from ragblend.ui.page_sessions import PARTS, session_of
from ragblend.ui.viewer import Viewer

TICK_S = 1.5


def build_page(context: PageContext) -> gr.Blocks:
    """Build the whole page; it is not served yet."""
    with gr.Blocks(title="RAGBlend", analytics_enabled=False, fill_width=True) as page:
        error_box = PageLayout(context, page).error_box
    check_callbacks(page, error_box)
    return page


class PageLayout:
    """Lays the page out; its own callbacks run when the page opens, periodically, and when it closes."""

    def __init__(self, context: PageContext, page: gr.Blocks) -> None:
        self._context = context
        self.header = html_component("rb-header", views.frame.header())
        self.banner = html_component("rb-banner", has_buttons=False)
        self.error_box = html_component("rb-trouble")
        viewer = Viewer(context.services)
        with gr.Tabs(elem_id="rb-tabs"):
            with gr.Tab("Chat", id="chat"):
                self.chat = tab_chat.ChatTab(context, viewer)
            with gr.Tab("Library", id="library") as library_tab:
                self.library = tab_library.LibraryTab(context, viewer)
            with gr.Tab("Compare", id="compare"):
                self.compare = tab_compare.CompareTab(context)
            with gr.Tab("Store", id="store") as store_tab:
                tab_store.StoreTab(context, store_tab)
            with gr.Tab("Settings", id="settings") as settings_tab:
                tab_settings.SettingsTab(context, settings_tab)
        self._connect(page, library_tab)

    def _connect(self, page: gr.Blocks, library_tab: gr.Tab) -> None:
        chat, library, frame = self.chat, self.library, [self.header, self.banner]
        collections = [chat.collections, self.compare.collection]
        loaded = [
            *frame,
            *collections,
            chat.chats,
            chat.hello,
            chat.transcript,
            chat.export,
            library.collection,
        ]
        page.load(self.load, None, [*loaded, *library.refreshed], **DIRECT_CALL)
        library.collection.change(self.update_collections, collections, collections, **DIRECT_CALL)
        library_tab.select(library.refresh, library.view, library.refreshed, **DIRECT_CALL)
        library.documents.submit(chat.digest, None, chat.streamed, **QUEUED_CALL | EVERY_CLICK)
        library.documents.click(
            chat.ask_document, None, [chat.document_id, chat.asked_document], **DIRECT_CALL | EVERY_CLICK
        )
        inputs, outputs = [library.fingerprint, *library.view], [*frame, chat.hello, *library.refreshed]
        gr.Timer(TICK_S).tick(self.tick, inputs, outputs, **DIRECT_CALL)
        page.unload(self.close)
        self.error_box.click(dismiss, None, None, **DIRECT_CALL)

    def load(self, request: gr.Request) -> Updates:
        names = self._context.services.workspaces.names()
        self._context.sessions.set_shown(session_of(request), None)
        return {
            **self._frame(),
            **self.update_collections([], None),
            self.library.collection: gr.update(choices=names, value=names[0]),
            **self.chat.load(request),
            **self.library.refresh(names[0], "", "", 0),
        }

    def update_collections(self, in_chat: list[str], in_compare: str | None) -> Updates:
        """The collections to choose from, after one was created or removed; a chosen one stays chosen if it exists."""
        names = self._context.services.workspaces.names()
        kept = [name for name in in_chat if name in names] or names[:1]
        compared = in_compare if in_compare in names else names[0]
        return {
            self.chat.collections: gr.update(choices=names, value=kept, visible=len(names) > 1),
            self.compare.collection: gr.update(choices=names, value=compared),
        }

    def tick(self, shown: str, *view: Any) -> Updates:
        """Draw the queue if it has changed, and the documents if a file was started or finished.

        shown: the fingerprint of what the page shows, empty before it is drawn for the first time; that drawing would
        overwrite this one.
        """
        if not shown:
            return {self.header: gr.skip()}
        overview = self._context.services.jobs.overview()
        startup = self._context.startup
        undoable = [document.id for document in self._context.services.deletions.pending()]
        current = f"{fingerprint(overview, (*view, undoable))} {startup.is_loading} {startup.problem}"
        if current == shown:
            return {self.header: gr.skip()}
        updates: Updates = {self.library.queue: views.library.queue(overview)}
        if documents_part(current) != documents_part(shown):
            updates |= self.library.refresh(*view)
            if overview.finished:
                updates[self.chat.hello] = self.chat.welcome()
        return updates | {**self._frame(), self.library.fingerprint: current}

    def _frame(self) -> Updates:
        services, startup = self._context.services, self._context.startup
        overview = services.jobs.overview()
        line = state_line(overview, services.settings, startup.is_loading)
        return {
            self.header: views.frame.header(line),
            self.banner: views.frame.banner(startup.problem, overview.waiting),
        }

    def close(self, request: gr.Request) -> None:
        for part in PARTS:
            self._context.sessions.close(session_of(request, part))


def state_line(overview: QueueOverview, settings: Settings, is_loading: bool = False) -> str:
    """The current work, else the model in use."""
    if overview.total > overview.finished:
        word = "paused at" if overview.paused else "waiting at" if overview.waiting else "reading"
        return f"{word} {overview.finished:,} of {plural(overview.total, 'file')}"
    if overview.kv and overview.kv.phase == "converting":
        return "converting the model for its first use …"
    if is_loading:
        return "loading the model …"
    return f"model: {OFFLINE_DEMO}" if settings.model == "default" else f"model: {settings.model}"


def fingerprint(overview: QueueOverview, view: tuple[Any, ...] = ()) -> str:
    """A text that changes whenever there is something new to draw; the list of documents depends on its first line.

    view: the collection, search, state, page and deletions that are shown. If a list arrives after the user has changed
    the view, the next tick finds another fingerprint and draws the list again.
    """
    job = overview.current
    now = (job.id, job.state, job.done, job.total) if job else ()
    return (
        f"{overview.changes} {view!r}\n{overview.finished} {overview.total} {overview.paused} {overview.waiting} "
        f"{sorted(overview.counts.items())} {now} {overview.kv} {overview.kv_message} {overview.is_idle}"
    )


def documents_part(fingerprint: str) -> str:
    """The part that changes when a file starts or ends, or when the view changes."""
    return fingerprint.partition("\n")[0]
