"""What a RAGBlendLLM is made with, under the names that LlamaIndex's users know; nothing is loaded by making one."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from llama_index.core.base.llms.types import LLMMetadata
from llama_index.core.bridge.pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator
from llama_index.core.llms.llm import LLM

from ragblend.engine.config import DecodeOptions
from ragblend.engine.prompt import Literal as Text
from ragblend.engine.prompt import Prompt
from ragblend.integrations.backend import Backend, Turn
from ragblend.integrations.calls import Call, engine_options
from ragblend.integrations.llama_index.learning import listen
from ragblend.integrations.llama_index.nodes import Nodes, named_passages, passages_of
from ragblend.kvstore.errors import UsageError

DECODING = ("max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "stop", "seed")
PER_CALL = (*DECODING, "method", "ratio")
Share = Annotated[float, Field(ge=0, le=1)]


class Parameters(LLM):
    """The fields, what is derived from them, and the engine behind them."""

    model_config = ConfigDict(hide_input_in_errors=True)  # somebody's key may stand beside what is wrong

    model: str = Field(
        default="default",
        description="`default` (the bundled model), a hub id, a folder or a .gguf file; `model_name` is taken as well.",
    )
    home: str | None = Field(
        default=None, description="Where stored KV lives: RAGBLEND_HOME, or the user's data folder."
    )
    collection: str = Field(default="default", description="The namespace of node ids and stored KV.")
    device: str | None = Field(default=None, description="cpu, cuda, mps; None for the best there is.")
    dtype: str | None = Field(default=None, description="float32, bfloat16, float16; None for what is fast.")
    method: str | None = Field(
        default=None, description="How prompts are read; None for the engine's default."
    )
    ratio: Share | Literal["auto"] | None = Field(
        default=None, description="The share of stored tokens to recompute; `auto`: what loading hides."
    )
    context_window: int | None = Field(
        default=None, gt=0, description="Tokens; None for the model's own window."
    )
    max_new_tokens: int = Field(default=256, gt=0, description="The longest answer, in tokens.")
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy.")
    top_p: float = Field(default=1.0, gt=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int = Field(default=0, ge=0, description="Sample from so many tokens; 0 is off.")
    repetition_penalty: float = Field(
        default=1.0, gt=0, description="What was said counts less by it; 1 is off."
    )
    timeout: float | None = Field(
        default=None, gt=0, description="Seconds after which an answer is given up."
    )
    stop: list[str] = Field(default_factory=list, description="Texts that end an answer.")
    seed: int | None = Field(default=None, description="Of the sampling; None for another each time.")
    generate_kwargs: dict[str, Any] = Field(default_factory=dict, description="More options of decoding.")
    is_chat_model: bool | None = Field(
        default=None, description="None: whether the tokenizer has a chat template."
    )
    register_retrieved: bool = Field(
        default=True, description="Register the nodes that LlamaIndex's retrievers find, by its own events."
    )
    _backend: Backend | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _know_all_names(cls, data: Any) -> Any:
        """`model_name` is `model`; a name that nobody knows is an error, with the nearest one that there is."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if "model_name" in data:
            name = data.pop("model_name")
            if data.setdefault("model", name) != name:
                raise UsageError(f"model {data['model']!r} and model_name {name!r} differ; pass one of them")
        for name in data.keys() - cls.model_fields.keys():
            near = difflib.get_close_matches(name, cls.model_fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(cls.model_fields))}"
            raise UsageError(f"{cls.__name__} has no parameter {name!r}; {hint}")
        return data

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
    def _check_method(cls, method: str | None) -> str | None:
        if method is not None:  # here, because `Refine` would make an "Empty Response" of the error
            from ragblend.engine.selection import policy_named

            policy_named(method)
        return method

    @field_validator("generate_kwargs")
    @classmethod
    def _check_generate_kwargs(cls, options: dict[str, Any]) -> dict[str, Any]:
        DecodeOptions.of(engine_options(options))
        return options

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if self.register_retrieved:
            listen(self)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> "Parameters":
        """LlamaIndex copies components at will; the engine behind them stays one."""
        copied = self.model_copy()
        if self.register_retrieved:
            listen(copied)
        return copied

    @property
    def model_name(self) -> str:
        return self.model

    @property
    def backend(self) -> Backend:
        """The engine, shared by all that use the same model and home in this process; opening it loads nothing."""
        if self._backend is None:
            self._backend = Backend(
                model=self.model,
                home=self.home,
                collection=self.collection,
                device=self.device,
                dtype=self.dtype,
            )
        return self._backend

    @property
    def metadata(self) -> LLMMetadata:
        """What the model is. Reads its config and tokenizer, never its weights, and only what was not given."""
        return LLMMetadata(
            context_window=self.context_window or self.backend.engine.context_window,
            num_output=self.max_new_tokens,
            is_chat_model=self._chats,
            is_function_calling_model=False,
            model_name=self.model,
        )

    @property
    def _chats(self) -> bool:
        if self.is_chat_model is not None:
            return self.is_chat_model
        return self.backend.engine.tokenizer.chat_template is not None

    def to_payload(self) -> dict[str, Any]:
        """For events. Said without the metadata, which may load a tokenizer in the event loop; no paths of yours."""
        fields = ("collection", *PER_CALL)
        return {"class_name": self.class_name(), "model_name": self.model} | {
            name: getattr(self, name) for name in fields
        }

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text by the model's own tokenizer: what LlamaIndex's packers and splitters want to count."""
        segment = Text(text, verbatim=True)
        return list(self.backend.engine.tokenize(Prompt([segment])).segment_ids[-1])

    @property
    def template_tokens(self) -> int:
        """Tokens that the chat template adds to a system and a user message, which LlamaIndex does not count."""
        empty = self.backend.chat_prompt([Turn("system", ("",)), Turn("user", ("",))])
        return len(self.backend.engine.tokenize(empty).token_ids)

    def remember(self, nodes: Nodes, encode: bool = False) -> None:
        """Register nodes, so that their texts are found in prompts; encode: store their KV now, rather than on use."""
        self.backend.remember(passages_of(nodes), encode=encode)

    def forget(self, node_ids: list[str]) -> int:
        """Forget nodes that were deleted: their registration and the KV that no other node shares."""
        return self.backend.forget(node_ids)

    def _call(self, kwargs: dict[str, Any], passages: Any = None) -> Call:
        """The fields, then generate_kwargs, then the call's own arguments."""
        given = dict(kwargs)
        named = named_passages(given.pop("passages", passages), given.pop("nodes", None))
        fields = {name: getattr(self, name) for name in (*PER_CALL, "timeout")}
        return Call.of(self.backend, named, fields, self.generate_kwargs, given)
