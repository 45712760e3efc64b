"""What the Library tab is made of, and where it stands; what it does is in `tab_library`."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from ragblend.ui.context import drawn

STATES = [("All", ""), ("Ready", "done"), ("Not finished", "pending"), ("Failed", "failed")]


@dataclass(frozen=True)
class Parts:
    """The tab's components."""

    collection: gr.Dropdown
    new_name: gr.Textbox
    create: gr.Button
    files: gr.File
    folder: gr.Textbox
    watch: gr.Checkbox
    add_folder: gr.Button
    samples: gr.Button
    message: gr.HTML
    queue: gr.HTML
    jobs: gr.HTML
    watched: gr.HTML
    search: gr.Textbox
    state: gr.Dropdown
    documents: gr.HTML
    tools: gr.HTML
    offset: gr.State


def side() -> dict[str, Any]:
    """The collection, and what can be put into it: files, a folder, the samples; or another collection."""
    with gr.Column(scale=2, min_width=280, elem_id="rb-add"):
        # Gradio's own check goes by choices that it remembers, and these can be older than what the page shows: a
        # collection just made would be refused. What it may be called is the app's to judge.
        collection = gr.Dropdown(
            choices=[],
            label="Collection",
            elem_id="rb-collection",
            interactive=True,
            allow_custom_value=True,
        )
        files = gr.File(
            label="PDF, DOCX, EPUB, HTML, Markdown, text, CSV",
            file_count="multiple",
            elem_id="rb-upload",
            height=150,
        )
        folder = _folder()
        new = _new_collection()
    return {"collection": collection, "files": files, **folder, **new}


def _folder() -> dict[str, Any]:
    """A folder, whether to watch it, and the samples, which are one."""
    folder = gr.Textbox(
        "",
        label="Or a folder or file on this machine",
        placeholder="/path/to/documents",
        elem_id="rb-folder",
        max_lines=1,
    )
    with gr.Row():
        watch = gr.Checkbox(label="Watch it for changes", elem_id="rb-watch", scale=2, min_width=150)
        add_folder = gr.Button("Add", elem_id="rb-add-folder", scale=1, min_width=80)
    samples = gr.Button("Add the sample documents", elem_id="rb-add-samples", size="sm")
    watched = drawn("rb-watched")
    return {
        "folder": folder,
        "watch": watch,
        "add_folder": add_folder,
        "samples": samples,
        "watched": watched,
    }


def _new_collection() -> dict[str, Any]:
    with gr.Accordion("New collection", open=False):
        new_name = gr.Textbox("", label="Name", elem_id="rb-new-collection", max_lines=1)
        create = gr.Button("Create", size="sm", elem_id="rb-create-collection")
    return {"new_name": new_name, "create": create}


def middle() -> dict[str, Any]:
    """What was just said, the queue, the collection's documents, and what can be done to all of them."""
    with gr.Column(scale=5, min_width=320):
        message = drawn("rb-library-message", acts=False)
        queue = drawn("rb-queue")
        jobs = drawn("rb-jobs")
        search, state = _search()
        documents = drawn("rb-documents")
        tools = drawn("rb-collection-tools")
    return {
        "message": message,
        "queue": queue,
        "jobs": jobs,
        "search": search,
        "state": state,
        "documents": documents,
        "tools": tools,
    }


def _search() -> tuple[gr.Textbox, gr.Dropdown]:
    """Which documents to show."""
    with gr.Row():
        search = gr.Textbox(
            "",
            placeholder="Search documents  ( / )",
            label="Search documents",
            show_label=False,
            container=False,
            elem_id="rb-document-search",
            elem_classes="rb-search",
            max_lines=1,
            scale=4,
            min_width=180,
        )
        state = gr.Dropdown(
            choices=STATES,
            value="",
            label="State",
            show_label=False,
            container=False,
            scale=1,
            min_width=130,
            elem_id="rb-document-state",
        )
    return search, state
