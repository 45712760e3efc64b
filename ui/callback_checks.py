"""Checks every value that a browser sends to a callback, and shows unexpected errors on the page."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import wraps
from typing import Annotated, Any

import gradio as gr
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictStr,
    TypeAdapter,
    ValidationError,
)

from ragblend.kvstore.errors import RagBlendError, UsageError
from ragblend.ui import views

AUTOMATIC_EVENTS = ("tick", "load")  # no user caused these: they do not clear a message
LONGEST_REASON = 300
MAX_SLIDER_VALUE = 1e9  # the app checks which smaller values make sense
LONGEST_TEXT = 100_000
MAX_VALUES = 1000  # in a list, and in an event
LOG = logging.getLogger(__name__)


def _replace_none(default: Any) -> BeforeValidator:
    """Replace None, which a browser on a busy machine sends for a field that it has not drawn yet."""
    return BeforeValidator(lambda value: default if value is None else value)


Text = Annotated[StrictStr, Field(max_length=LONGEST_TEXT)]
TEXT = TypeAdapter(Annotated[Text, _replace_none("")])
NAMES = TypeAdapter(Annotated[list[Text], Field(max_length=MAX_VALUES), _replace_none([])])
FILES = TypeAdapter(
    Annotated[
        list[gr.FileData], _replace_none([]), AfterValidator(lambda files: [each.path for each in files])
    ]
)
BOOLEAN = TypeAdapter(Annotated[StrictBool, _replace_none(False)])
NUMBER = TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False)])


def value_type(component: Any) -> TypeAdapter[Any] | None:
    """The type of values that a component may send; None if it sends none."""
    match component:
        case gr.State():
            return None
        case gr.File():
            return FILES
        case gr.Slider():
            return NUMBER
        case gr.Checkbox():
            return BOOLEAN
        case gr.Dropdown(multiselect=True):
            return NAMES
        case gr.Dropdown() | gr.Radio() | gr.Textbox():
            return TEXT
    raise AssertionError(f"add what a {type(component).__name__} may send")


def check_callbacks(page: gr.Blocks, error_box: gr.HTML) -> None:
    """Check the values of each callback of the page, and show its errors in `error_box`.

    Gradio's own check of values, which answers with the word Error, is switched off; its check of file paths stays.
    """
    for function in page.fns.values():
        events = {event for _, event in function.targets}
        if function.fn is None or "unload" in events:
            continue
        function.fn = _with_checks(function, error_box, events.isdisjoint(AUTOMATIC_EVENTS))
        function.preprocess = False
        function.outputs = [*function.outputs, error_box]


def dismiss() -> None:
    """Do nothing: `check_callbacks` clears the message after every callback that a user causes."""


def _with_checks(function: Any, error_box: gr.HTML, is_by_user: bool) -> Callable[..., Any]:
    """Wrap a callback that returns or yields Updates: check its values, and show its errors.

    Arguments after its inputs (Gradio's request and event) are not checked.
    """
    callback: Callable[..., Any] = function.fn
    inputs, no_error = list(function.inputs), {error_box: "" if is_by_user else gr.skip()}
    types = [value_type(each) for each in inputs]

    def checked(values: Sequence[Any]) -> list[Any]:
        return [*map(_checked_value, inputs, types, values), *values[len(inputs) :]]

    @wraps(callback)
    def run_once(*values: Any) -> Any:
        try:
            return (callback(*checked(values)) or {}) | no_error
        except Exception as error:
            return {error_box: error_message(error)}

    @wraps(callback)
    def run_streaming(*values: Any) -> Iterator[Any]:
        try:
            with closing(callback(*checked(values))) as results:
                yield from (updates | no_error for updates in results)
        except Exception as error:
            yield {error_box: error_message(error)}

    return run_streaming if function.types_generator else run_once


def _checked_value(component: Any, adapter: TypeAdapter[Any] | None, value: Any) -> Any:
    name = component.label or type(component).__name__
    try:
        checked = value if adapter is None else adapter.validate_python(value)
    except ValidationError as error:
        found = "is empty" if value is None else f"cannot be used: {error.errors()[0]['msg']}"
        raise UsageError(f"“{name}” {found}. Give it a value and try again.") from None
    if isinstance(component, gr.Slider) and not component.minimum <= checked <= MAX_SLIDER_VALUE:
        raise UsageError(
            f"“{name}” must be at least {component.minimum} and at most {MAX_SLIDER_VALUE:,.0f}."
        )
    return checked


def error_message(error: Exception) -> str:
    """Render the message for an error: what happened and what to do."""
    if isinstance(error, RagBlendError):
        message = str(error)
    else:
        LOG.error("a callback of the page failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        message = (
            f"Something failed unexpectedly ({reason}). Your stored data is safe, but your action may not have been "
            "done. Try again; if it fails again, reload the page. The terminal of `ragblend ui` shows the details."
        )
    return views.frame.error_box(message)
