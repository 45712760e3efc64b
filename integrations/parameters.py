"""What a model is made with in either framework: one set of fields and checks, and the engine behind them."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self
from weakref import WeakValueDictionary

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ragblend.engine.config import server_url
from ragblend.integrations.backend import Backend
from ragblend.integrations.calls import Call, one_name_each, without_neutral
from ragblend.integrations.passages import Passage

log = logging.getLogger("ragblend")
SAMPLING = ("temperature", "top_p", "top_k", "repetition_penalty", "stop", "seed")
PER_CALL = ("max_new_tokens", *SAMPLING, "method", "ratio")
# Models of services take these. Here they mean nothing, and a key must not end up in what is shown.
FOR_SERVICES = ("base_url", "api_base", "max_retries")
KEY = "api_key"  # openai_api_key, ...
Share = Annotated[float, Field(ge=0, le=1)]


class Learners:
    """The living models of one framework, which learn what its retrievers find; start() is called before the first.

    What is learnt is a fact about a text (its hash and its node's id), not about a request: it cannot come out stale
    when streams interleave, as context variables set by a handler do.
    """

    def __init__(self, start: Callable[[], None]) -> None:
        self.models: WeakValueDictionary[int, Parameters] = WeakValueDictionary()
        self._start, self._started, self._lock = start, False, threading.Lock()

    def add(self, model: "Parameters") -> None:
        with self._lock:
            if not self._started:
                self._start()
            self._started = True
            self.models[id(model)] = model

    def learn(self, passages: Sequence[Passage]) -> None:
        """Register them once for every home and collection; what fails is logged, for the retrieval goes on."""
        with self._lock:
            models = [model for model in self.models.values() if model.register_retrieved]
        for backend in {(model.home, model.collection): model.backend for model in models}.values():
            try:
                backend.remember(passages)
                backend.registry.awaited = min((len(passage.text) for passage in passages), default=0)
            except Exception:
                log.warning(
                    "retrieved passages could not be registered; they will not be reused", exc_info=True
                )


class Parameters(BaseModel):
    """Making one loads nothing and opens nothing.

    The most tokens of an answer are `max_new_tokens` here; a framework whose users call it otherwise has a property.
    """

    # Errors do not repeat what was passed: somebody's key may stand beside what is wrong.
    model_config = ConfigDict(arbitrary_types_allowed=True, hide_input_in_errors=True)
    other_names: ClassVar[Mapping[str, str]]
    learners: ClassVar[Learners]

    model: str = "default"
    """`default` (the bundled SmolLM2), a hub id, a local folder or a `.gguf` file; `model_name` is taken as well."""
    home: str | None = None
    """Where stored KV lives; RAGBLEND_HOME, or the user's data folder, if None."""
    collection: str = "default"
    """The namespace of passages inside the home."""
    device: str | None = None
    """cpu, cuda, mps; None for the best there is."""
    dtype: str | None = None
    """float32, bfloat16, float16; None for what is fast."""
    url: str | None = None
    """Of the vLLM server that has the model, with `backend="vllm"`; None: it is loaded here."""
    method: str | None = None
    """How prompts are read: `probe-shift` (as if None), `full`, `reuse`, ..."""
    ratio: Share | Literal["auto"] | None = None
    """The share of stored tokens that is computed again; 0.15 if None; `auto`: what loading hides."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling; 1 is off."""
    top_k: int = Field(default=0, ge=0)
    """Sample from so many tokens; 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """What was said counts less by it; 1 is off."""
    stop: list[str] | None = None
    """Texts that end an answer."""
    seed: int | None = None
    """Of the sampling; None for another each time."""
    logprobs: bool = False
    """Whether answers tell their tokens' log-probabilities."""
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    """Of how many of the most likely tokens as well."""
    timeout: float | None = Field(default=None, gt=0)
    """Seconds after which an answer is given up."""
    register_retrieved: bool = True
    """Whether what the framework's own retrievers find in this process becomes known to this model."""
    learn_from_prompts: bool = True
    """Whether text that comes back in a second prompt is kept as a passage, whoever put it there."""

    @model_validator(mode="before")
    @classmethod
    def _known_by_one_name(cls, values: Any) -> Any:
        """Synonyms, None for the default, and what says nothing here; of the unknown each framework judges."""
        if not isinstance(values, dict):
            return values
        told = {name: value for name, value in values.items() if value is not None}
        told = {n: value for n, value in told.items() if n not in FOR_SERVICES and not n.endswith(KEY)}
        told = one_name_each(without_neutral(told), cls.other_names)
        told["url"] = server_url(told.pop("backend", None), told.get("url"))
        unknown = {name: told.pop(name) for name in list(told) if name not in cls.model_fields}
        return cls._with_unknown(told, unknown) if unknown else told

    @classmethod
    def _with_unknown(cls, told: dict[str, Any], unknown: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    @field_validator("home", mode="before")
    @classmethod
    def _home_as_text(cls, home: Any) -> Any:
        return str(home) if isinstance(home, Path) else home

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_as_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @classmethod
    def _checked_options(cls, options: dict[str, Any]) -> dict[str, Any]:
        """More options of the engine. Raises UsageError where they are said, not at the first call."""
        Call.of(Backend(), (), False, options)
        return options

    @field_validator("method")
    @classmethod
    def _known_method(cls, method: str | None) -> str | None:
        # Here, because LlamaIndex's `Refine` would make an "Empty Response" of the error.
        if method is not None:
            from ragblend.engine.selection import policy_named

            policy_named(method)
        return method

    @model_validator(mode="after")
    def _listen(self) -> Self:
        return self._learning()

    def _learning(self) -> Self:
        self.learners.add(self)
        return self

    # What pydantic copies and unpickles is not validated again.

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._learning()

    def __copy__(self) -> Self:
        return super().__copy__()._learning()

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return super().__deepcopy__(memo)._learning()

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def backend(self) -> Backend:
        """The engine and the passages, shared by all that name the same in this process; opening it loads nothing."""
        return Backend(self.model, self.home, self.collection, self.device, self.dtype, self.url)

    def _call(
        self, passages: Sequence[Passage], more: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> Call:
        """The fields, then more options, then the call's own arguments. Raises UsageError."""
        fields = {name: getattr(self, name) for name in (*PER_CALL, "timeout", "logprobs")}
        if self.logprobs:
            fields["top_logprobs"] = self.top_logprobs
        return Call.of(self.backend, passages, self.learn_from_prompts, fields, more, arguments)
