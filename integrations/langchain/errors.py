"""Our errors as LangChain's: each is both, so that code which catches either goes on working."""

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    LangChainException,
    ModelInvalidRequestError,
    ModelTimeoutError,
)
from langchain_core.exceptions import ModelNotFoundError as LangChainModelNotFoundError

from ragblend.integrations import calls
from ragblend.kvstore.errors import (
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    RagBlendError,
    UsageError,
)


class InvalidRequest(UsageError, ModelInvalidRequestError):
    """A parameter or a message that the model cannot take; a ValueError too."""


class InvalidPrompt(PromptError, ModelInvalidRequestError):
    """A prompt that cannot be run."""


class ContextOverflow(PromptTooLongError, ContextOverflowError):
    """The prompt is longer than the model's window."""


class ModelMissing(ModelNotFoundError, LangChainModelNotFoundError):
    """There is no model at that place."""


class TimedOut(calls.TimedOut, ModelTimeoutError):
    """The answer took longer than `timeout`."""


_MOST_SPECIFIC_FIRST: tuple[tuple[type[RagBlendError], type[RagBlendError]], ...] = (
    (PromptTooLongError, ContextOverflow),
    (ModelNotFoundError, ModelMissing),
    (calls.TimedOut, TimedOut),
    (UsageError, InvalidRequest),
    (PromptError, InvalidPrompt),
)


@contextmanager
def framework_errors() -> Iterator[None]:
    """What RAGBlend raises inside comes out as LangChain's error of the same meaning, and still as RAGBlend's."""
    try:
        yield
    except RagBlendError as error:
        if isinstance(error, LangChainException):
            raise
        for ours, theirs in _MOST_SPECIFIC_FIRST:
            if isinstance(error, ours):
                raise theirs(str(error)) from error
        raise
