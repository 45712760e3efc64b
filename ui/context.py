"""What every tab needs: the app, what the open pages are doing, and places for drawn HTML."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gradio as gr

from ragblend.app.startup import Startup
from ragblend.app.store_view import StoreHistory
from ragblend.ui.sessions import Sessions

if TYPE_CHECKING:
    from ragblend.app.desk import Desk

# Every click in drawn HTML carries what it means; the page's script hands it over.
BIND = "window.ragblend && window.ragblend.bind(element, trigger);"

# How callbacks are called: by a request of their own, or, those that yield, in Gradio's queue. What goes through the
# queue hangs on one stream of events a page; where that breaks off, Gradio loads the page again.
QUICK: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
QUEUED: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden"}
# By itself Gradio drops a click while it waits for the answer to the one before, on whichever button of the same place.
EACH: dict[str, Any] = {"trigger_mode": "multiple"}
BARE: dict[str, Any] = {"show_label": False, "container": False}  # a field whose label is for screen readers
# Empties what a click said, when its tab is opened again: in the browser, as Python's answer to the opening may come
# later than that to the next click, and would take away what that one said.
EMPTY = "() => ''"


@dataclass(frozen=True)
class Context:
    desk: "Desk"
    sessions: Sessions = field(default_factory=Sessions)
    history: StoreHistory = field(default_factory=StoreHistory)
    startup: Startup = field(default_factory=Startup)

    def note_store(self) -> None:
        """Keep how often the store had what was asked for; called when an answer has ended, so the store is open."""
        workspaces = self.desk.workspaces
        self.history.note(workspaces.first.engine.store.stats())


def drawn(elem_id: str, value: str = "", *, acts: bool = True) -> gr.HTML:
    """A place for HTML that the pure functions made. acts: its buttons are handed to Python as click and submit."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=BIND if acts else None)
