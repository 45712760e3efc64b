"""Anthropic's `/v1/messages`: translates requests to those of `/v1/chat/completions`, and answers to its own form."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import MAX_MESSAGES, Body, ChatBody, Count, Items, OwnOptions
from ragblend.app.serve.chat import CompletedChoice, EndpointFormat, respond_to_chat, usage_and_kv
from ragblend.app.serve.errors import ApiError, Dialect
from ragblend.kvstore.errors import UsageError

router = APIRouter(prefix="/v1")
Json = dict[str, Any]
# The type of a stream, for the API's description.
STREAM_RESPONSES: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}
# Anthropic's `tool_choice.type`: OpenAI's `tool_choice`.
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: ApiError) -> Json:
    error_type = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": error_type, "message": error.message}, "request_id": None}


DIALECT = Dialect(error_json)


class AnthropicMessage(Body):
    """A message. content: a text, or a list of blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class NoThinking(Body):
    """`thinking`, which can only be off: no model here has Anthropic's thinking blocks."""

    type: Literal["disabled"]


class OutputConfig(Body):
    """`output_config`: the JSON schema of the answer."""

    format: dict[str, Any] | None = None


class MessagesBody(OwnOptions):
    """`/v1/messages`."""

    model: str
    max_tokens: Count
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Items[dict[str, Any]] | None = None
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: NoThinking | None = None
    output_config: OutputConfig | None = None
    # Accepted and ignored: repeated text is reused with or without `cache_control`; the others concern hosted services.
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None

    def to_chat_body(self) -> ChatBody:
        """Convert to a chat body. Raises UsageError for blocks, tools and formats that are not supported."""
        unchanged = ("model", "stream", "temperature", "top_p", "top_k", *OwnOptions.model_fields)
        choice = self.tool_choice or {}
        values = {name: getattr(self, name) for name in unchanged} | {
            "messages": list(self._messages()),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": [_chat_tool(f"tools[{n}]", tool) for n, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _chat_choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _chat_format(self.output_config),
        }
        return ChatBody.translated(values)

    def _messages(self) -> Iterator[Json]:
        if self.messages[-1].role == "assistant":
            raise UsageError(
                "messages: the last one is the assistant's, and it cannot be continued; leave it out"
            )
        if self.system:
            yield {"role": "system", "content": _text_parts("system", self.system)}
        for number, message in enumerate(self.messages):
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            else:
                yield from _chat_messages(f"messages[{number}].content", message.role, message.content)


@router.post("/messages", responses=STREAM_RESPONSES)
async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer as `/v1/chat/completions` does, in blocks. Your own tools work; Anthropic's are refused."""
    return await respond_to_chat(request, body.to_chat_body(), partial(MessagesFormat, body))


class MessagesFormat(EndpointFormat):
    """`/v1/messages`: a block of text, if there is any, then a block for each tool call."""

    def __init__(self, body: MessagesBody, model: str) -> None:
        self._stop_sequences, self._has_text = body.stop_sequences or (), False
        self._empty_message: Json = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }

    def whole(self, completed: Sequence[CompletedChoice]) -> Json:
        [answer] = completed
        texts = [{"type": "text", "text": answer.parsed.text}] if answer.parsed.text else []
        return {
            **self._empty_message,
            "content": [*texts, *_tool_use_blocks(answer)],
            **self._stop_reason(answer),
            **_usage(answer),
        }

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterator[Json]:
        if is_first:  # sent with the first piece, so that an earlier error gets its own HTTP status
            yield {"type": "message_start", "message": self._empty_message}
        if isinstance(piece, str):
            if not self._has_text:
                self._has_text = True
                yield _block_event("start", 0, content_block={"type": "text", "text": ""})
            yield _block_event("delta", 0, delta={"type": "text_delta", "text": piece})
            return
        if self._has_text:
            yield _block_event("stop", 0)
        for number, call in enumerate(_tool_use_blocks(piece), start=int(self._has_text)):
            yield _block_event("start", number, content_block={**call, "input": {}})
            arguments = json.dumps(call["input"], ensure_ascii=False)
            yield _block_event("delta", number, delta={"type": "input_json_delta", "partial_json": arguments})
            yield _block_event("stop", number)
        yield {"type": "message_delta", "delta": self._stop_reason(piece), **_usage(piece)}
        yield {"type": "message_stop"}

    def _stop_reason(self, answer: CompletedChoice) -> Json:
        """Why the answer ended. The tokens of the result include a stop sequence; its text ends before it."""
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        result, reason, stop = answer.result, reasons[answer.finish_reason], None
        if reason == "end_turn" and self._stop_sequences:
            decode = answer.choice.call.backend.engine.tokenizer.decode
            removed = decode(result.token_ids, skip_special_tokens=True)[len(result.text) :]
            stop = next((each for each in self._stop_sequences if removed.startswith(each)), None)
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _block_event(kind: str, index: int, **more: Any) -> Json:
    return {"type": f"content_block_{kind}", "index": index, **more}


def _tool_use_blocks(answer: CompletedChoice) -> list[Json]:
    """The complete calls. One that was cut off is left out, because this API's `input` must be a whole object."""
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in answer.parsed.calls
    ]


def _usage(answer: CompletedChoice) -> Json:
    """Token usage; in this API input_tokens are only those that were not reused."""
    found = usage_and_kv([answer])
    usage, reused = found["usage"], found["usage"]["prompt_tokens_details"]["cached_tokens"]
    counts = {
        "input_tokens": usage["prompt_tokens"] - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": usage["completion_tokens"],
    }
    return {"usage": counts, "kv": found["kv"]}


def _chat_messages(where: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """One message as chat messages: first one for each tool result, then one with the text and the tool calls."""
    texts, calls, results = list[Json](), list[Json](), list[Json]()
    for number, block in enumerate(blocks):
        kind, here = block.get("type"), f"{where}[{number}]"
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise UsageError(f"{here}.input must be an object")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            error = _text_parts(here, "Error: ") if block.get("is_error") else []
            output = error + _text_parts(f"{here}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": output})
        elif kind not in ("thinking", "redacted_thinking"):
            texts += _text_parts(here, [block])
    yield from results
    if texts or calls or not results:
        yield {"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}


def _text_parts(where: str, content: Any) -> list[Json]:
    """A text, or blocks of text, as parts of a chat message. Raises UsageError for other blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise UsageError(
                f"{where}: a block of the type {kind!r:.40} is not supported; this model reads text only"
            )
    return [{"type": "text", "text": block.get("text")} for block in content]


def _chat_tool(where: str, tool: Mapping[str, Any]) -> Json:
    if tool.get("type") not in (None, "custom") and "function" not in tool:
        raise UsageError(f"{where}.type: {tool['type']!r:.40} is not supported; pass tools of your own")
    if "input_schema" not in tool:
        raise UsageError(
            f'{where} has no input_schema: this API\'s tools are {{"name", "description", "input_schema"}}'
            + (", and this one is written as for OpenAI's" if "function" in tool else "")
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if "description" in tool:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _chat_choice(choice: Mapping[str, Any]) -> str | Json:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in TOOL_CHOICES:
        raise UsageError(
            f"tool_choice.type is {kind!r:.40}; supported are {', '.join(TOOL_CHOICES)} and tool"
        )
    return TOOL_CHOICES[kind]


def _chat_format(config: OutputConfig | None) -> Json | None:
    wanted = None if config is None else config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise UsageError('output_config.format can only be {"type": "json_schema", "schema": ...}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
