"""Our errors in LlamaIndex's own kinds."""

from collections.abc import Iterator
from contextlib import contextmanager

from ragblend.kvstore.errors import PromptError, PromptTooLongError, UsageError

ADVICE = (
    "LlamaIndex packs prompts by another model's token counts until it is told this one's: call "
    "`ragblend.integrations.llama_index.configure(llm)` once, or retrieve fewer nodes (similarity_top_k)"
)


class ContextWindowError(PromptTooLongError, ValueError):
    """The prompt of a direct call is longer than the model's window."""


@contextmanager
def in_llama_index_words(from_template: bool) -> Iterator[None]:
    """A prompt that is too long is a ValueError, as LlamaIndex's own packer has it, with what to do about it.

    from_template: the prompt comes by `LLM.predict`, `structured_predict` or a program, so from a synthesizer. Then
    neither that nor a UsageError (of a schema that cannot be kept to, say) is a ValueError: `Refine`, on which query
    engines and chat engines stand, takes those for badly formed answers, logs them and says "Empty Response".
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
