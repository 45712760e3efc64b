"""Anthropic's `/v1/messages`: translated to the body of `/v1/chat/completions`, and the answer to blocks and events."""

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import MOST_MESSAGES, Body, ChatBody, Count, Items, OwnOptions
from ragblend.app.serve.chat import CompletedChoice, EndpointFormat, respond_to_chat, usage_and_kv
from ragblend.app.serve.errors import ApiError, Dialect
from ragblend.kvstore.errors import UsageError

router = APIRouter(prefix="/v1")
Json = dict[str, Any]
EVENTS: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}}}  # what a stream is
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_json(error: ApiError) -> Json:
    kind = KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": None}


DIALECT = Dialect(error_json)


class AnthropicMessage(Body):
    """A message; content: a text, or blocks."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class NoThinking(Body):
    """`thinking`, which can only be off: no model here has Anthropic's thinking blocks."""

    type: Literal["disabled"]


class OutputConfig(Body):
    """`output_config`: JSON by a schema."""

    format: dict[str, Any] | None = None


class MessagesBody(OwnOptions):
    """`/v1/messages`."""

    model: str
    max_tokens: Count
    messages: Annotated[Items[AnthropicMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
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
    # Accepted and ignored: whatever repeats is reused, marked or not; the others are a hosted service's.
    cache_control: Any = None
    metadata: Any = None
    service_tier: Any = None

    def chat(self) -> ChatBody:
        """Convert to a chat body. Raises UsageError for blocks, tools and formats that are not supported."""
        same = ("model", "stream", "temperature", "top_p", "top_k", *OwnOptions.model_fields)
        choice = self.tool_choice or {}
        values = {name: getattr(self, name) for name in same} | {
            "messages": list(self._messages()),
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "tools": [_tool(f"tools[{n}]", tool) for n, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _choice(choice) if choice else None,
            "parallel_tool_calls": False if choice.get("disable_parallel_tool_use") else None,
            "response_format": _format(self.output_config),
        }
        return ChatBody.translated(values, "by OpenAI's name")

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
                yield from _turns(f"messages[{number}].content", message.role, message.content)


@router.post("/messages", responses=EVENTS)
async def messages(request: Request, body: MessagesBody) -> Response:
    """Answer as `/v1/chat/completions` does, in blocks. Your tools may be called; Anthropic's own are refused."""
    return await respond_to_chat(request, body.chat(), partial(MessagesFormat, body))


class MessagesFormat(EndpointFormat):
    """`/v1/messages`: a block of text, if there is any, then a block for each call."""

    def __init__(self, body: MessagesBody, model: str) -> None:
        self._stops, self._has_text = body.stop_sequences or (), False
        kind = {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}
        usage = {"input_tokens": 0, "output_tokens": 0}
        self._begun: Json = {
            **kind,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def whole(self, chosen: Sequence[CompletedChoice]) -> Json:
        [answer] = chosen
        texts = [{"type": "text", "text": answer.said.text}] if answer.said.text else []
        return {
            **self._begun,
            "content": [*texts, *_calls(answer)],
            **self._stopped(answer),
            **_usage(answer),
        }

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterator[Json]:
        if is_first:  # it waits for the first piece, in case of an error
            yield {"type": "message_start", "message": self._begun}
        if isinstance(piece, str):
            if not self._has_text:
                self._has_text = True
                yield _event("start", 0, content_block={"type": "text", "text": ""})
            yield _event("delta", 0, delta={"type": "text_delta", "text": piece})
            return
        if self._has_text:
            yield _event("stop", 0)
        for number, call in enumerate(_calls(piece), start=int(self._has_text)):
            yield _event("start", number, content_block={**call, "input": {}})
            given = json.dumps(call["input"], ensure_ascii=False)
            yield _event("delta", number, delta={"type": "input_json_delta", "partial_json": given})
            yield _event("stop", number)
        yield {"type": "message_delta", "delta": self._stopped(piece), **_usage(piece)}
        yield {"type": "message_stop"}

    def _stopped(self, answer: CompletedChoice) -> Json:
        """Why the answer ended: a stop sequence is the text that its tokens have after it."""
        result, reasons = (
            answer.result,
            {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"},
        )
        reason, stop = reasons[answer.finish_reason], None
        if reason == "end_turn" and self._stops:
            decode = answer.choice.call.backend.engine.tokenizer.decode
            rest = decode(result.token_ids, skip_special_tokens=True)[len(result.text) :]
            stop = next((each for each in self._stops if rest.startswith(each)), None)
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}


def _event(what: str, index: int, **more: Any) -> Json:
    return {"type": f"content_block_{what}", "index": index, **more}


def _calls(answer: CompletedChoice) -> list[Json]:
    """The whole calls: one that was cut short has no input that this API could write."""
    return [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in answer.said.calls
    ]


def _usage(answer: CompletedChoice) -> Json:
    """Token usage: here input_tokens are those that were not reused."""
    found = usage_and_kv([answer])
    usage, reused = found["usage"], found["usage"]["prompt_tokens_details"]["cached_tokens"]
    counts = {
        "input_tokens": usage["prompt_tokens"] - reused,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": usage["completion_tokens"],
    }
    return {"usage": counts, "kv": found["kv"]}


def _turns(where: str, role: str, blocks: Sequence[Mapping[str, Any]]) -> Iterator[Json]:
    """The chat messages of one message: the results of tools are messages of their own, before its text."""
    texts, calls, results = list[Json](), list[Json](), list[Json]()
    for number, block in enumerate(blocks):
        kind, here = block.get("type"), f"{where}[{number}]"
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise UsageError(f"{here}.input must be an object")
            given = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": given}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            failed = _text_parts(here, "Error: ") if block.get("is_error") else []
            output = failed + _text_parts(f"{here}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": output})
        elif kind not in ("thinking", "redacted_thinking"):
            texts += _text_parts(here, [block])
    yield from results
    if texts or calls or not results:
        yield {"role": role, "content": texts, **({"tool_calls": calls} if calls else {})}


def _text_parts(where: str, content: Any) -> list[Json]:
    """A text or blocks of text as a chat's parts. Raises UsageError for other blocks."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    for block in content if isinstance(content, list) else [content]:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise UsageError(
                f"{where}: a block of the type {kind!r:.40} is not supported; this model reads text only"
            )
    return [{"type": "text", "text": block.get("text")} for block in content]


def _tool(where: str, tool: Mapping[str, Any]) -> Json:
    if tool.get("type") not in (None, "custom") and "function" not in tool:
        raise UsageError(f"{where}.type: {tool['type']!r:.40} is not supported; pass tools of your own")
    if "input_schema" not in tool:
        raise UsageError(
            f'{where} has no input_schema: this API\'s tools are {{"name", "description", "input_schema"}}'
            + (", and this one is written as for OpenAI's" if "function" in tool else "")
        )
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    more = {"description": tool["description"]} if "description" in tool else {}
    return {"type": "function", "function": function | more}


def _choice(choice: Mapping[str, Any]) -> str | Json:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise UsageError(f"tool_choice.type is {kind!r:.40}; supported are {', '.join(CHOICES)} and tool")
    return CHOICES[kind]


def _format(config: OutputConfig | None) -> Json | None:
    wanted = None if config is None else config.format
    if wanted is None:
        return None
    if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
        raise UsageError('output_config.format can only be {"type": "json_schema", "schema": ...}')
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted["schema"]}}
