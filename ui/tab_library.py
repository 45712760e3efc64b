"""The Library tab: collections, uploads and folders, the queue, the documents. Wiring only."""

from pathlib import Path
from typing import Any

import gradio as gr

from ragblend.app import samples
from ragblend.app.listing import list_documents
from ragblend.kvstore.errors import RagBlendError, UsageError
from ragblend.ui import layout_library, render_library
from ragblend.ui.context import QUICK, Context
from ragblend.ui.layout_library import Parts
from ragblend.ui.render_text import problem
from ragblend.ui.uploads import discard

Updates = dict[Any, Any]
PAGE = 50
JOBS_SHOWN = 100


def build(context: Context) -> Parts:
    """Lay the tab out and connect it."""
    with gr.Row(elem_id="rb-library"):
        side = layout_library.side()
        middle = layout_library.middle()
    parts = Parts(**side, **middle, offset=gr.State(0))
    _connect(LibraryTab(context, parts), parts)
    return parts


def _connect(tab: "LibraryTab", parts: Parts) -> None:
    view = [parts.collection, parts.search, parts.state, parts.offset]
    drawn = [parts.documents, parts.offset, parts.tools]
    listed = [parts.message, parts.queue, parts.jobs, parts.watched, *drawn]
    parts.collection.change(tab.first_page, view[:3], drawn, **QUICK)
    parts.search.change(tab.first_page, view[:3], drawn, trigger_mode="always_last", **QUICK)
    parts.state.change(tab.first_page, view[:3], drawn, **QUICK)
    parts.files.upload(tab.upload, [parts.files, *view], [*listed, parts.files], **QUICK)
    parts.add_folder.click(
        tab.add_folder, [parts.folder, parts.watch, *view], [*listed, parts.folder], **QUICK
    )
    parts.folder.submit(tab.add_folder, [parts.folder, parts.watch, *view], [*listed, parts.folder], **QUICK)
    parts.samples.click(tab.add_samples, view, listed, **QUICK)
    parts.create.click(
        tab.create, [parts.new_name], [parts.collection, parts.new_name, parts.message], **QUICK
    )
    for drawing in (parts.queue, parts.jobs, parts.watched, parts.documents):
        drawing.click(tab.act, view, listed, **QUICK)
    parts.tools.click(tab.remove_collection, view, [*listed, parts.collection], **QUICK)


