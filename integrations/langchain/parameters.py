"""What both models can be told, and how they tell it to the engine and to LangChain."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from langchain_core.language_models.base import LangSmithParams
from pydantic import Field, field_validator

from ragblend.integrations import parameters
from ragblend.integrations.calls import Call, one_name_each
from ragblend.integrations.langchain.documents import passages_of
from ragblend.integrations.langchain.errors import framework_errors
from ragblend.integrations.langchain.listener import LEARNERS
from ragblend.integrations.langchain.tools import openai_tools, wanted_schema

PROVIDER = "ragblend"
FRAMEWORKS_OWN = ("stream", "strict")  # LangChain's own switches, which it hands on to the model


class Parameters(parameters.Parameters):
    """Of the chat model and the text model, in front of LangChain's own class."""

    other_names: ClassVar[Mapping[str, str]] = {
        "model_name": "model",
        "max_new_tokens": "max_tokens",
        "max_completion_tokens": "max_tokens",
        "stop_sequences": "stop",
        "request_timeout": "timeout",
    }
    learners = LEARNERS

    max_tokens: int = Field(default=256, ge=1)
    """The most tokens of an answer."""
    streaming: bool | None = None
    """Whether `invoke` streams inside, for callbacks that want tokens; False stops a chat model's `stream` too."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine, by its own names."""

    @classmethod
    def _with_unknown(cls, told: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        """To `model_kwargs` with a warning, as in LangChain."""
        warnings.warn(
            f"{cls.__name__} has no parameter {', '.join(unknown)}; transferred to model_kwargs. Please confirm that "
            "this is what you intended.",
            stacklevel=5,
        )
        return told | {"model_kwargs": {**told.get("model_kwargs", {}), **unknown}}

    @field_validator("model_kwargs")
    @classmethod
    def _known_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        return cls._checked_options(options)

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens

    def _settle(self, stop: Sequence[str] | None, arguments: Mapping[str, Any]) -> Call:
        """The call's own arguments go over the parameters."""
        given = one_name_each(arguments, self.other_names)
        given = {name: value for name, value in given.items() if name not in FRAMEWORKS_OWN}
        if tools := given.pop("tools", None):
            given["tools"] = openai_tools(tools)
        if wanted := given.pop("response_format", None):
            given["json_schema"] = wanted_schema(wanted)
        if stop is not None:
            given["stop"] = stop
        passages = passages_of(given.pop("passages", None) or ())
        model = given.pop("model", None)
        asked = self if model is None else self.model_copy(update={"model": model})
        return asked._call(passages, self.model_kwargs, given)

    def forget(self, ids: Sequence[str]) -> int:
        """Forget documents that were deleted: they are found no more, and their KV goes. Returns the bytes freed."""
        with framework_errors():
            return self.backend.forget(ids)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer; loads that, not the weights."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        with framework_errors():
            return list(self.backend.engine.tokenizer.encode(text, add_special_tokens=False))

    @classmethod
    def is_lc_serializable(cls) -> bool:
        return True

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        """The parameters by which two models answer differently: for traces and for LangChain's cache."""
        names = (
            "model",
            "max_tokens",
            *parameters.PER_CALL[1:],
            "collection",
            "device",
            "dtype",
            "url",
            "model_kwargs",
        )
        return {name: getattr(self, name) for name in names}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        """LangChain's parameters for traces, completed: the call's own arguments go over the fields."""
        params: LangSmithParams = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]
        with framework_errors():
            given = one_name_each(kwargs, self.other_names)
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = given.get("model") or self.model
        params["ls_temperature"] = self.temperature if (told := given.get("temperature")) is None else told
        params["ls_max_tokens"] = given.get("max_tokens") or self.max_tokens
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop
        return params
