"""Request bodies of the server. Unknown fields are refused, because an ignored option would seem to work."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from ragblend.engine.prompts.segments import ToolCall
from ragblend.integrations.backend import ChatTurn, drop_empty_turns
from ragblend.integrations.parameters import PER_CALL
from ragblend.integrations.tools import schema_in
from ragblend.kvstore.errors import UsageError

# Role of a message: role in the chat template.
ROLES = {"developer": "system", "function": "tool"} | {
    each: each for each in ("system", "user", "assistant", "tool")
}
# Fields of a body that are passed to `Call.of`.
CALL_OPTIONS = (
    *PER_CALL, "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "tools", "tool_choice",
    "parallel_tool_calls",
)  # fmt: skip
# Fields that some server's answers have, and that clients send back with the message. No model here reads them.
IGNORED_IN_MESSAGES = frozenset((
    "additional_kwargs", "annotations", "cache_control", "citations", "created_at", "finish_reason", "id", "index",
    "logprobs", "metadata", "model", "model_extra", "parsed", "provider_specific_fields", "reasoning",
    "reasoning_content", "reasoning_details", "reasoning_items", "reasoning_text", "refusal", "response_metadata",
    "status", "thinking", "thinking_blocks", "token_ids", "usage", "usage_metadata",
))  # fmt: skip
IGNORED_PARTS = ("refusal", "thinking", "redacted_thinking", "reasoning")
MAX_MESSAGES = 10_000
MAX_CHOICES = 8
MAX_TEXTS = 2048
MAX_FIELDS = 200
_ANY_JSON = TypeAdapter(Any)
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
# -1 is "no limit" for other servers, so it means the same as no value.
TokenLimit = Annotated[Count | None, BeforeValidator(lambda value: None if value == -1 else value)]
OnlyOne = Annotated[float, Field(ge=1, le=1)]
NonEmptyText = Annotated[str, Field(min_length=1)]
Item = TypeVar("Item")
# Validation stops at the first wrong item: to report a million took seconds, in which no other request was answered.
Items = Annotated[list[Item], Field(fail_fast=True)]


class Body(BaseModel):
    """A JSON body. Validation errors do not quote it."""

    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, values: Any) -> Any:
        """Refuse lone surrogates, which JSON allows but no tokenizer, and NaN, which only Python's JSON allows."""
        if not isinstance(values, dict):  # not a JSON object: pydantic refuses it later
            return values
        if len(values) > MAX_FIELDS:  # each unknown field would be reported as an error
            raise ValueError(f"it has more than {MAX_FIELDS} fields")
        try:
            json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError:
            raise ValueError("a string contains a lone surrogate, which is not valid text") from None
        except ValueError:
            raise ValueError("NaN and infinity are not valid JSON") from None
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return values

    @classmethod
    def translated(cls, values: Mapping[str, Any], note: str = "OpenAI's name of the field") -> Self:
        """Validate values that were translated from another API's body. Raises UsageError.

        note: explains the field's name in the error's message.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problem, where = main_problem(error.errors())
            raise UsageError(f"{where}: {problem['msg']} ({note})") from None


def main_problem(problems: Sequence[Any], skipped: int = 0) -> tuple[Any, str]:
    """The one of pydantic's problems to tell a client, and its field. skipped: parts of a location before the field.

    For a value that may have several types, pydantic reports a problem for each. The best one comes from the type that
    fits best: it is not about the type itself, if any such is there, and lies deepest in the value.
    """
    field = problems[0]["loc"][: skipped + 1]
    of_field = [each for each in problems if each["loc"][: skipped + 1] == field]
    best = max(of_field, key=lambda each: (not each["type"].endswith("_type"), len(each["loc"])))
    return best, ".".join(str(part) for part in best["loc"][skipped:] if not _is_type_name(part))


def _is_type_name(part: str | int) -> bool:
    """Whether a part of a problem's location is pydantic's name for one of a value's types."""
    return isinstance(part, str) and (
        not part.isidentifier() or part in ("str", "float", "int", "bool", "none")
    )


class OwnOptions(Body):
    """RAGBlend's own options, in every API."""

    method: str | None = None
    ratio: float | Literal["auto"] | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    learn_from_prompts: bool = True


