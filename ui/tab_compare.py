"""The Compare tab: one question, two methods or ratios. Wiring only."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gradio as gr

from ragblend.app.comparing import Side, compare
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import Cancelled, RagBlendError
from ragblend.ui import views
from ragblend.ui.context import Context, drawn
from ragblend.ui.views import LABELS, WITHOUT_RATIO, problem

Updates = dict[Any, Any]
CHOICES = [(label, name) for name, label in LABELS.items()]


@dataclass(frozen=True)
class Parts:
    """The tab's components."""

    question: gr.Textbox
    collection: gr.Dropdown
    methods: tuple[gr.Dropdown, gr.Dropdown]
    ratios: tuple[gr.Slider, gr.Slider]
    go: gr.Button
    stop: gr.Button
    result: gr.HTML


def build(context: Context) -> Parts:
    """Lay the tab out and connect it."""
    with gr.Column(elem_id="rb-compare"):
        with gr.Row():
            question = gr.Textbox(
                "",
                label="Question",
                placeholder="The same prompt is read both ways",
                elem_id="rb-compare-question",
                max_lines=3,
                scale=4,
                min_width=260,
            )
            names = context.desk.workspaces.names()
            collection = gr.Dropdown(
                choices=names,
                value=names[0],
                label="Collection",
                elem_id="rb-compare-collection",
                scale=1,
                min_width=150,
            )
        with gr.Row():
            left, left_ratio = _side("A", DEFAULT_METHOD)
            right, right_ratio = _side("B", "full")
        with gr.Row():
            go = gr.Button("Compare", variant="primary", elem_id="rb-compare-go", scale=0, min_width=130)
            stop = gr.Button("Stop", elem_id="rb-compare-stop", scale=0, min_width=90, visible=False)
        result = drawn("rb-compare-result", acts=False)
    parts = Parts(question, collection, (left, right), (left_ratio, right_ratio), go, stop, result)
    _connect(CompareTab(context, parts), parts)
    return parts


def _side(name: str, method: str) -> tuple[gr.Dropdown, gr.Slider]:
    with gr.Column(min_width=240):
        chosen = gr.Dropdown(
            choices=CHOICES,
            value=method,
            label=f"{name}: what is read again",
            elem_id=f"rb-method-{name.lower()}",
        )
        share = gr.Slider(
            0,
            100,
            value=100 * DEFAULT_RATIO,
            step=1,
            label=f"{name}: how much of it, percent",
            elem_id=f"rb-ratio-{name.lower()}",
            interactive=True,
            visible=method not in WITHOUT_RATIO,
        )
    return chosen, share


def _connect(tab: "CompareTab", parts: Parts) -> None:
    inputs = [parts.question, parts.collection, *parts.methods, *parts.ratios]
    outputs = [parts.result, parts.go, parts.stop]
    parts.go.click(tab.run, inputs, outputs, concurrency_limit=4, show_progress="hidden")
    parts.question.submit(tab.run, inputs, outputs, concurrency_limit=4, show_progress="hidden")
    parts.stop.click(tab.stop, None, None, queue=False, show_progress="hidden")
    for method, ratio in zip(parts.methods, parts.ratios, strict=True):
        method.change(
            lambda name: gr.update(visible=name not in WITHOUT_RATIO),
            [method],
            [ratio],
            queue=False,
            show_progress="hidden",
        )


class _Stop:
    """A comparison, as something that a page can stop."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def stop(self) -> None:
        self.event.set()


class CompareTab:
    """The callbacks."""

    def __init__(self, context: Context, parts: Parts) -> None:
        self._desk, self._sessions, self._parts = context.desk, context.sessions, parts

    def run(
        self,
        question: str,
        collection: str,
        left: str,
        right: str,
        left_ratio: float,
        right_ratio: float,
        request: gr.Request,
    ) -> Iterator[Updates]:
        parts, session, stop = self._parts, _session(request), _Stop()
        sides = [side_of(left, left_ratio), side_of(right, right_ratio)]
        self._sessions.begin(session)
        self._sessions.run(session, stop)
        resting = {parts.go: gr.update(interactive=True), parts.stop: gr.update(visible=False)}
        yield {
            parts.result: views.compare.looking(),
            parts.go: gr.update(interactive=False),
            parts.stop: gr.update(visible=True),
        }
        try:
            for found in compare(self._desk.conversations, question, collection, sides, stop.event):
                running = len(found.sides) < len(sides)
                yield {parts.result: views.compare.comparison(found, running)}
            yield resting
        except Cancelled:
            yield {parts.result: problem("Stopped.", "info"), **resting}
        except RagBlendError as error:
            yield {parts.result: problem(str(error)), **resting}
        except Exception:
            yield resting
            raise
        finally:
            stop.stop()
            self._sessions.end(session, stop)

    def stop(self, request: gr.Request) -> None:
        self._sessions.stop(_session(request))


def side_of(method: str, percent: float) -> Side:
    """percent: of what is stored."""
    return Side(method, None if method in WITHOUT_RATIO else percent / 100)


def _session(request: gr.Request) -> str:
    """A comparison and a chat of one page are stopped apart."""
    return f"{request.session_hash}/compare"
