"""What every tab needs: the app, what the open pages are doing, and places for drawn HTML."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from ragblend.app.services import AppServices, ModelStartup
from ragblend.ui.sessions import PageSessions

MOST_SAMPLES = 500
# When, by a monotonic clock; what this process had found by then, and what not.
Sample = tuple[float, int, int]
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
class PageContext:
    services: AppServices
    sessions: PageSessions = field(default_factory=PageSessions)
    history: deque[Sample] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    startup: ModelStartup = field(default_factory=ModelStartup)

    def note_store(self) -> None:
        """Keep how often the store had what was asked for, if anything was since the last time. The store is open."""
        stats = self.services.workspaces.first.engine.store.stats()
        counts = stats.hits, stats.misses
        if not self.history or self.history[-1][1:] != counts:
            self.history.append((time.monotonic(), *counts))


def search_field(placeholder: str, label: str, element: str, **more: Any) -> gr.Textbox:
    """Where the key `/` leads."""
    common: dict[str, Any] = {"elem_classes": "rb-search", "max_lines": 1} | BARE | more
    return gr.Textbox("", placeholder=placeholder, label=label, elem_id=element, **common)


def collection_field(names: list[str], element: str, **more: Any) -> gr.Dropdown:
    return gr.Dropdown(names, value=names[0], label="Collection", elem_id=element, **more)


def drawn(elem_id: str, value: str = "", *, acts: bool = True) -> gr.HTML:
    """A place for HTML that the pure functions made. acts: its buttons are handed to Python as click and submit."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=BIND if acts else None)