class StreamOptions(Body):
    """OpenAI's stream options; obfuscation, padding against eavesdroppers, has no effect here."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class CompletionOptions(OwnOptions):
    """Options of chats, completions and responses, with OpenAI's names."""

    model: str
    max_tokens: TokenLimit = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int | None, BeforeValidator(lambda value: 0 if value == -1 else value)] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    seed: Int64 | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    # Accepted and ignored: they tell a hosted service who the user is, what it may store and how long to reason, or
    # would only make it faster.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning: Any = None
    reasoning_effort: Any = None
    prediction: Any = None
    stream_usage: Any = None
    # Accepted with the values that change nothing.
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    ignore_eos: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    use_beam_search: Literal[False] | None = None
    min_tokens: Literal[0] | None = None
    length_penalty: OnlyOne | None = None
    typical_p: OnlyOne | None = None
    moderation: None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def call_options(self) -> dict[str, Any]:
        """The arguments for `Call.of`, without those that are not set."""
        return {name: value for name in CALL_OPTIONS if (value := getattr(self, name, None)) is not None}


class MessageBody(Body):
    """One message; content: a text, or parts of the type `text`."""

    role: str
    content: Any = None
    name: str | None = None
    tool_calls: Items[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    # Refused unless empty: no model here reads sound or images, and `tool_calls` replaces `function_call`.
    audio: None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in IGNORED_IN_MESSAGES}


class ChatBody(CompletionOptions):
    """`/v1/chat/completions`."""

    messages: Annotated[Items[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    # Accepted with the values that change nothing.
    modalities: Items[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None
    audio: None = None
    functions: None = None
    function_call: None = None
    web_search_options: None = None

    def call_options(self) -> dict[str, Any]:
        schema = schema_in(self.response_format)
        return super().call_options() | ({} if schema is None else {"json_schema": schema})

    def turns(self) -> list[ChatTurn]:
        """The messages as turns, without empty ones. Raises UsageError for unsupported roles, parts and calls."""
        _check_results(self.messages)
        return drop_empty_turns([_turn(number, message) for number, message in enumerate(self.messages)])


class CompletionBody(CompletionOptions):
    """`/v1/completions`: text to continue, without a chat template."""

    prompt: NonEmptyText | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_CHOICES)]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str]:
        return [self.prompt] if isinstance(self.prompt, str) else self.prompt


