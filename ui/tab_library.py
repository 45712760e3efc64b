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
    html_component,
    search_field,
)
from ragblend.ui.viewer import Viewer
from ragblend.ui.views import problem

DOCUMENTS_PER_PAGE = 50
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
        # The `fingerprint` of what the page shows. The browser keeps it, because updates may arrive there out of order:
        # the update that arrived last decides whether to draw again.
        self.fingerprint = gr.Textbox("", visible=False, elem_id="rb-seen")
        self._page = [self.documents, self.tools, self.offset, self.fingerprint]
        self.refreshed = [self.deleted, self.queue, self.jobs, self.watched, *self._page]
        self._connect()

    def _lay_out_adding(self, names: list[str]) -> None:
        """The collection, and what can be added to it: files, a folder, the samples. names: all collections."""
        # Gradio's list of choices may be older than the page's, and it would refuse a new collection. The app checks
        # the name instead.
        any_name: dict[str, Any] = {"interactive": True, "allow_custom_value": True}
        self.collection = collection_field(names, "rb-collection", **any_name)
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
        self.watched = html_component("rb-watched")
        # Not in an accordion: Gradio draws its contents twice when it opens, which loses what was typed in between.
        self.new_name = gr.Textbox("", label="New collection", elem_id="rb-new-collection", max_lines=1)
        self.new = gr.Button("Create", size="sm", elem_id="rb-create-collection")

    def _lay_out_documents(self) -> None:
        """The last message, the queue, the collection's documents, and the tools for the whole collection."""
        self.message = html_component("rb-library-message", has_buttons=False)
        self.deleted = html_component("rb-deleted")
        self.queue, self.jobs = html_component("rb-queue"), html_component("rb-jobs")
        with gr.Row():
            placeholder, label = "Search documents  ( / )", "Search documents"
            self.search = search_field(placeholder, label, "rb-document-search", scale=4, min_width=180)
            self.state = gr.Dropdown(
                STATES,
                value="",
                label="State",
                elem_id="rb-document-state",
                scale=1,
                min_width=130,
                **UNLABELLED,
            )
        self.documents, self.tools = html_component("rb-documents"), html_component("rb-collection-tools")

    def _connect(self) -> None:
        view, outputs = self.view, [self.message, *self.refreshed]
        every_click = DIRECT_CALL | EVERY_CLICK
        for field in (self.collection, self.search, self.state):
            field.change(self.first_page, view[:3], self._page, **DIRECT_CALL)
        self.files.upload(self.upload, [self.files, *view], [*outputs, self.files], **every_click)
        for event in (self.add.click, self.folder.submit):
            event(self.add_folder, [self.folder, self.watch, *view], [*outputs, self.folder], **every_click)
        self.samples.click(self.add_samples, view, outputs, **DIRECT_CALL)
        self.new.click(
            self.create, [self.new_name], [self.collection, self.new_name, self.message], **DIRECT_CALL
        )
        for component in (self.deleted, self.queue, self.jobs, self.watched):
            component.click(self.act, view, outputs, **every_click)
        self.documents.click(self.act, view, [*outputs, self._viewer.component], **every_click)
        self.tools.click(self.remove_collection, view, [*outputs, self.collection], **DIRECT_CALL)

    def upload(self, files: list[str] | None, *view: Any) -> Updates:
        paths = [Path(file) for file in files or []]
        updates = self._add_and_refresh(lambda: self._services.jobs.upload(paths, view[0]), view)
        delete_uploads(paths)
        return updates | {self.files: None}

    def add_folder(self, folder: str, watch: bool, *view: Any) -> Updates:
        def add() -> Any:
            if not folder.strip():
                raise UsageError("Name a folder or a file first.")
            path = Path(folder.strip())
            added = self._services.jobs.add([path], view[0])
            if watch:
                self._services.watching.add(path, view[0])
            return added

        return self._add_and_refresh(add, view) | {self.folder: gr.skip()}

    def add_samples(self, *view: Any) -> Updates:
        return self._add_and_refresh(
            lambda: self._services.jobs.add([samples.documents_folder()], view[0]), view
        )

    def _add_and_refresh(self, add: Callable[[], Any], view: tuple[Any, ...]) -> Updates:
        """Call `add` and show what it added, or its error."""
        try:
            message = views.library.added(add())
        except RagBlendError as error:
            message = problem(str(error))
        return {self.message: message, **self.refresh(*view)}

    def create(self, name: str) -> Updates:
        """Create a collection and show it. One that exists is shown, too: the browser may not list it yet."""
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
        """Remove the collection that the button names: the user may have chosen another one meanwhile."""
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
        if event.act == "ask-document":  # the Chat tab handles it
            return {self.message: gr.skip()}
        message = ""
        try:
            if event.act == "page":
                offset = int(event.offset)
            else:
                message = self._run_action(event, collection)
        except RagBlendError as error:
            message = problem(str(error))
        return {self.message: message, **self.refresh(collection, search, state, offset)}

    def _run_action(self, event: gr.EventData, collection: str) -> str:
        jobs, act = self._services.jobs, event.act
        if act == "delete-document":
            deleted = self._services.deletions.delete([str(event.id)], collection)
            return "" if deleted else views.library.deleted([])
        if act == "retry-document":
            known = self._services.workspaces.of(collection).library.documents_with([str(event.id)])
            return views.library.added(jobs.add([each.file for each in known.values()], collection))
        actions: dict[str, Callable[[], object]] = {
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
        actions[act]()
        return ""

    def first_page(self, collection: str, search: str, state: str) -> Updates:
        return self._draw_documents(collection, search, state, 0)

    def refresh(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """Draw the deletions that can be undone, the queue, the watched folders and the page of documents."""
        jobs = self._services.jobs
        overview, (shown, total) = jobs.overview(), jobs.page(limit=JOBS_SHOWN)
        return {
            self.deleted: views.library.undoable(self._services.deletions.pending()),
            self.queue: views.library.queue(overview),
            self.jobs: views.library.jobs(shown, total, overview.finished >= overview.total),
            self.watched: views.library.watched(self._services.watching.folders()),
            **self._draw_documents(collection, search, state, offset),
        }

    def _draw_documents(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """Draw a page of documents and the collection's tools, or say why the typed name is invalid."""
        try:
            shown = problem("Choose a collection.", "info"), ""
            if collection:
                count = sum(self._services.workspaces.library.counts_by_state(collection).values())
                tools = views.library.collection_tools(collection, count)
                shown = self._documents_table(collection, search, state, offset), tools
        except RagBlendError as error:
            shown = problem(str(error)), ""
        at = offset if collection else 0
        return dict(zip(self._page, (*shown, at, OUT_OF_DATE), strict=True))

    def _documents_table(self, collection: str, search: str, state: str, offset: int) -> str:
        library = self._services.workspaces.of(collection).library
        page = library.page(collection, search, state or None, offset, DOCUMENTS_PER_PAGE)
        paths = [document.path for document in page.documents]
        queued = self._services.jobs.store.open_among(collection, paths)
        return views.library.documents(page, offset, DOCUMENTS_PER_PAGE, search, queued)


def delete_uploads(paths: Sequence[Path]) -> None:
    """Delete uploaded files with the folders that Gradio made for them, and nothing elsewhere.

    Gradio's copy of an upload must go once the library has its own: a deleted document must not be left anywhere.
    """
    root = Path(os.environ["GRADIO_TEMP_DIR"]).resolve()
    for path in paths:
        folder = path.resolve().parent
        if folder != root and folder.is_relative_to(root):
            shutil.rmtree(folder, ignore_errors=True)
