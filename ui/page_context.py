"""Shared by all tabs: the app's services, the sessions of open pages, and functions for components."""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from ragblend.app.services import AppServices, ModelStartup
from ragblend.ui.page_sessions import PageSessions

MAX_HIT_COUNTS = 500
# A time on the monotonic clock, and the process's hits and misses until then.
HitCount = tuple[float, int, int]
Updates = dict[Any, Any]  # component -> what it shows now
# Lets the page's script send clicks on a component's buttons to Python.
BIND_BUTTONS = "window.ragblend && window.ragblend.bind(element, trigger);"

# A direct call is a request of its own. Callbacks that yield need Gradio's queue, which has one stream of events per
# page. If that breaks off, Gradio reloads the page.
DIRECT_CALL: dict[str, Any] = {"queue": False, "show_progress": "hidden"}
QUEUED_CALL: dict[str, Any] = {"concurrency_limit": None, "show_progress": "hidden"}
# Otherwise Gradio drops a click while the previous one, on any button of the same component, is not answered.
EVERY_CLICK: dict[str, Any] = {"trigger_mode": "multiple"}
# A field whose label is for screen readers only.
UNLABELLED: dict[str, Any] = {"show_label": False, "container": False}
# Clears a message when its tab is opened again. In the browser, because Python's answer to the opening may arrive after
# the answer to the next click, and would clear its message.
CLEAR_MESSAGE = "() => ''"


@dataclass(frozen=True)
class PageContext:
    services: AppServices
    sessions: PageSessions = field(default_factory=PageSessions)
    hit_counts: deque[HitCount] = field(default_factory=lambda: deque(maxlen=MAX_HIT_COUNTS))
    startup: ModelStartup = field(default_factory=ModelStartup)

    def note_hit_counts(self) -> None:
        """Record the store's hits and misses, if they changed since the last time."""
        stats = self.services.workspaces.first.engine.store.stats()
        counts = stats.hits, stats.misses
        if not self.hit_counts or self.hit_counts[-1][1:] != counts:
            self.hit_counts.append((time.monotonic(), *counts))


def search_field(placeholder: str, label: str, element: str, **more: Any) -> gr.Textbox:
    """A search field, which the key `/` focuses."""
    common: dict[str, Any] = {"elem_classes": "rb-search", "max_lines": 1} | UNLABELLED | more
    return gr.Textbox("", placeholder=placeholder, label=label, elem_id=element, **common)


def collection_field(names: list[str], element: str, **more: Any) -> gr.Dropdown:
    return gr.Dropdown(names, value=names[0], label="Collection", elem_id=element, **more)


def html_component(elem_id: str, value: str = "", *, has_buttons: bool = True) -> gr.HTML:
    """A component for HTML drawn by `views`. has_buttons: its buttons send click and submit events to Python."""
    return gr.HTML(
        value, elem_id=elem_id, apply_default_css=False, js_on_load=BIND_BUTTONS if has_buttons else None
    )