class ResponsesBody(CompletionOptions):
    """`/v1/responses`: a chat with other field names. Nothing is stored, so earlier responses cannot be referred to."""

    input: NonEmptyText | Annotated[Items[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenLimit = None
    text: dict[str, Any] | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # Accepted without effect: only reasoning models return it.
    include: Items[Literal["reasoning.encrypted_content"]] | None = None
    n: None = None
    max_tokens: None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    top_logprobs: Literal[0] | None = None
    context_management: None = None

    def to_chat_body(self) -> ChatBody:
        """Convert to a chat body. Raises UsageError for items, tools and formats that are not supported."""
        values = self.model_dump(include=set(CompletionOptions.model_fields), exclude_none=True) | {
            "messages": self._messages(),
            "tools": None if self.tools is None else [_chat_tool(each) for each in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _chat_format(self.text),
        }
        return ChatBody.translated(values, "input is read as messages")

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for number, item in enumerate(self.input):
            message = _chat_message(f"input[{number}]", item)
            if message is None:
                continue
            last: dict[str, Any] = messages[-1] if messages else {"role": ""}
            if "tool_calls" in message and last["role"] == "assistant":  # part of the same turn
                last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]
            else:
                messages.append(message)
        return messages


class EmbeddingBody(Body):
    """`/v1/embeddings`; token ids are refused, because they would be another tokenizer's."""

    model: str
    input: NonEmptyText | Annotated[list[NonEmptyText], Field(min_length=1, max_length=MAX_TEXTS)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: Any = None


class HistoryMessage(Body):
    """A message before the question."""

    role: Literal["user", "assistant"]
    content: str


class AskBody(Body):
    """`/v1/rag/ask`: a question about the library, answered as by `ragblend ask` and the page."""

    question: NonEmptyText
    collection: str | None = None
    collections: Annotated[list[str], Field(max_length=100)] | None = None
    history: Annotated[Items[HistoryMessage], Field(max_length=MAX_MESSAGES)] = []
    mode: Literal["documents", "chat"] = "documents"
    method: str | None = None
    ratio: float | Literal["auto"] | None = None
    top_k: Annotated[int, Field(ge=1, le=1000)] | None = None
    max_tokens: Count | None = None
    temperature: float | None = None
    stream: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


def _chat_message(where: str, item: Mapping[str, Any]) -> dict[str, Any] | None:
    """An item of `/v1/responses` as a chat message; None for reasoning, which is dropped."""
    kind = item.get("type", "message")
    if kind == "message":
        return {"role": item.get("role"), "content": _chat_parts(item.get("content"))}
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        output = _chat_parts(item.get("output"))
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    if kind == "reasoning":
        return None
    raise UsageError(
        f"{where}.type is {kind!r:.40}; supported are message, function_call and function_call_output"
    )


def _chat_parts(content: Any) -> Any:
    """Rename the type of text parts to that of chat messages. Everything else is unchanged."""
    if not isinstance(content, list):
        return content
    return [{**part, "type": "text"} if _is_text_part(part) else part for part in content]


def _is_text_part(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise UsageError(f"tools: {tool.get('type')!r:.40} is not supported; pass functions of your own")
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _chat_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    return {"type": "function", "function": {"name": choice.get("name")}}


def _chat_format(text: Mapping[str, Any] | None) -> dict[str, Any] | None:
    text = text or {}
    if unknown := set(text) - {"format", "verbosity"}:
        raise UsageError(f"text has no field {min(unknown)!r:.40}; supported is format")
    if text.get("verbosity") not in (None, "medium"):
        raise UsageError(
            "text.verbosity can only be medium: say in the instructions how long answers should be"
        )
    if text.get("format") is None:
        return None
    wanted = text["format"]
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {n: v for n, v in wanted.items() if n != "type"}}
    return wanted if isinstance(wanted, dict) else {"type": wanted}


def _check_results(messages: Sequence[MessageBody]) -> None:
    """Raise UsageError for a call's id that is not a string, a tool's result without a call, and a second result of a
    call. OpenAI's API refuses such results too.

    Results of the older role `function` are not checked, because they have no ids.
    """
    results: dict[Any, int | None] = {}  # call id -> number of the message with the result, None before it
    for number, message in enumerate(messages):
        call_id = message.tool_call_id
        if message.role == "assistant":
            ids = [call.get("id") for call in message.tool_calls or ()]
            if not all(isinstance(each, str | None) for each in ids):
                raise UsageError(f"messages[{number}].tool_calls has an id that is no text")
            results |= dict.fromkeys(ids)
        elif message.role == "tool" and (call_id is None or call_id not in results):
            raise UsageError(
                f"messages[{number}] has the role tool and must answer an earlier call of tool_calls; its tool_call_id "
                f"is {call_id!r:.100}"
            )
        elif message.role == "tool" and results[call_id] is not None:
            raise UsageError(
                f"messages[{results[call_id]}] and messages[{number}] both answer the call {call_id!r:.100}; send one "
                "result of each call"
            )
        elif message.role == "tool":
            results[call_id] = number


def _turn(number: int, message: MessageBody) -> ChatTurn:
    where = f"messages[{number}]"
    if message.role not in ROLES:
        raise UsageError(f"{where}.role is {message.role!r:.40}; supported are {', '.join(ROLES)}")
    calls = tuple(_call(f"{where}.tool_calls", each) for each in message.tool_calls or ())
    pieces = tuple(_texts(where, message.content))
    return ChatTurn(ROLES[message.role], pieces, calls, message.tool_call_id, message.name)


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
        if part.get("type") in IGNORED_PARTS:
            return ""
    raise UsageError(f"{where}.content has a part that is not text; this model reads text only")


def _call(where: str, call: Mapping[str, Any]) -> ToolCall:
    function: Any = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UsageError(f"{where} is not a function call: it needs a function with a name")
    text = function.get("arguments")
    if not isinstance(text, str | None):
        raise UsageError(f"{where} has arguments that are no text: in OpenAI's API they are JSON in a string")
    return ToolCall(name, _arguments(text or "{}"), str(call.get("id") or ""))


def _arguments(text: str) -> dict[str, Any]:
    """Parse a call's arguments, which a model wrote. If they were cut off, the part before the cut counts; if they are
    not a JSON object, the whole text becomes one argument.
    """
    try:
        found = _ANY_JSON.validate_json(text, experimental_allow_partial="trailing-strings")
        json.dumps(found, allow_nan=False)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": text}
