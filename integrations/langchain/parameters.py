"""The parameters of both LangChain models, and how they reach the engine and LangChain."""

import warnings
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.language_models.base import LangSmithParams
from pydantic import Field

from ragblend.integrations.backend import kv_statistics, logprobs
from ragblend.integrations.calls import Call, PreparedCall, resolve_aliases
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.errors import langchain_errors
from ragblend.integrations.langchain.listener import LIVE_MODELS
from ragblend.integrations.langchain.tools import openai_tools, response_format_schema
from ragblend.integrations.parameters import PER_CALL, ModelParameters

if TYPE_CHECKING:
    from ragblend.engine.results import Result

PROVIDER = "ragblend"
Stop = list[str] | None
LANGCHAIN_OPTIONS = ("stream", "strict")  # LangChain evaluates these itself, but passes them on


class LangChainParameters(ModelParameters):
    """Parameters of the chat model and the text model; a mixin before LangChain's own base class."""

    aliases: ClassVar[Mapping[str, str]] = {
        "model_name": "model",
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "stop_sequences": "stop",
        "request_timeout": "timeout",
    }
    live_models = LIVE_MODELS

    max_tokens: int = Field(default=256, ge=1)
    """The most tokens of an answer."""
    streaming: bool | None = None
    """Whether `invoke` streams internally, for callbacks that need tokens; False also stops a chat model's `stream`."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine, by its own names."""

    @classmethod
    def _handle_unknown(cls, given: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """Move unknown parameters to `model_kwargs` with a warning, as LangChain does."""
        warnings.warn(
            f"{cls.__name__} has no parameter {', '.join(unknown)}; transferred to model_kwargs. Please confirm that "
            "this is what you intended.",
            stacklevel=5,
        )
        return given | {"model_kwargs": {**given.get("model_kwargs", {}), **unknown}}

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens

    @langchain_errors()
    def _call_with(self, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> Call:
        """A call whose arguments override the parameters."""
        given = resolve_aliases(arguments, self.aliases)
        given = {name: value for name, value in given.items() if name not in LANGCHAIN_OPTIONS}
        if tools := given.pop("tools", None):
            given["tools"] = openai_tools(tools)
        if response_format := given.pop("response_format", None):
            given["json_schema"] = response_format_schema(response_format)
        if stop is not None:
            given["stop"] = stop
        passages = passages_of(given.pop("passages", None) or ())
        model = given.pop("model", None)
        source = self if model is None else self.model_copy(update={"model": model})
        return source._call(passages, self.model_kwargs, given)

    @abstractmethod
    def _prepare(self, model_input: Any, stop: Stop, arguments: Mapping[str, Any]) -> PreparedCall:
        """A prepared call. model_input: the messages of a chat model, or the prompt of a text model."""

    @staticmethod
    @abstractmethod
    def _chunk(item: "str | Result", call: Call) -> Any:
        """The chunk of a stream for a piece of text, or for the whole result at the end."""

    def _stream(
        self, model_input: Any, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        """Stream chunks, each reported once: `BaseChatModel.stream` passes no run manager, but reports itself."""
        prepared = self._prepare(model_input, stop, kwargs)
        with closing(prepared.stream()) as items:
            for item in items:
                chunk = self._chunk(item, prepared.call)
                if run_manager is not None:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self, model_input: Any, stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        """As `_stream`, in an event loop."""
        prepared = self._prepare(model_input, stop, kwargs)
        async with aclosing(await prepared.astream()) as items:
            async for item in items:
                chunk = self._chunk(item, prepared.call)
                if run_manager is not None:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    def forget(self, ids: Sequence[str]) -> int:
        """Unregister documents and delete their KV. Returns the bytes freed."""
        with langchain_errors():
            return self.backend.forget(ids)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids by the model's tokenizer; does not load the weights."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        with langchain_errors():
            return list(self.backend.engine.tokenizer.encode(text, add_special_tokens=False))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """The parameters that affect answers, for traces and LangChain's cache."""
        location = ("collection", "device", "dtype", "url")
        names = ("model", "max_tokens", *PER_CALL[1:], *location, "model_kwargs")
        return {name: getattr(self, name) for name in names}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """LangChain's parameters for traces, completed; the call's own arguments override the fields."""
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]
        with langchain_errors():
            given = resolve_aliases(kwargs, self.aliases)
        temperature = given.get("temperature")
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = given.get("model") or self.model
        params["ls_temperature"] = self.temperature if temperature is None else temperature
        params["ls_max_tokens"] = given.get("max_tokens") or self.max_tokens
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop
        return params


def response_metadata(result: "Result", call: Call) -> dict[str, Any]:
    """The report as metadata. LangChain adds up its numbers, so only one chunk of a stream may have it."""
    tokens = logprobs(result, call.backend.engine.tokenizer)
    return {
        **({} if tokens is None else {"logprobs": {"content": tokens}}),
        "model_name": call.backend.engine.model_name,
        "model_provider": PROVIDER,
        "finish_reason": "stop" if result.stopped else "length",
        "method": result.report.method,
        "ratio": result.report.ratio,
        "kv": kv_statistics(result),
    }
