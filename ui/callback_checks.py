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

AUTOMATIC = ("tick", "load")  # events that no user caused: a shown message stays
LONGEST_REASON = 300
LARGEST = 1e9  # limit of a slider's value; the app checks its meaning
LONGEST_TEXT = 100_000
MOST_VALUES = 1000  # in a list, and in an event
LOG = logging.getLogger(__name__)


def _or(default: Any) -> BeforeValidator:
    """Replace None: a browser on a busy machine sends it for a field that it has not drawn yet."""
    return BeforeValidator(lambda value: default if value is None else value)


Text = Annotated[StrictStr, Field(max_length=LONGEST_TEXT)]
TEXT = TypeAdapter(Annotated[Text, _or("")])
NAMES = TypeAdapter(Annotated[list[Text], Field(max_length=MOST_VALUES), _or([])])
FILES = TypeAdapter(
    Annotated[list[gr.FileData], _or([]), AfterValidator(lambda files: [each.path for each in files])]
)
YES_OR_NO = TypeAdapter(Annotated[StrictBool, _or(False)])
NUMBER = TypeAdapter(Annotated[float, Field(strict=True, allow_inf_nan=False)])


def kind_of(component: Any) -> TypeAdapter[Any] | None:
    """The type of values that a component may send, for the request filter and the callbacks; None: it sends none."""
    match component:
        case gr.State():
            return None
        case gr.File():
            return FILES
        case gr.Slider():
            return NUMBER
        case gr.Checkbox():
            return YES_OR_NO
        case gr.Dropdown(multiselect=True):
            return NAMES
        case gr.Dropdown() | gr.Radio() | gr.Textbox():
            return TEXT
    raise AssertionError(f"add what a {type(component).__name__} may send")


def check_callbacks(page: gr.Blocks, trouble: gr.HTML) -> None:
    """Check the values of each callback of the page, and show its errors at `trouble`.

    Gradio's own check of values, which answers with the word Error, is switched off; its check of file paths stays.
    """
    for function in page.fns.values():
        events = {event for _, event in function.targets}
        if function.fn is None or "unload" in events:
            continue
        function.fn = _with_checks(function, trouble, events.isdisjoint(AUTOMATIC))
        function.preprocess = False
        function.outputs = [*function.outputs, trouble]


def dismissed() -> None:
    """Close the message: every callback that a user causes clears it, this one too."""


def _with_checks(function: Any, trouble: gr.HTML, is_by_user: bool) -> Callable[..., Any]:
    """A callback, which returns or yields Updates, behind its checks.

    Arguments beyond its inputs (Gradio's request, event) are passed on.
    """
    callback: Callable[..., Any] = function.fn
    inputs, well = list(function.inputs), {trouble: "" if is_by_user else gr.skip()}
    kinds = [kind_of(each) for each in inputs]

    def checked(values: Sequence[Any]) -> list[Any]:
        return [*map(_value, inputs, kinds, values), *values[len(inputs) :]]

    @wraps(callback)
    def at_once(*values: Any) -> Any:
        try:
            return (callback(*checked(values)) or {}) | well
        except Exception as error:
            return {trouble: error_message(error)}

    @wraps(callback)
    def in_pieces(*values: Any) -> Iterator[Any]:
        try:
            with closing(callback(*checked(values))) as results:
                yield from (updates | well for updates in results)
        except Exception as error:
            yield {trouble: error_message(error)}

    return in_pieces if function.types_generator else at_once


def _value(component: Any, kind: TypeAdapter[Any] | None, value: Any) -> Any:
    name = component.label or type(component).__name__
    try:
        checked = value if kind is None else kind.validate_python(value)
    except ValidationError as error:
        found = "is empty" if value is None else f"cannot be used: {error.errors()[0]['msg']}"
        raise UsageError(f"“{name}” {found}. Give it a value and try again.") from None
    if isinstance(component, gr.Slider) and not component.minimum <= checked <= LARGEST:
        raise UsageError(
            f"“{name}” cannot be used: it must be at least {component.minimum}, and not so large."
        )
    return checked


def error_message(error: Exception) -> str:
    """The message for an error: what happened and what to do."""
    if isinstance(error, RagBlendError):
        words = str(error)
    else:
        LOG.error("a callback of the page failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        words = (
            f"Something failed unexpectedly ({reason}). Your stored data is safe, but your action may not have been "
            "done. Try again; if it fails again, reload the page. The terminal of `ragblend ui` shows the details."
        )
    return views.frame.trouble(words)