class LibraryTab:
    """The callbacks: they call the app and hand what it gives to the functions that draw."""

    def __init__(self, context: Context, parts: Parts) -> None:
        self._desk, self._parts = context.desk, parts

    def upload(self, files: list[str] | None, *view: Any) -> Updates:
        paths = [Path(file) for file in files or []]
        updates = self._after(lambda: self._desk.jobs.upload(paths, view[0]), view)
        discard(paths)
        return updates | {self._parts.files: None}

    def add_folder(self, folder: str, watch: bool, *view: Any) -> Updates:
        def work() -> Any:
            if not folder.strip():
                raise UsageError("Name a folder or a file first.")
            path = Path(folder.strip()).expanduser()
            added = self._desk.jobs.add([path], view[0])
            if watch:
                self._desk.watching.add(path, view[0])
            return added

        return self._after(work, view) | {self._parts.folder: gr.skip()}

    def add_samples(self, *view: Any) -> Updates:
        return self._after(lambda: self._desk.jobs.add([samples.documents_folder()], view[0]), view)

    def _after(self, work: Any, view: tuple[Any, ...]) -> Updates:
        """Add something, and say what became of it."""
        try:
            message = render_library.added(work())
        except RagBlendError as error:
            message = problem(str(error))
        return {self._parts.message: message, **self.refresh(*view)}

    def create(self, name: str) -> Updates:
        parts = self._parts
        try:
            self._desk.workspaces.create(name.strip())
        except RagBlendError as error:
            return {parts.message: problem(str(error))}
        names = self._desk.workspaces.names()
        return {
            parts.collection: gr.update(choices=names, value=name.strip()),
            parts.new_name: "",
            parts.message: "",
        }

    def remove_collection(self, collection: str, *view: Any) -> Updates:
        """All of it: its watched folders first, which would bring the documents back."""
        desk, shown = self._desk, collection
        try:
            for folder in desk.watching.folders():
                if folder.collection == collection:
                    desk.watching.remove(folder.id)
            message = render_library.deleted(desk.jobs.remove_collection(collection))
            shown = desk.workspaces.settings.collection
        except RagBlendError as error:
            message = problem(str(error))
        chosen = gr.update(choices=desk.workspaces.names(), value=shown)
        return {
            self._parts.message: message,
            self._parts.collection: chosen,
            **self.refresh(shown, "", "", 0),
        }

    def act(self, collection: str, search: str, state: str, offset: int, event: gr.EventData) -> Updates:
        """A click on a button of the queue, the folders or the documents."""
        message = ""
        try:
            if event.act == "page":
                offset = int(event.offset)
            else:
                message = self._do(event, collection)
        except RagBlendError as error:
            message = problem(str(error))
        return {self._parts.message: message, **self.refresh(collection, search, state, offset)}

    def _do(self, event: gr.EventData, collection: str) -> str:
        jobs, act = self._desk.jobs, event.act
        if act == "delete-document":
            return render_library.deleted(jobs.remove([str(event.id)], collection))
        if act == "retry-document":
            known = self._desk.workspaces.of(collection).library.documents_with([str(event.id)])
            return render_library.added(jobs.add([Path(each.path) for each in known.values()], collection))
        if act == "unwatch":
            self._desk.watching.remove(int(event.id))
        elif act in ("retry-job", "cancel-job"):
            (jobs.retry if act == "retry-job" else jobs.cancel)([int(event.id)])
        else:
            plain: dict[str, Any] = {
                "pause": jobs.pause,
                "resume": jobs.resume,
                "cancel": jobs.cancel,
                "retry-all": jobs.retry,
                "clear": jobs.clear_finished,
            }
            plain[act]()
        return ""

    def first_page(self, collection: str, search: str, state: str) -> Updates:
        return self._listed(collection, search, state, 0)

    def refresh(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """The queue, the folders and the page of documents as they are now."""
        parts = self._parts
        return {
            **self.progress(),
            parts.watched: render_library.watched(self._desk.watching.folders()),
            **self._listed(collection, search, state, offset),
        }

    def progress(self) -> Updates:
        jobs = self._desk.jobs
        overview, page = jobs.overview(), jobs.page(limit=JOBS_SHOWN)
        finished = overview.finished >= overview.total
        return {
            self._parts.queue: render_library.queue(overview),
            self._parts.jobs: render_library.jobs(page.jobs, page.total, finished),
        }

    def _listed(self, collection: str, search: str, state: str, offset: int) -> Updates:
        """A page of the documents, and what can be done to all; why not, where a name was typed that cannot be one."""
        parts = self._parts
        try:
            drawn = self._documents(collection, search, state, offset), self._tools(collection)
        except RagBlendError as error:
            drawn = problem(str(error)), ""
        return {parts.documents: drawn[0], parts.tools: drawn[1], parts.offset: offset}

    def _tools(self, collection: str) -> str:
        counts = self._desk.workspaces.of(collection).library.counts_by_state(collection)
        return render_library.collection_tools(collection, sum(counts.values()))

    def _documents(self, collection: str, search: str, state: str, offset: int) -> str:
        library = self._desk.workspaces.of(collection).library
        page = list_documents(
            library, collection, search=search, state=state or None, offset=offset, limit=PAGE
        )
        paths = [document.path for document in page.documents]
        queued = self._desk.jobs.open_among(collection, paths)
        return render_library.documents(page, offset, PAGE, search, queued)
