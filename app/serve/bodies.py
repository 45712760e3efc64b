"""What clients may send. Names that nobody knows are refused: an option without effect would be taken for one with."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ragblend.engine.prompt import ToolCall
from ragblend.integrations.backend import Turn
from ragblend.integrations.parameters import PER_CALL
from ragblend.integrations.tools import schema_in
from ragblend.kvstore.errors import UsageError

ROLES = {"developer": "system", "function": "tool"} | {
    each: each for each in ("system", "user", "assistant", "tool")
}
MOST_MESSAGES = 10_000
MOST_CHOICES = 8
MOST_TEXTS = 2048
Long = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]


class Body(BaseModel):
    """Errors do not repeat what was sent."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _text_throughout(cls, values: Any) -> Any:
        """JSON can hold halves of surrogate pairs, which are no text and cannot be tokenized."""
        if not isinstance(values, dict):  # not JSON, or no object: said by whoever looks next
            return values
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string holds half of a surrogate pair, which is no text") from None
        return values


class StreamOptions(Body):
    """Of OpenAI's interface; obfuscation, which pads events against listeners, has no effect here."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Options(Body):
    """How to answer, by OpenAI's names; from method on, timeout and learn_from_prompts, they are ours."""

    model: str
    max_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Long | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    method: str | None = None
    ratio: float | Literal["auto"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    learn_from_prompts: bool = True
    # These tell a service who asks, or what it may keep: nothing here depends on it.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self) -> dict[str, Any]:
        """What `Call.of` takes."""
        named = (*PER_CALL, "max_tokens", "presence_penalty", "frequency_penalty", "logit_bias")
        return {name: getattr(self, name) for name in named if getattr(self, name, None) is not None}


class MessageBody(Body):
    """One message; content: a text, or parts of the type `text`."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: None = None
    reasoning_content: Any = None


class ChatBody(Options):
    """`/v1/chat/completions`."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None

    def options(self) -> dict[str, Any]:
        more = (
            "max_completion_tokens",
            "logprobs",
            "top_logprobs",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
        )
        found = super().options() | {n: getattr(self, n) for n in more if getattr(self, n) is not None}
        schema = schema_in(self.response_format)
        return found | ({} if schema is None else {"json_schema": schema})

    def turns(self) -> list[Turn]:
        """Raises UsageError for what the model cannot read."""
        turns = [_turn(number, message) for number, message in enumerate(self.messages)]
        # A template would print an empty turn.
        return [turn for turn in turns if turn.pieces or turn.calls or turn.role != "assistant"]


class CompletionBody(Options):
    """`/v1/completions`: text that is continued as it stands."""

    prompt: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: None = None

    def options(self) -> dict[str, Any]:
        more = {name: getattr(self, name) for name in ("logprobs", "echo", "best_of")}
        return super().options() | {name: value for name, value in more.items() if value is not None}

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class EmbeddingBody(Body):
    """`/v1/embeddings`; token ids are refused: they would be another tokenizer's."""

    model: str
    input: Text | Annotated[list[Text], Field(min_length=1, max_length=MOST_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Any = None


class Said(Body):
    """A message before the question."""

    role: Literal["user", "assistant"]
    content: str


class AskBody(Body):
    """`/v1/rag/ask`: a question over the library, answered as `ragblend ask` and the page answer it."""

    question: Text
    collection: str | None = None
    collections: list[str] | None = None
    history: Annotated[list[Said], Field(max_length=MOST_MESSAGES)] = []
    mode: Literal["documents", "chat"] = "documents"
    method: str | None = None
    ratio: float | Literal["auto"] | None = None
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


def _turn(number: int, message: MessageBody) -> Turn:
    where = f"messages[{number}]"
    if message.role not in ROLES:
        raise UsageError(f"{where}.role is {message.role!r:.40}; there are {', '.join(ROLES)}")
    calls = tuple(_call(f"{where}.tool_calls", each) for each in message.tool_calls or ())
    pieces = tuple(_texts(where, message.content))
    return Turn(ROLES[message.role], pieces, calls, message.tool_call_id, message.name)


def _texts(where: str, content: Any) -> Sequence[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    if not isinstance(content, list):
        raise UsageError(f"{where}.content must be a text or a list of parts")
    return [text for part in content if (text := _text(where, part))]


def _text(where: str, part: Any) -> str:
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        if part.get("type") == "refusal":
            return ""
    raise UsageError(f"{where}.content has a part that is no text; this model reads text only")


def _call(where: str, call: Mapping[str, Any]) -> ToolCall:
    function = call.get("function")
    try:
        assert isinstance(function, Mapping)
        arguments = json.loads(function["arguments"] or "{}")
        assert isinstance(arguments, dict) and isinstance(function["name"], str)
    except (AssertionError, KeyError, TypeError, ValueError, RecursionError):
        raise UsageError(
            f"{where} holds what is no call: a name, and arguments as JSON of an object"
        ) from None
    return ToolCall(function["name"], arguments, str(call.get("id") or ""))
