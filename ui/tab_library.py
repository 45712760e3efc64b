"""The Library tab: collections, uploads and folders, the queue, the documents. Wiring only."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from ragblend.app import samples
from ragblend.kvstore.errors import RagBlendError, UsageError
from ragblend.ui import views
from ragblend.ui.page_context import (
    DIRECT_CALL,
    EVERY_CLICK,
    UNLABELLED,
    PageContext,
    Updates,
    collection_field,
    drawn,
    search_field,
)
from ragblend.ui.viewer import Viewer
from ragblend.ui.views import problem

PAGE = 50
JOBS_SHOWN = 100
OUT_OF_DATE = "out of date"  # instead of a fingerprint: the next tick draws everything again
STATES = [("All", ""), ("Ready", "done"), ("Not finished", "pending"), ("Failed", "failed")]


class LibraryTab:
    """Lays the tab out and connects it."""

    def __init__(self, context: PageContext, viewer: Viewer) -> None:
        self._services, self._viewer, self.offset = context.services, viewer, gr.State(0)
        with gr.Row(elem_id="rb-library"):
            with gr.Column(scale=2, min_width=280, elem_id="rb-add"):
                self._lay_out_adding(context.services.workspaces.names())
            with gr.Column(scale=5, min_width=320):
                self._lay_out_documents()
        self.view = [self.collection, self.search, self.state, self.offset]
        # The `fingerprint` of what the page shows. It is kept in the browser, where updates may arrive out of order:
        # what was drawn last decides whether to draw again.
        self.seen = gr.Textbox("", visible=False, elem_id="rb-seen")
        self._page = [self.documents, self.tools, self.offset, self.seen]
        self.drawn = [self.deleted, self.queue, self.jobs, self.watched, *self._page]
        self._connect()

    def _lay_out_adding(self, names: list[str]) -> None:
        """The collection, and what can be added to it: files, a folder, the samples. names: all collections."""
        # Gradio checks against choices that may be older than what the page shows, and would refuse a new collection.
        # The app checks the name.
        free: dict[str, Any] = {"interactive": True, "allow_custom_value": True}
        self.collection = collection_field(names, "rb-collection", **free)
        formats = "PDF, DOCX, EPUB, HTML, Markdown, text, CSV"
        self.files = gr.File(label=formats, file_count="multiple", elem_id="rb-upload", height=150)
        self.folder = gr.Textbox(
            "",
            label="Folder or file on this machine",
            placeholder="/path/to/documents",
            elem_id="rb-folder",
            max_lines=1,
        )
        with gr.Row():
            self.watch = gr.Checkbox(label="Watch it for changes", elem_id="rb-watch", scale=2, min_width=150)
            self.add = gr.Button("Add", elem_id="rb-add-folder", scale=1, min_width=80)
        self.samples = gr.Button("Add the sample documents", elem_id="rb-add-samples", size="sm")
        self.watched = drawn("rb-watched")
        # Not in an accordion: Gradio draws its contents twice when it opens, which loses what was typed in between.
        self.new_name = gr.Textbox("", label="New collection", elem_id="rb-new-collection", max_lines=1)
        self.new = gr.Button("Create", size="sm", elem_id="rb-create-collection")

    def _lay_out_documents(self) -> None:
        """The last message, the queue, the collection's documents, and the tools for all of them."""
        self.message = drawn("rb-library-message", acts=False)
        self.deleted = drawn("rb-deleted")
        self.queue, self.jobs = drawn("rb-queue"), drawn("rb-jobs")
        with gr.Row():
            hint, label = "Search documents  ( / )", "Search documents"
            self.search = search_field(hint, label, "rb-document-search", scale=4, min_width=180)
            self.state = gr.Dropdown(
                STATES,
                value="",
                label="State",
                elem_id="rb-document-state",
                scale=1,
                min_width=130,
                **UNLABELLED,
            )
        self.documents, self.tools = drawn("rb-documents"), drawn("rb-collection-tools")

    def _connect(self) -> None:
        view, listed = self.view, [self.message, *self.drawn]
        page, each = self._page, DIRECT_CALL | EVERY_CLICK
        for chosen in (self.collection, self.search, self.state):
            chosen.change(self.first_page, view[:3], page, **DIRECT_CALL)
        self.files.upload(self.upload, [self.files, *view], [*listed, self.files], **each)
        for asked in (self.add.click, self.folder.submit):
            asked(self.add_folder, [self.folder, self.watch, *view], [*listed, self.folder], **each)
        self.samples.click(self.add_samples, view, listed, **DIRECT_CALL)
        self.new.click(
            self.create, [self.new_name], [self.collection, self.new_name, self.message], **DIRECT_CALL
        )
        for drawing in (self.deleted, self.queue, self.jobs, self.watched):
            drawing.click(self.act, view, listed, **each)
        self.documents.click(self.act, view, [*listed, self._viewer.component], **each)
        self.tools.click(self.remove_collection, view, [*listed, self.collection], **DIRECT_CALL)

    def upload(self, files: list[str] | None, *view: Any) -> Updates:
        paths = [Path(file) for file in files or []]
        updates = self._after(lambda: self._services.jobs.upload(paths, view[0]), view)
        discard(paths)
        return updates | {self.files: None}

    def add_folder(self, folder: str, watch: bool, *view: Any) -> Updates:
        def work() -> Any:
            if not folder.strip():
                raise UsageError("Name a folder or a file first.")
            path = Path(folder.strip())
            added = self._services.jobs.add([path], view[0])
            if watch:
                self._services.watching.add(path, view[0])
            return added

        return self._after(work, view) | {self.folder: gr.skip()}

    def add_samples(self, *view: Any) -> Updates:
        return self._after(lambda: self._services.jobs.add([samples.documents_folder()], view[0]), view)

    def _after(self, work: Any, view: tuple[Any, ...]) -> Updates:
        """Add something and show the result."""
        try:
            message = views.library.added(work())
        except RagBlendError as error:
            message = problem(str(error))
        return {self.message: message, **self.refresh(*view)}

    def create(self, name: str) -> Updates:
        """Create and show a collection; one that exists is shown, since a browser may miss that it was created."""
        workspaces, name, message = self._services.workspaces, name.strip(), ""
        try:
            if name in workspaces.names():
                message = problem(f"The collection “{name}” exists already; it is shown now.", "info")
            else:
                workspaces.create(name)
        except RagBlendError as error:
            return {self.message: problem(str(error))}
        chosen = gr.update(choices=workspaces.names(), value=name)
        return {self.collection: chosen, self.new_name: "", self.message: message}

    def remove_collection(
        self, collection: str, search: str, state: str, offset: int, event: gr.EventData
    ) -> Updates:
        """Remove the collection that the button names: another one may be chosen meanwhile."""
        services, shown = self._services, collection
        try:
            removed, _ = services.remove_collection(str(event.id))
            message = views.library.deleted(removed)
            if collection == event.id:
                shown = services.workspaces.settings.collection
        except RagBlendError as error:
            message = problem(str(error))
        chosen = gr.update(choices=services.workspaces.names(), value=shown)
        return {self.message: message, self.collection: chosen, **self.refresh(shown, "", "", 0)}

    def act(self, collection: str, search: str, state: str, offset: int, event: gr.EventData) -> Updates:
        if event.act == "view":
            return self._viewer.show(event)
        if event.act == "ask-document":  # the Chat tab's
            return {self.message: gr.skip()}
        message = ""
        try:
            if event.act == "page":
                offset = int(event.offset)
            else:
                message = self._do(event, collection)
        except RagBlendError as error:
            message = problem(str(error))
        return {self.message: message, **self.refresh(collection, search, state, offset)}

    def _do(self, event: gr.EventData, collection: str) -> str:
        jobs, act = self._services.jobs, event.act
        if act == "delete-document":
            deleted = self._services.deletions.delete([str(event.id)], collection)
            return "" if deleted else views.library.deleted([])
        if act == "retry-document":
            known = self._services.workspaces.of(collection).library.documents_with([str(event.id)])
            return views.library.added(jobs.add([each.file for each in known.values()], collection))
        doing: dict[str, Callable[[], object]] = {
            "undo-delete": lambda: self._services.deletions.undo(str(event.id)),
            "unwatch": lambda: self._services.watching.remove(int(event.id)),
            "retry-job": lambda: jobs.retry([int(event.id)]),
            "cancel-job": lambda: jobs.cancel([int(event.id)]),
            "pause": jobs.pause,
            "resume": jobs.resume,
            "cancel": jobs.cancel,
            "retry-all": jobs.retry,
            "clear": jobs.clear_finished,
        }
        doing[act]()
        return ""

    def first_page(self, collection: str, search: str, state: str) -> Updates:
        return self._listed(collection, search, state, 0)

    def refresh(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """Draw the deletions that can be undone, the queue, the folders and the page of documents."""
        jobs = self._services.jobs
        overview, (shown, total) = jobs.overview(), jobs.page(limit=JOBS_SHOWN)
        return {
            self.deleted: views.library.undoable(self._services.deletions.pending()),
            self.queue: views.library.queue(overview),
            self.jobs: views.library.jobs(shown, total, overview.finished >= overview.total),
            self.watched: views.library.watched(self._services.watching.folders()),
            **self._listed(collection, search, state, offset),
        }

    def _listed(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """Draw a page of documents and the collection's tools, or why the typed name is invalid."""
        try:
            shown = problem("Choose a collection.", "info"), ""
            if collection:
                count = sum(self._services.workspaces.library.counts_by_state(collection).values())
                tools = views.library.collection_tools(collection, count)
                shown = self._documents(collection, search, state, offset), tools
        except RagBlendError as error:
            shown = problem(str(error)), ""
        at = offset if collection else 0
        return dict(zip(self._page, (*shown, at, OUT_OF_DATE), strict=True))

    def _documents(self, collection: str, search: str, state: str, offset: int) -> str:
        library = self._services.workspaces.of(collection).library
        page = library.page(collection, search, state or None, offset, PAGE)
        paths = [document.path for document in page.documents]
        queued = self._services.jobs.store.open_among(collection, paths)
        return views.library.documents(page, offset, PAGE, search, queued)


def discard(paths: Sequence[Path]) -> None:
    """Delete uploaded files with the folders that Gradio made for them, and nothing elsewhere.

    Gradio's copy of an upload must go once the library has its own: a deleted document must not be left anywhere.
    """
    root = Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    for path in paths:
        folder = path.resolve().parent
        if folder != root and folder.is_relative_to(root):
            shutil.rmtree(folder, ignore_errors=True)
