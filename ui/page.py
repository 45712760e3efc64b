"""The page: its header, its tabs, and what is drawn again while documents are being read.   <- START HERE"""

from typing import Any

import gradio as gr

from ragblend.app.cli.common import plural
from ragblend.app.library.jobs import QueueOverview
from ragblend.app.settings import Settings
from ragblend.ui import tab_chat, tab_compare, tab_library, tab_settings, tab_store, views
from ragblend.ui.callback_checks import check_callbacks, dismissed
from ragblend.ui.page_context import EACH, QUEUED, QUICK, PageContext, drawn
from ragblend.ui.sessions import PARTS, session_of

TICK_S = 1.5


def build_page(context: PageContext) -> gr.Blocks:
    """The whole page over one services; nothing is served by it yet."""
    with gr.Blocks(title="RAGBlend", analytics_enabled=False, fill_width=True) as page:
        trouble = PageLayout(context, page).trouble
    check_callbacks(page, trouble)
    return page


class PageLayout:
    """Lays the page out; its callbacks are those of the page itself: when it opens, while it is open, when it goes."""

    def __init__(self, context: PageContext, page: gr.Blocks) -> None:
        self._context = context
        self.header = drawn("rb-header", views.frame.header(), acts=False)
        self.banner = drawn("rb-banner", acts=False)
        self.trouble = drawn("rb-trouble")
        with gr.Tabs(elem_id="rb-tabs"):
            with gr.Tab("Chat", id="chat"):
                self.chat = tab_chat.ChatTab(context)
            with gr.Tab("Library", id="library") as library_tab:
                self.library = tab_library.LibraryTab(context)
            with gr.Tab("Compare", id="compare"):
                self.compare = tab_compare.CompareTab(context)
            with gr.Tab("Store", id="store") as store_tab:
                tab_store.StoreTab(context, store_tab)
            with gr.Tab("Settings", id="settings") as settings_tab:
                tab_settings.SettingsTab(context, settings_tab)
        self._connect(page, library_tab)

    def _connect(self, page: gr.Blocks, library_tab: gr.Tab) -> None:
        chat, library, frame = self.chat, self.library, [self.header, self.banner]
        asked = [chat.collections, self.compare.collection]
        opening = [*frame, *asked, chat.chats, chat.hello, chat.transcript, chat.export, library.collection]
        page.load(self.load, None, [*opening, *library.drawn], **QUICK)
        library.collection.change(self.choices, asked, asked, **QUICK)
        library_tab.select(library.refresh, library.view, library.drawn, **QUICK)
        library.documents.submit(chat.digest, None, chat.streamed, **QUEUED | EACH)
        inputs, moving = [library.seen, *library.view], [*frame, chat.hello]
        gr.Timer(TICK_S).tick(self.tick, inputs, [*moving, *library.drawn], **QUICK)
        page.unload(self.gone)
        self.trouble.click(dismissed, None, None, **QUICK)

    def load(self, request: gr.Request) -> dict[Any, Any]:
        names = self._context.services.workspaces.names()
        chosen = names[0]
        self._context.sessions.show(session_of(request), None)
        return {
            **self._frame(),
            self.chat.collections: gr.update(choices=names, value=[chosen], visible=len(names) > 1),
            self.library.collection: gr.update(choices=names, value=chosen),
            self.compare.collection: gr.update(choices=names, value=chosen),
            **self.chat.opening(),
            **self.library.refresh(chosen, "", "", 0),
        }

    def choices(self, asked: list[str] | None, compared: str | None) -> dict[Any, Any]:
        """The collections that can be asked, after one was made or removed; what was chosen stays, if it is there."""
        names = self._context.services.workspaces.names()
        kept = [name for name in asked or () if name in names] or names[:1]
        return {
            self.chat.collections: gr.update(choices=names, value=kept, visible=len(names) > 1),
            self.compare.collection: gr.update(
                choices=names, value=compared if compared in names else names[0]
            ),
        }

    def tick(self, seen: str, *view: Any) -> dict[Any, Any]:
        """Draw the queue again where it has moved since `seen`; the documents too when a file was begun or finished.

        Not before the page has been drawn for the first time: it would be said to be ready, and then overwritten.
        """
        if not seen:
            return {self.header: gr.skip()}
        overview = self._context.services.jobs.overview()
        startup = self._context.startup
        now = f"{fingerprint(overview, view)} {startup.is_loading} {startup.problem}"
        if now == seen:
            return {self.header: gr.skip()}
        updates: dict[Any, Any] = {self.library.queue: self.library.progress()[self.library.queue]}
        if listed_in(now) != listed_in(seen):
            updates |= self.library.refresh(*view)
            if overview.finished:
                updates[self.chat.hello] = self.chat.welcome()
        return updates | {**self._frame(), self.library.seen: now}

    def _frame(self) -> dict[Any, Any]:
        services, startup = self._context.services, self._context.startup
        overview = services.jobs.overview()
        line = state_line(overview, services.settings, startup.is_loading)
        return {
            self.header: views.frame.header(line),
            self.banner: views.frame.banner(startup.problem, overview.waiting),
        }

    def gone(self, request: gr.Request) -> None:
        for part in PARTS:
            self._context.sessions.close(session_of(request, part))


def state_line(overview: QueueOverview, settings: Settings, is_loading: bool = False) -> str:
    """What is being done, else which model answers."""
    if overview.total > overview.finished:
        word = "paused at" if overview.paused else "waiting at" if overview.waiting else "reading"
        return f"{word} {overview.finished:,} of {plural(overview.total, 'file')}"
    if overview.kv and overview.kv.phase == "converting":
        return "converting the model for its first use …"
    if is_loading:
        return "loading the model …"
    return "the bundled model answers" if settings.model == "default" else f"{settings.model} answers"


def fingerprint(overview: QueueOverview, view: tuple[Any, ...] = ()) -> str:
    """Another text as soon as there is anything new to draw; its first line is what the list depends on.

    view: the collection, search, state and page that are shown. A list that was asked for in one view may come when
    another is shown already; the next look finds another text then, and it is drawn again.
    """
    job = overview.current
    now = (job.id, job.state, job.done, job.total) if job else ()
    return (
        f"{overview.changes} {view!r}\n{overview.finished} {overview.total} {overview.paused} {overview.waiting} "
        f"{sorted(overview.counts.items())} {now} {overview.kv} {overview.kv_message} {overview.is_idle}"
    )


def listed_in(fingerprint: str) -> str:
    """What of it moves when a file is begun, or ends, in whatever state, or another view is shown."""
    return fingerprint.partition("\n")[0]
