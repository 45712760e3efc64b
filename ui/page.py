"""The page: its header, its tabs, and what is drawn again while documents are being read.   <- START HERE"""

from typing import Any

import gradio as gr

from ragblend.ui import (
    layout_chat,
    layout_library,
    render_frame,
    tab_chat,
    tab_compare,
    tab_library,
    tab_settings,
    tab_store,
)
from ragblend.ui.context import QUICK, Context, drawn

TICK_S = 1.5


def build_page(context: Context) -> gr.Blocks:
    """The whole page over one desk; nothing is served by it yet."""
    with gr.Blocks(title="RAGBlend", analytics_enabled=False, fill_width=True) as page:
        header = drawn("rb-header", render_frame.header(), acts=False)
        banner = drawn("rb-banner", acts=False)
        with gr.Tabs(elem_id="rb-tabs"):
            with gr.Tab("Chat", id="chat"):
                chat = tab_chat.build(context)
            with gr.Tab("Library", id="library") as library_tab:
                library = tab_library.build(context)
            with gr.Tab("Compare", id="compare"):
                compare = tab_compare.build(context)
            with gr.Tab("Store", id="store") as store_tab:
                tab_store.build(context, store_tab)
            with gr.Tab("Settings", id="settings") as settings_tab:
                tab_settings.build(context, settings_tab)
        _connect(
            page, Frame(context, header, banner, gr.State(""), chat, library, compare.collection), library_tab
        )
    return page


def _connect(page: gr.Blocks, frame: "Frame", library_tab: gr.Tab) -> None:
    chat, library = frame.chat_parts, frame.library_parts
    view = [library.collection, library.search, library.state, library.offset]
    drawn_there = [
        library.queue,
        library.jobs,
        library.watched,
        library.documents,
        library.offset,
        library.tools,
    ]
    first = [
        frame.header,
        frame.banner,
        chat.collections,
        chat.chats,
        chat.transcript,
        chat.export,
        library.collection,
        frame.compared,
    ]
    page.load(frame.load, None, [*first, *drawn_there], **QUICK)
    asked = [chat.collections, frame.compared]
    library.collection.change(frame.choices, asked, asked, **QUICK)
    library_tab.select(frame.library.refresh, view, drawn_there, **QUICK)
    gr.Timer(TICK_S).tick(
        frame.tick,
        [frame.seen, chat.chat_id, *view],
        [frame.seen, frame.header, frame.banner, chat.transcript, *drawn_there],
        **QUICK,
    )
    page.unload(frame.gone)


class Frame:
    """Callbacks of the page itself: when it opens, while it is open, when it goes."""

    def __init__(
        self,
        context: Context,
        header: gr.HTML,
        banner: gr.HTML,
        seen: gr.State,
        chat: layout_chat.Parts,
        library: layout_library.Parts,
        compared: gr.Dropdown,
    ) -> None:
        self._context, self.header, self.banner = context, header, banner
        self.seen, self.compared = seen, compared
        self.chat_parts, self.library_parts = chat, library
        self.chat, self.library = tab_chat.ChatTab(context, chat), tab_library.LibraryTab(context, library)

    def load(self, request: gr.Request) -> dict[Any, Any]:
        names = self._context.desk.workspaces.names()
        chosen = names[0]
        self._context.sessions.show(request.session_hash or "", None)
        return {
            **self._frame(),
            self.chat_parts.collections: gr.update(choices=names, value=[chosen], visible=len(names) > 1),
            self.library_parts.collection: gr.update(choices=names, value=chosen),
            self.compared: gr.update(choices=names, value=chosen),
            **self.chat.opening(),
            **self.library.refresh(chosen, "", "", 0),
        }

    def choices(self, asked: list[str] | None, compared: str | None) -> dict[Any, Any]:
        """The collections that can be asked, after one was made or removed; what was chosen stays, if it is there."""
        names = self._context.desk.workspaces.names()
        kept = [name for name in asked or () if name in names] or names[:1]
        return {
            self.chat_parts.collections: gr.update(choices=names, value=kept, visible=len(names) > 1),
            self.compared: gr.update(choices=names, value=compared if compared in names else names[0]),
        }

    def tick(self, seen: str, chat_id: int | None, *view: Any) -> dict[Any, Any]:
        """Draw the queue again where it has moved since `seen`; the documents too when a file was begun or finished."""
        overview = self._context.desk.jobs.overview()
        startup = self._context.startup
        now = f"{render_frame.fingerprint(overview, view)} {startup.is_loading} {startup.problem}"
        if now == seen:
            return {self.header: gr.skip()}
        updates: dict[Any, Any] = {
            self.library_parts.queue: self.library.progress()[self.library_parts.queue]
        }
        if render_frame.listed_in(now) != render_frame.listed_in(seen):
            updates |= self.library.refresh(*view)
            if chat_id is None and overview.finished:
                updates[self.chat_parts.transcript] = self.chat.welcome()
        return updates | {**self._frame(), self.seen: now}

    def _frame(self) -> dict[Any, Any]:
        desk, startup = self._context.desk, self._context.startup
        overview = desk.jobs.overview()
        line = render_frame.state_line(overview, desk.settings, startup.is_loading)
        return {
            self.header: render_frame.header(line),
            self.banner: render_frame.banner(startup.problem, overview.waiting),
        }

    def gone(self, request: gr.Request) -> None:
        self._context.sessions.close(request.session_hash or "")
