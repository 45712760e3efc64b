"""The viewer: a document at reading size over the page, a PDF page by page, a cited passage marked. Wiring only."""

from dataclasses import replace
from itertools import count

import gradio as gr

from ragblend.app.answering.highlight import (
    MOST_CHARACTERS,
    Highlight,
    cited_place,
    locate_source,
    open_document,
)
from ragblend.app.services import AppServices
from ragblend.kvstore.errors import RagBlendError
from ragblend.ui import views
from ragblend.ui.page_context import DIRECT_CALL, EVERY_CLICK, Updates, drawn


class Viewer:
    """The page's script shows as a dialog what is drawn here. Any button may open it: see `views.parts.open_button`."""

    def __init__(self, services: AppServices) -> None:
        self._services, self._drawings = services, count()
        self.component = drawn("rb-viewer")
        self.component.click(self.show, None, [self.component], **DIRECT_CALL | EVERY_CLICK)

    def show(self, event: gr.EventData) -> Updates:
        """Draw the document and page that a button names; for a source of an answer with the cited passage marked."""
        try:
            found = self._found(event)
        except RagBlendError as error:
            found = Highlight("", reason=str(error))
        origin = {name: str(getattr(event, name)) for name in ("document", "message", "number", "at")}
        # Numbered, because Gradio does not draw again what has not changed, though the dialog may have been closed.
        return {self.component: views.passage.viewer(found, origin, next(self._drawings))}

    def _found(self, event: gr.EventData) -> Highlight:
        library, page = self._services.workspaces.library, int(event.page)
        if not event.message:
            return open_document(library, str(event.document), page)
        message = self._services.chats.message(int(event.message))
        source, place = cited_place(message, int(event.number), str(event.at))
        marked = locate_source(library, source, place, MOST_CHARACTERS // 2)
        if not marked.page_count:
            return marked
        shown = tuple(image for image in marked.pages if image.number == page)
        return replace(marked, pages=shown) if shown else open_document(library, source.document_id, page)
