"""LlamaIndex's response synthesizers as `get_response_synthesizer` makes them, run under a watch. Imports LlamaIndex.

The classes and prompts are LlamaIndex's. Passages are packed whole, by this model's token counts (`WholePassages`,
which `configure` gives every application): LlamaIndex's own packer would cut them. `tree_summarize` is its map-reduce:
it packs as many passages into a call as the window takes, so where all of them fit, it is one call.
"""

from collections.abc import Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse
from llama_index.core.bridge.pydantic import PrivateAttr
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer

from ragblend.app.bench.modes import Answered, Call, answer_of
from ragblend.app.bench.prefilling import BenchError
from ragblend.app.bench.variants import Variant
from ragblend.integrations.llama_index import RAGBlendLLM, WholePassages

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

PREFIX = "llama-"  # before the response mode's name: LangChain has a `refine` too


class WatchedLLM(RAGBlendLLM):
    """Notes every call as it ends, and what went wrong: `Refine` makes "Empty Response" of a ValueError."""

    _calls: list[Call] = PrivateAttr(default_factory=list)
    _last_end: float = PrivateAttr(default=0.0)
    _error: Exception | None = PrivateAttr(default=None)
    _told: bool = PrivateAttr(default=True)  # that a prompt of summaries holds no passage is no news

    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        try:
            response = super().chat(messages, **kwargs)
        except Exception as error:
            self._error = error
            raise
        self._note(response.raw)
        return response

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        try:
            response = super().complete(prompt, formatted, **kwargs)
        except Exception as error:
            self._error = error
            raise
        self._note(response.raw)
        return response

    def _note(self, raw: Any) -> None:
        self._last_end = perf_counter()
        used = raw["usage"]
        self._calls.append(Call.of(used["prompt_tokens"], used["completion_tokens"], raw["kv"]))


def watched_model(engine: "Engine", variant: Variant, max_tokens: int) -> WatchedLLM:
    """LlamaIndex's view of this very engine; all calls end after as many tokens."""
    config = engine.config
    model = WatchedLLM(
        model=config.model,
        home=str(engine.home),
        collection=config.collection,
        device=config.device,
        dtype=config.dtype,
        max_new_tokens=max_tokens,
        register_retrieved=False,
        **variant.arguments,
    )
    assert model.backend.engine is engine, config
    return model


def ask(
    engine: "Engine", variant: Variant, passages: Sequence[str], question: str, max_new_tokens: int
) -> Answered:
    """The mode's answer, timed, and the calls that it took. Raises what a call raised."""
    assert variant.mode is not None, variant
    return ask_model(watched_model(engine, variant, max_new_tokens), variant.mode, passages, question)


def ask_model(model: WatchedLLM, mode: str, passages: Sequence[str], question: str) -> Answered:
    """The same of a model that is there."""
    kind = ResponseMode(mode.removeprefix(PREFIX))
    synthesizer = get_response_synthesizer(
        model, prompt_helper=WholePassages.of_llm(model), response_mode=kind
    )
    begun = perf_counter()
    text = synthesizer.get_response(question, list(passages))
    if model._error is not None:
        raise model._error
    if not model._calls:
        raise BenchError(f"LlamaIndex's {kind.value} answered without a call to the model: {text!r}")
    first = model._last_end - model._calls[-1].after_first_ms / 1000
    return answer_of(str(text), 1000 * (first - begun), model._calls)
