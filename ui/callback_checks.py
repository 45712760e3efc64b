"""Every value of every callback is checked where it enters, and what nobody foresaw is said on the page."""

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

BY_ITSELF = ("tick", "load")  # events that are nobody's doing: what is said stays through them
LONGEST_REASON = 300
LARGEST = 1e9  # what a slider may send at most; what is too much for what it is about, the app says
LONGEST_TEXT = 100_000
MOST_VALUES = 1000  # of a list, and of what an event carries
LOG = logging.getLogger(__name__)


def _or(default: Any) -> BeforeValidator:
    """A browser on a busy machine may send nothing at all for a field that it has not drawn yet."""
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
    """What a component may send, for the gate and for the callbacks; None: it is kept on this side."""
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
    raise AssertionError(f"say here what a {type(component).__name__} may send")


def check_callbacks(page: gr.Blocks, trouble: gr.HTML) -> None:
    """Check what each callback of the page is given, and draw at `trouble` what goes wrong in it.

    Gradio's own check of a value, which answers with the word Error, is left out; that of files and their paths is not.
    """
    for function in page.fns.values():
        events = {event for _, event in function.targets}
        if function.fn is None or "unload" in events:
            continue
        function.fn = _guarded(function, trouble, events.isdisjoint(BY_ITSELF))
        function.preprocess = False
        function.outputs = [*function.outputs, trouble]


def dismissed() -> None:
    """What is done next takes the message away, and be it that somebody closes it."""


def _guarded(function: Any, trouble: gr.HTML, is_asked_for: bool) -> Callable[..., Any]:
    """One callback behind its checks. What it is called with beyond its inputs (Gradio's request, event) passes."""
    callback: Callable[..., Any] = function.fn
    inputs, outputs, well = list(function.inputs), len(function.outputs), "" if is_asked_for else gr.skip()
    kinds = [kind_of(each) for each in inputs]

    def checked(values: Sequence[Any]) -> list[Any]:
        return [*map(_value, inputs, kinds, values), *values[len(inputs) :]]

    def with_trouble(result: Any) -> Any:
        """The callback's result with one output more."""
        if isinstance(result, dict) and any(isinstance(key, gr.blocks.Block) for key in result):
            return {**result, trouble: well}
        many = () if not outputs else (result,) if outputs == 1 else tuple(result)
        return (*many, well) if many else well

    @wraps(callback)
    def at_once(*values: Any) -> Any:
        try:
            return with_trouble(callback(*checked(values)))
        except Exception as error:
            return {trouble: said(error)}

    @wraps(callback)
    def in_pieces(*values: Any) -> Iterator[Any]:
        try:
            with closing(callback(*checked(values))) as results:
                yield from map(with_trouble, results)
        except Exception as error:
            yield {trouble: said(error)}

    return in_pieces if function.types_generator else at_once


def _value(component: Any, kind: TypeAdapter[Any] | None, value: Any) -> Any:
    name = component.label or type(component).__name__
    try:
        checked = value if kind is None else kind.validate_python(value)
    except ValidationError as error:
        found = "is empty" if value is None else f"cannot be used: {error.errors()[0]['msg']}"
        raise UsageError(f"“{name}” {found}. Give it a value and try again.") from None
    if isinstance(component, gr.Slider) and not component.minimum <= checked <= LARGEST:
        raise UsageError(f"“{name}” cannot be used: it is less than {component.minimum} or far too much.")
    return checked


def said(error: Exception) -> str:
    """What happened and what to do."""
    if isinstance(error, RagBlendError):
        words = str(error)
    else:
        LOG.error("a callback of the page failed", exc_info=error)
        reason = f"{type(error).__name__}: {error}"[:LONGEST_REASON]
        words = (
            f"Something failed that RAGBlend did not foresee ({reason}). What is stored is kept; what you asked for "
            "may not have been done. Try again; if it fails again, load the page anew. The terminal in which "
            "`ragblend ui` runs says where it failed."
        )
    return views.frame.trouble(words)
