"""RAGBlend's errors as LlamaIndex expects them."""

from collections.abc import Iterator
from contextlib import contextmanager

from ragblend.kvstore.errors import PromptError, PromptTooLongError, UsageError

ADVICE = (
    "LlamaIndex packs prompts by another model's token counts until it knows this one's: call "
    "`ragblend.integrations.llama_index.configure(llm)` once, or retrieve fewer nodes (similarity_top_k)"
)


class ContextWindowError(PromptTooLongError, ValueError):
    """The prompt of a direct call is longer than the model's window."""


@contextmanager
def llama_index_errors(from_template: bool) -> Iterator[None]:
    """Raise a too long prompt as a ValueError with advice, as LlamaIndex's own packer does.

    from_template: the prompt comes from `LLM.predict`, `structured_predict` or a program, and so from a synthesizer.
    Then neither that nor a UsageError (of an unsupported schema, say) is raised as a ValueError: `Refine`, the base of
    query and chat engines, would treat it as a malformed answer, log it and return "Empty Response".
    """
    try:
        yield
    except PromptTooLongError as error:
        kind = PromptTooLongError if from_template else ContextWindowError
        raise kind(f"{error}. {ADVICE}") from error
    except UsageError as error:
        if not from_template:
            raise
        raise PromptError(str(error)) from error
