"""The Compare tab: one question, two methods or ratios. Wiring only."""

from collections.abc import Callable, Iterator

import gradio as gr

from ragblend.app.answering.comparing import compare
from ragblend.engine.config import DEFAULT_METHOD, DEFAULT_RATIO
from ragblend.kvstore.errors import Cancelled, RagBlendError
from ragblend.measuring.variants import Variant
from ragblend.ui import views
from ragblend.ui.page_context import (
    DIRECT_CALL,
    QUEUED_CALL,
    PageContext,
    Updates,
    collection_field,
    html_component,
)
from ragblend.ui.page_sessions import COMPARISON, PageRequest, session_of
from ragblend.ui.views import LABELS, WITHOUT_RATIO, problem

METHOD_CHOICES = [(label, name) for name, label in LABELS.items()]


def _side(name: str, method: str) -> tuple[gr.Dropdown, gr.Slider]:
    """The fields of one side: its method and its ratio. name: A or B."""
    with gr.Column(min_width=240):
        label, element = f"{name}: reuse method", f"rb-method-{name.lower()}"
        method_field = gr.Dropdown(METHOD_CHOICES, value=method, label=label, elem_id=element)
        ratio_field = gr.Slider(
            0,
            100,
            value=100 * DEFAULT_RATIO,
            step=1,
            label=f"{name}: percent to re-read",
            elem_id=f"rb-ratio-{name.lower()}",
            interactive=True,
            visible=method not in WITHOUT_RATIO,
        )
    return method_field, ratio_field


def slider_visibility(ratio: gr.Slider) -> Callable[[str], Updates]:
    """A callback that shows the slider only for methods that have a ratio."""
    return lambda method: {ratio: gr.update(visible=method not in WITHOUT_RATIO)}


class CompareTab:
    """Lays the tab out and connects it."""

    def __init__(self, context: PageContext) -> None:
        self._services, self._sessions = context.services, context.sessions
        names = context.services.workspaces.names()
        with gr.Column(elem_id="rb-compare"):
            with gr.Row():
                self.question = gr.Textbox(
                    "",
                    label="Question",
                    placeholder="Both methods read the same prompt",
                    elem_id="rb-compare-question",
                    max_lines=3,
                    scale=4,
                    min_width=260,
                )
                element = "rb-compare-collection"
                self.collection = collection_field(names, element, scale=1, min_width=150)
            with gr.Row():
                sides = _side("A", DEFAULT_METHOD), _side("B", "full")
            with gr.Row():
                self.compare_button = gr.Button(
                    "Compare", variant="primary", elem_id="rb-compare-go", scale=0, min_width=130
                )
                self.stop_button = gr.Button(
                    "Stop", elem_id="rb-compare-stop", scale=0, min_width=90, visible=False
                )
            self.result = html_component("rb-compare-result", has_buttons=False)
        methods, ratios = zip(*sides, strict=True)
        inputs = [self.question, self.collection, *methods, *ratios]
        outputs, running = (
            [self.result, self.compare_button, self.stop_button],
            QUEUED_CALL | {"concurrency_limit": 4},
        )
        for event in (self.compare_button.click, self.question.submit):
            event(self.run, inputs, outputs, **running)
        self.stop_button.click(self.stop, None, None, **DIRECT_CALL)
        for method, ratio in sides:
            method.change(slider_visibility(ratio), [method], [ratio], **DIRECT_CALL)

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
        page_request = self._sessions.begin(session_of(request, COMPARISON))
        sides = [variant_of(left, left_ratio), variant_of(right, right_ratio)]
        yield {
            self.result: views.compare.looking(),
            self.compare_button: gr.update(interactive=False),
            self.stop_button: gr.update(visible=True),
        }
        message: Updates = {}
        conversations, stopped = self._services.conversations, page_request.stopped
        try:
            for found in compare(conversations, question, collection, sides, stopped):
                if page_request.is_outdated:
                    break
                yield {self.result: views.compare.comparison(found, len(found.sides) < len(sides))}
        except Cancelled:
            message = {self.result: problem("Stopped.", "info")}
        except RagBlendError as error:
            message = {self.result: problem(str(error))}
        except Exception:
            yield self._final_updates(page_request, {})
            raise
        yield self._final_updates(page_request, message)

    def _final_updates(self, page_request: PageRequest, message: Updates) -> Updates:
        if page_request.is_outdated:
            return {self.result: gr.skip()}  # Gradio would repeat the last update
        return message | {
            self.compare_button: gr.update(interactive=True),
            self.stop_button: gr.update(visible=False),
        }

    def stop(self, request: gr.Request) -> None:
        self._sessions.stop(session_of(request, COMPARISON))


def variant_of(method: str, percent: float) -> Variant:
    """One side to compare. percent: of the stored tokens, recomputed if the method has a ratio."""
    return Variant(method, None if method in WITHOUT_RATIO else percent / 100)
