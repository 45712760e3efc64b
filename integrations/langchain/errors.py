"""RAGBlend's errors as LangChain's: each is an instance of both, so that code that catches either works."""

from collections.abc import Iterator
from contextlib import contextmanager

from langchain_core.exceptions import (
    ContextOverflowError,
    LangChainException,
    ModelInvalidRequestError,
    ModelTimeoutError,
)
from langchain_core.exceptions import ModelNotFoundError as LangChainModelNotFoundError

from ragblend.integrations.calls import AnswerTimeout
from ragblend.kvstore.errors import (
    ModelNotFoundError,
    PromptError,
    PromptTooLongError,
    RagBlendError,
    UsageError,
)


class InvalidRequest(UsageError, ModelInvalidRequestError):
    """A parameter or a message that the model does not support; also a ValueError."""


class InvalidPrompt(PromptError, ModelInvalidRequestError):
    """A prompt that cannot be run."""


class ContextOverflow(PromptTooLongError, ContextOverflowError):
    """The prompt is longer than the model's window."""


class ModelMissing(ModelNotFoundError, LangChainModelNotFoundError):
    """The model was not found."""


class TimedOut(AnswerTimeout, ModelTimeoutError):
    """The answer took longer than `timeout`."""


_MOST_SPECIFIC_FIRST: tuple[tuple[type[RagBlendError], type[RagBlendError]], ...] = (
    (PromptTooLongError, ContextOverflow),
    (ModelNotFoundError, ModelMissing),
    (AnswerTimeout, TimedOut),
    (UsageError, InvalidRequest),
    (PromptError, InvalidPrompt),
)


@contextmanager
def langchain_errors() -> Iterator[None]:
    """Raise RAGBlend's errors as LangChain's of the same meaning, which are still RAGBlend's."""
    try:
        yield
    except RagBlendError as error:
        if isinstance(error, LangChainException):
            raise
        for ours, theirs in _MOST_SPECIFIC_FIRST:
            if isinstance(error, ours):
                raise theirs(str(error)) from error
        raise
