"""The parameters that both frameworks' models share, with their checks, and the engine behind them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragblend.engine.config import server_url
from ragblend.integrations.backend import Backend
from ragblend.integrations.calls import Call, drop_neutral_options, resolve_aliases
from ragblend.integrations.passages import Passage

log = logging.getLogger("ragblend")
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "logit_bias", "stop", "seed",
)  # fmt: skip
# Parameters that the arguments of a call override.
PER_CALL = ("max_new_tokens", *SAMPLING, "method", "ratio")
# Options of hosted models, which have no effect here. They are dropped; a key must not be shown anywhere.
HOSTED_OPTIONS = ("base_url", "api_base", "max_retries")
KEY_SUFFIX = "api_key"  # as in openai_api_key
Share = Annotated[float, Field(ge=0, le=1)]


class LiveModels:
    """The living models of one framework, with which retrieved passages are registered.

    subscribe() is called once, before the first model. A registration belongs to a text (its hash and node id), not to
    a request, so, unlike context variables set by a handler, it cannot be stale when streams interleave.
    """

    def __init__(self, subscribe: Callable[[], None]) -> None:
        self.models: WeakValueDictionary[int, ModelParameters] = WeakValueDictionary()
        self._subscribe_once, self._lock = cache(subscribe), threading.Lock()

    def add(self, model: "ModelParameters") -> None:
        with self._lock:
            self._subscribe_once()
            self.models[id(model)] = model

    def register(self, passages: Sequence[Passage]) -> None:
        """Register retrieved passages once for each home and collection. Errors are logged, not raised."""
        with self._lock:
            models = [model for model in self.models.values() if model.register_retrieved]
        for backend in {(model.home, model.collection): model.backend for model in models}.values():
            try:
                backend.remember(passages)
                shortest = min((len(passage.text) for passage in passages), default=0)
                backend.registry.retrieved_chars = shortest
            except Exception:
                log.warning(
                    "retrieved passages could not be registered; they will not be reused", exc_info=True
                )


class ModelParameters(BaseModel):
    """Parameters and their checks; creating a model loads and opens nothing.

    The token limit is `max_new_tokens`; a framework with another name for it adds a property.
    """

    # Errors do not repeat the arguments, which may contain a key.
    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)
    aliases: ClassVar[Mapping[str, str]]
    live_models: ClassVar[LiveModels]

    model: str = "default"
    """`default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file; `model_name` is taken as well."""
    home: str | None = None
    """Where stored KV lives; RAGBLEND_HOME, or the user's data folder, if None."""
    collection: str = "default"
    """The namespace of passages in the home."""
    device: str | None = None
    """cpu, cuda, mps; None for the best there is."""
    dtype: str | None = None
    """float32, bfloat16, float16; None for the fastest."""
    url: str | None = None
    """URL of the vLLM server that runs the model, with `backend="vllm"`; None: load the model in this process."""
    method: str | None = None
    """The prefill method: `probe-shift` (the default), `full`, `reuse`, ..."""
    ratio: Share | Literal["auto"] | None = None
    """The share of stored tokens to recompute; 0.25 if None; `auto`: as many as take no longer than loading KV."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from this number of most likely tokens; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Drop tokens less likely than this share of the best one's probability; 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides the scores of tokens that have occurred; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the scores of tokens that the answer has; 0 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the scores of tokens for each of their occurrences in the answer; 0 is off."""
    logit_bias: dict[int, float] | None = None
    """Added to the scores of these token ids."""
    stop: list[str] | None = None
    """Texts that end an answer."""
    seed: int | None = None
    """Seed of the sampling; None for another one each time."""
    logprobs: bool = False
    """Whether answers include their tokens' log-probabilities."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """How many of the most likely alternatives are included for each token."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is cancelled."""
    register_retrieved: bool = True
    """Whether passages found by the framework's retrievers in this process are registered with this model."""
    learn_from_prompts: bool = True
    """Whether text that recurs in a second prompt becomes a passage."""

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, values: Any) -> Any:
        """Resolve aliases, and drop None and options without effect; each framework handles unknown names."""
        if not isinstance(values, dict):
            return values
        given = {
            name: value
            for name, value in values.items()
            if value is not None and name not in HOSTED_OPTIONS and not name.endswith(KEY_SUFFIX)
        }
        given = resolve_aliases(drop_neutral_options(given), cls.aliases)
        given["url"] = server_url(given.pop("backend", None), given.get("url"))
        unknown = {name: given.pop(name) for name in list(given) if name not in cls.model_fields}
        return cls._handle_unknown(given, unknown) if unknown else given

    @classmethod
    def _handle_unknown(cls, given: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    @field_validator("home", mode="before")
    @classmethod
    def _home_as_text(cls, home: Any) -> Any:
        return str(home) if isinstance(home, Path) else home

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str | None) -> str | None:
        # Here, because LlamaIndex's `Refine` would turn the error into an "Empty Response".
        if method is not None:
            from ragblend.engine.selection import policy_named

            policy_named(method)
        return method

    @field_validator("generate_kwargs", "model_kwargs", check_fields=False)
    @classmethod
    def _check_more_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Raises UsageError for unknown options of the engine, before the first call."""
        Call.of(Backend(), (), False, options)
        return options

    @model_validator(mode="after")
    def _track_after_validation(self) -> Self:
        return self._track()

    def _track(self) -> Self:
        self.live_models.add(self)
        return self

    # Pydantic does not validate what it copies and unpickles.

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._track()

    def __copy__(self) -> Self:
        return super().__copy__()._track()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super().__deepcopy__(memo)._track()

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def backend(self) -> Backend:
        """The engine and the passages, shared by equal models in this process; opening it loads nothing."""
        return Backend(self.model, self.home, self.collection, self.device, self.dtype, self.url)

    def _call(
        self, passages: Sequence[Passage], more: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Call:
        """A call with the fields as options; `more` overrides them, `arguments` override both. Raises UsageError."""
        fields = {name: getattr(self, name) for name in (*PER_CALL, "timeout", "logprobs")}
        if self.logprobs:
            fields["top_logprobs"] = self.top_logprobs
        return Call.of(self.backend, passages, self.learn_from_prompts, fields, more, arguments)
