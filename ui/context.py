"""What every tab needs: the app, what the open pages are doing, and places for drawn HTML."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import gradio as gr

from ragblend.ui.sessions import Sessions

if TYPE_CHECKING:
    from ragblend.app.desk import Desk

# Every click in drawn HTML carries what it means; the page's script hands it over.
BIND = "window.ragblend && window.ragblend.bind(element, trigger);"


@dataclass(frozen=True)
class Context:
    desk: "Desk"
    sessions: Sessions = field(default_factory=Sessions)


def drawn(elem_id: str, value: str = "", *, acts: bool = True) -> gr.HTML:
    """A place for HTML that the pure functions made. acts: its buttons are handed to Python as click and submit."""
    return gr.HTML(value, elem_id=elem_id, apply_default_css=False, js_on_load=BIND if acts else None)
