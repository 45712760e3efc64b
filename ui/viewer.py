"""The viewer: shows a document in a dialog, a PDF page by page, with a cited passage marked. Wiring only."""

from dataclasses import replace
from itertools import count

import gradio as gr

from ragblend.app.answering.highlight import (
    MAX_CHARACTERS,
    Highlight,
    cited_place,
    locate_source,
    open_document,
)
from ragblend.app.services import AppServices
from ragblend.kvstore.errors import RagBlendError
from ragblend.ui import views
from ragblend.ui.page_context import DIRECT_CALL, EVERY_CLICK, Updates, html_component


class Viewer:
    """Draws the dialog, which the page's script opens. Any button may show a document (`views.parts.open_button`)."""

    def __init__(self, services: AppServices) -> None:
        self._services, self._drawings = services, count()
        self.component = html_component("rb-viewer")
        self.component.click(self.show, None, [self.component], **DIRECT_CALL | EVERY_CLICK)

    def show(self, event: gr.EventData) -> Updates:
        """Draw the document and page that a button names; if it names an answer's source, mark the cited passage."""
        try:
            found = self._highlight(event)
        except RagBlendError as error:
            found = Highlight("", reason=str(error))
        origin = {name: str(getattr(event, name)) for name in ("document", "message", "number", "at")}
        # Numbered, because Gradio draws nothing if the HTML is the same, and the user may have closed the dialog.
        return {self.component: views.passage.viewer(found, origin, next(self._drawings))}

    def _highlight(self, event: gr.EventData) -> Highlight:
        library, page = self._services.workspaces.library, int(event.page)
        if not event.message:
            return open_document(library, str(event.document), page)
        message = self._services.chats.message(int(event.message))
        source, place = cited_place(message, int(event.number), str(event.at))
        marked = locate_source(library, source, place, MAX_CHARACTERS // 2)
        if not marked.page_count:
            return marked
        shown = tuple(image for image in marked.pages if image.number == page)
        return replace(marked, pages=shown) if shown else open_document(library, source.document_id, page)
