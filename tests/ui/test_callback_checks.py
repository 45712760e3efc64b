"""Callbacks of the page check what a browser sends, and show their errors as text."""

import pytest

pytest.importorskip("gradio", reason="the page needs the extra `ui`")

import gradio as gr
from gradio.state_holder import SessionState
from serverless import built

from ragblend.app.services import ModelStartup
from ragblend.app.workspace import Workspaces
from ragblend.ui.page import build_page
from ragblend.ui.page_context import PageContext

WRONG = (None, "", "nowhere", 7, True, 1e300, [], [None], {}, {"a": [1]})


class Page:
    """The page over a home without a model; callbacks are called as Gradio's routes call them."""

    def __init__(self, services):
        self.services, self.blocks = services, build_page(PageContext(services))
        self.functions = [each for each in self.blocks.fns.values() if each.fn is not None]

    def call(self, function, changed=None):
        """Everything that is drawn, as text, with first values but for `changed` (index, value)."""
        values = [getattr(each, "value", None) for each in function.inputs]
        labels = [getattr(each, "label", None) for each in function.inputs]
        if "Model" in labels:  # as the form is filled: another one would be loaded
            values[labels.index("Model")] = str(self.services.settings.model)
        if changed:
            values[changed[0]] = changed[1]
        return self.runner.run(self._called(function, values))

    async def _called(self, function, values):
        request, state = gr.Request(session_hash="here"), SessionState(self.blocks)
        event = gr.EventData(None, {"act": "nothing known", "id": "7"})
        iterator, drawn = None, []
        while True:
            answer = await self.blocks.process_api(
                function, values, state, request, iterator, session_hash="here", event_data=event
            )
            drawn.append(answer["data"])
            iterator = answer.get("iterator")
            if not answer["is_generating"]:
                return str(drawn)

    def named(self, name):
        return next(each for each in self.functions if each.name == name)


@pytest.fixture
def page(tmp_path):
    with built(tmp_path, Page) as (made, runner):
        made.runner = runner
        yield made


def test_no_value_that_a_field_sends_is_an_error_or_leaves_a_trace(page) -> None:
    """A dropdown that sent nothing once opened a collection None, and nothing could be saved from then on."""
    fields, different = 0, {(each.name, *map(id, each.inputs)): each for each in page.functions}
    for function in different.values():
        for index, component in enumerate(function.inputs):
            if isinstance(component, gr.State | gr.File):  # kept on this side; what a browser uploaded
                continue
            fields += 1
            for value in WRONG if function.name == "create" else WRONG[fields % 4 :: 4]:
                page.call(function, (index, value))
    assert fields > 50
    assert page.services.workspaces.names() == ["default", "nowhere"], "which Create was asked for"
    page.services.workspaces.change(top_k=3)
    assert "letters" in page.call(page.named("create"), (0, "letters"))
    assert page.services.workspaces.names() == ["default", "letters", "nowhere"]


def test_a_field_without_a_value_is_named(page) -> None:
    price = page.named("price")
    labels = [each.label for each in price.inputs]
    said = page.call(price, (labels.index("Passages per question"), None))
    assert "“Passages per question” is empty. Give it a value and try again." in said


def test_unexpected_errors_are_shown_in_every_tab(page, monkeypatch) -> None:
    def broken(*_, **__):
        raise ZeroDivisionError("the sky fell")

    for name in ("of", "names", "change", "create"):
        monkeypatch.setattr(Workspaces, name, broken)
    for name in ("load", "create", "run", "check", "save"):
        said = page.call(page.named(name), *([(0, "Why?")] if name == "run" else []))
        assert "failed unexpectedly (ZeroDivisionError: the sky fell)" in said, name
        assert "Try again" in said, name


def test_unexpected_startup_error_is_shown() -> None:
    """Only named errors were shown; for others the page waited without a message."""
    startup = ModelStartup()
    startup.begin(None).join()
    assert "AttributeError" in startup.problem
    assert not startup.is_loading


def test_creating_an_existing_collection_shows_it(page) -> None:
    """A user who missed the first answer was told to choose another name."""
    for words in ("letters", "exists already; it is shown now"):
        said = page.call(page.named("create"), (0, " letters "))
        assert "'value': 'letters'" in said
        assert words in said
