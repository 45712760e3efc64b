"""What the Chat tab is made of, and where it stands; what it does is in `tab_chat`."""

from dataclasses import dataclass
from typing import Any

import gradio as gr

from ragblend.ui import views
from ragblend.ui.context import drawn

SOURCE, HOOD = "source", "hood"


@dataclass(frozen=True)
class Parts:
    """The tab's components, by what they show."""

    chat_id: gr.State
    limit: gr.State
    search: gr.Textbox
    new: gr.Button
    chats: gr.HTML
    hello: gr.HTML
    transcript: gr.HTML
    live: gr.HTML
    question: gr.Textbox
    send: gr.Button
    stop: gr.Button
    collections: gr.Dropdown
    mode: gr.Radio
    panel: gr.Tabs
    source: gr.HTML
    hood: gr.HTML
    export: gr.HTML


def side() -> dict[str, Any]:
    """The conversations: new, search, list, export."""
    with gr.Column(elem_id="rb-side", scale=0):
        new = gr.Button("New conversation", elem_id="rb-new", size="sm")
        search = gr.Textbox(
            "",
            placeholder="Search  ( / )",
            label="Search conversations",
            show_label=False,
            container=False,
            elem_id="rb-chat-search",
            elem_classes="rb-search",
            max_lines=1,
        )
        chats = drawn("rb-chats")
        export = drawn("rb-export", acts=False)
    return {"new": new, "search": search, "chats": chats, "export": export}


def middle(names: list[str]) -> dict[str, Any]:
    """The transcript, and what a question is written in; names: the collections."""
    with gr.Column(elem_id="rb-middle"):
        with gr.Column(elem_id="rb-scroll"):
            # Shown while there is no conversation; of its own, so that it is drawn again at any time and hides none.
            hello = drawn("rb-hello")
            transcript = drawn("rb-transcript")
            live = drawn("rb-live", acts=False)
        with gr.Column(elem_id="rb-composer"):
            question = gr.Textbox(
                "",
                placeholder="Ask your documents",
                label="Your question",
                show_label=False,
                lines=2,
                max_lines=8,
                elem_id="rb-question",
                container=False,
                autofocus=True,
                max_length=20_000,
            )
            with gr.Row(elem_id="rb-choices"):
                collections = gr.Dropdown(
                    choices=names,
                    value=names[:1],
                    visible=len(names) > 1,
                    multiselect=True,
                    label="Collections",
                    show_label=False,
                    container=False,
                    elem_id="rb-collections",
                    scale=3,
                    min_width=140,
                )
                mode = gr.Radio(
                    choices=[("Documents only", "documents"), ("Chat", "chat")],
                    value="documents",
                    label="Mode",
                    show_label=False,
                    container=False,
                    elem_id="rb-mode",
                    scale=3,
                    min_width=200,
                )
                send = gr.Button("Send", variant="primary", elem_id="rb-send", scale=1, min_width=84)
                stop = gr.Button("Stop", elem_id="rb-stop", scale=1, min_width=84, visible=False)
    return {
        "hello": hello,
        "transcript": transcript,
        "live": live,
        "question": question,
        "collections": collections,
        "mode": mode,
        "send": send,
        "stop": stop,
    }


def more() -> dict[str, Any]:
    """Beside it: a source, and under the hood."""
    with gr.Column(elem_id="rb-more", scale=0), gr.Tabs(elem_id="rb-panel") as panel:
        with gr.Tab("Source", id=SOURCE):
            source = drawn("rb-source", views.passage.empty(), acts=False)
        with gr.Tab("Under the hood", id=HOOD):
            hood = drawn("rb-hood", views.hood.empty())
    return {"panel": panel, "source": source, "hood": hood}
