"""What both models can be told: LangChain's usual names and ours."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from langchain_core.language_models.base import LangSmithParams
from langchain_core.utils import get_pydantic_field_names
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragblend.integrations.backend import Backend
from ragblend.integrations.calls import one_name_each
from ragblend.integrations.langchain.errors import framework_errors

PROVIDER = "ragblend"
SYNONYMS = {
    "model_name": "model",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop_sequences": "stop",
}
# Chat models of services take these. Here they mean nothing, and a key must not end up in `model_kwargs`.
FOR_SERVICES = ("base_url", "max_retries")
KEY = "api_key"  # openai_api_key, ...
DECODING = ("temperature", "max_tokens", "top_p", "top_k", "repetition_penalty", "stop", "seed")
Share = Annotated[float, Field(ge=0, le=1)]


class Parameters(BaseModel):
    """Fields of the chat model and the text model. Making one loads nothing and opens nothing."""

    # Errors do not repeat what was passed: somebody's key may stand beside what is wrong.
    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)

    model: str = "default"
    """`default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    max_tokens: int = Field(default=256, ge=1)
    """The most tokens of an answer."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    stop: list[str] | None = None
    seed: int | None = None
    streaming: bool = False
    """Whether `invoke` streams inside, for callbacks that want tokens."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up."""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """More options of the engine, by its own names."""

    home: str | None = None
    """Where the stored KV lives; RAGBLEND_HOME or the user's data folder if not given."""
    collection: str = "default"
    """A namespace of documents inside the home."""
    device: str | None = None
    dtype: str | None = None
    method: str | None = None
    """How prompts are read: `probe-shift` (as if None), `full`, `reuse`, ..."""
    ratio: Share | Literal["auto"] | None = None
    """The share of stored tokens that is computed again; 0.15 if None; `auto`: what loading hides."""
    register_retrieved: bool = True
    """Whether documents that LangChain's retrievers return in this process become known to this model."""

    @model_validator(mode="before")
    @classmethod
    def _accept_usual_names(cls, values: Any) -> Any:
        """Synonyms, None for the default; what is unknown goes to `model_kwargs` with a warning, as in LangChain."""
        if not isinstance(values, dict):
            return values
        values = {
            name: value
            for name, value in one_name_each(values, SYNONYMS).items()
            if value is not None and name not in FOR_SERVICES and not name.endswith(KEY)
        }
        known = get_pydantic_field_names(cls)
        extra = {name: values.pop(name) for name in list(values) if name not in known}
        if extra:
            warnings.warn(
                f"{cls.__name__} has no parameter {', '.join(extra)}; transferred to model_kwargs. Please confirm that "
                "this is what you intended.",
                stacklevel=4,
            )
            values["model_kwargs"] = {**values.get("model_kwargs", {}), **extra}
        return values

    @field_validator("home", mode="before")
    @classmethod
    def _accept_path(cls, home: Any) -> Any:
        return str(home) if isinstance(home, Path) else home

    @field_validator("stop", mode="before")
    @classmethod
    def _accept_one_stop(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens

    def backend(self, model: str | None = None) -> Backend:
        """The engine and registry behind this model, shared by all that name the same; nothing is loaded yet."""
        return Backend(model or self.model, self.home, self.collection, self.device, self.dtype)

    def get_token_ids(self, text: str) -> list[int]:
        """Ids by the model's own tokenizer; loads that, not the weights."""
        custom: Callable[[str], list[int]] | None = getattr(self, "custom_get_token_ids", None)
        if custom is not None:
            return custom(text)
        with framework_errors():
            return list(self.backend().engine.tokenizer.encode(text, add_special_tokens=False))

    def _traced(
        self, params: LangSmithParams, stop: list[str] | None, arguments: Mapping[str, Any]
    ) -> LangSmithParams:
        """LangChain's parameters for traces, completed: the call's own arguments go over the fields."""
        with framework_errors():
            given = {
                name: value for name, value in one_name_each(arguments, SYNONYMS).items() if value is not None
            }
        params["ls_provider"] = PROVIDER
        params["ls_model_name"] = given.get("model", self.model)
        params["ls_temperature"] = given.get("temperature", self.temperature)
        params["ls_max_tokens"] = given.get("max_tokens", self.max_tokens)
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop
        return params

    def _changing_answers(self) -> dict[str, Any]:
        """The parameters by which two models answer differently: for traces and for LangChain's cache."""
        names = ("model", *DECODING, "method", "ratio", "collection", "device", "dtype", "model_kwargs")
        return {name: getattr(self, name) for name in names}
