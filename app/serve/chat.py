"""`/v1/chat/completions` and `/v1/completions`: run requests as a `Call`, like the adapters, and format the answers."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import ChatBody, CompletionBody, CompletionOptions
from ragblend.app.serve.errors import json_response
from ragblend.app.serve.keys import Client
from ragblend.app.serve.service import (
    Service,
    client_of,
    collect,
    service_of,
    stream_response,
    until_disconnected,
)
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.prompts.tools import ParsedAnswer
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.backend import kv_statistics, logprobs
from ragblend.integrations.calls import AnswerTimeout, Call, PreparedCall
from ragblend.integrations.threads import in_thread

if TYPE_CHECKING:
    from ragblend.engine.results import Result

router = APIRouter(prefix="/v1")
DEFAULT_MAX_TOKENS = 1024  # of an answer, if neither the request nor the settings have a limit
MIN_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class RequestedChoice:
    """One requested answer to one prompt; prompt_number is the same for all choices of a prompt."""

    index: int
    prompt_number: int
    call: Call
    prompt: Prompt

    def make_prompt(self) -> Prompt:
        return self.prompt


@dataclass(frozen=True)
class CompletedChoice:
    """A choice with its result."""

    choice: RequestedChoice
    result: "Result"
    logprobs: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, choice: RequestedChoice, result: "Result") -> "CompletedChoice":
        """Add the log probabilities. They may need thousands of tokens to be decoded, so not for an event loop."""
        tokens = logprobs(result, choice.call.backend.engine.tokenizer)
        return cls(choice, result, None if tokens is None else [_finite(token) for token in tokens])

    @property
    def finish_reason(self) -> str:
        if self.parsed.calls and self.parsed.broken is None:
            return "tool_calls"
        return "stop" if self.result.stopped else "length"

    @cached_property
    def parsed(self) -> ParsedAnswer:
        return self.choice.call.parse(self.result)

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls. As in OpenAI's API, one that was cut off is included with the part of its arguments that was
        generated, if its name is complete; `finish_reason` is then `length`.
        """
        calls = [
            (call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.parsed.calls
        ]
        if self.parsed.broken is not None and self.parsed.broken_name is not None:
            calls.append((f"call_{uuid.uuid4().hex[:24]}", self.parsed.broken_name, self.parsed.broken))
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]


Piece = tuple[RequestedChoice, str | CompletedChoice]


@router.post("/chat/completions")
async def chat(request: Request, body: ChatBody) -> Response:
    """Answer a conversation. Passages of the client's collection are found in it by their text."""
    return await respond_to_chat(request, body, partial(ChatFormat, body))


@router.post("/completions")
async def complete(request: Request, body: CompletionBody) -> Response:
    """Continue a text without a chat template. Control tokens in the text act as control tokens."""
    prompts = body.prompts
    return await respond(
        request, body, lambda call: [call.text_prompt(text) for text in prompts], partial(TextFormat, body)
    )


async def respond_to_chat(
    request: Request, body: ChatBody, make_format: Callable[[str], "EndpointFormat"]
) -> Response:
    """Answer a conversation in the form of any API. Raises UsageError as `ChatBody.turns` does."""
    turns = body.turns()
    return await respond(request, body, lambda call: [call.chat_prompt(turns)], make_format)


async def respond(
    request: Request,
    body: CompletionOptions,
    make_prompts: Callable[[Call], list[Prompt]],
    make_format: Callable[[str], "EndpointFormat"],
) -> Response:
    """Answer the prompts that make_prompts returns, streamed or not. make_format is called with the model's name."""
    service = service_of(request)
    service.check_model(body.model)
    answer_format = make_format(service.model)
    client, raw_body = client_of(request), await request.body()

    def make_choices(cancel: Cancel) -> list[RequestedChoice]:
        with service.tokenizing(raw_body, cancel):
            return _requested_choices(service, client, body, make_prompts)

    pieces = _answers(service, client, body, make_choices)
    if body.stream:
        return await stream_response(request, answer_format.stream(pieces))
    items = await until_disconnected(request.receive, collect(pieces))
    completed = [item for _, item in items if isinstance(item, CompletedChoice)]
    return json_response(answer_format.whole(completed))


async def _answers(
    service: Service,
    client: Client,
    body: CompletionOptions,
    make_choices: Callable[[Cancel], list[RequestedChoice]],
) -> AsyncGenerator[Piece, None]:
    """Yield the pieces of each choice, then the completed choice. Choices are answered one after another."""
    arrived, is_first = time.monotonic(), True
    deadline = arrived + service.allowed_s(body.timeout)
    with service.admission.enter(client):
        for choice in await service.run(make_choices, body.timeout):
            remaining_s = max(deadline - time.monotonic(), 0.001)
            session = service.sessions.session_for(client.digest, choice.prompt.token_ids)
            call = replace(choice.call, timeout=remaining_s, session=session, client=client.name)
            prepared = PreparedCall(call, choice.make_prompt)
            try:
                async with aclosing(await prepared.astream()) as items:
                    async for item in items:
                        if is_first:
                            service.metrics.observe("ttft_seconds", time.monotonic() - arrived)
                        is_first = False
                        if isinstance(item, str):
                            yield choice, item
                        else:
                            service.record_answer(item.report)
                            yield choice, await in_thread(partial(CompletedChoice.of, choice, item))
            except AnswerTimeout as error:
                raise service.timeout_error(body.timeout) from error


def _requested_choices(
    service: Service, client: Client, body: CompletionOptions, make_prompts: Callable[[Call], list[Prompt]]
) -> list[RequestedChoice]:
    settings, options = service.app.settings, body.call_options()
    defaults: dict[str, Any] = {"method": settings.method, "ratio": settings.ratio}
    if options.get("method") is not None:
        del defaults["ratio"]  # the settings' ratio belongs to the settings' method
    if not options.keys() & {"max_tokens", "max_completion_tokens"}:
        defaults["max_tokens"] = settings.max_new_tokens or DEFAULT_MAX_TOKENS
    call = Call.of(service.backend(client), (), body.learn_from_prompts, defaults, options)
    calls, seed = [call] * (body.n or 1), call.arguments.get("seed")
    if seed is not None:  # each choice needs its own, or all would be equal
        calls = [replace(call, arguments=call.arguments | {"seed": seed + n}) for n, _ in enumerate(calls)]
    index = count()
    return [
        RequestedChoice(next(index), number, each, prompt)
        for number, prompt in enumerate(make_prompts(call))
        for each in calls
    ]


class EndpointFormat(ABC):
    """How an API writes answers: `whole`, or streamed as events."""

    @abstractmethod
    def whole(self, completed: Sequence[CompletedChoice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterable[dict[str, Any]]:
        """The events of one piece of a streamed choice; the last piece is the completed choice."""

    def last_events(self, completed: Sequence[CompletedChoice]) -> Iterable[dict[str, Any]]:
        """The events that follow the last choice."""
        return ()

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of all choices."""
        completed, begun = list[CompletedChoice](), set[int]()
        async with aclosing(pieces):
            async for choice, piece in pieces:
                for event in self.events(choice.index, piece, choice.index not in begun):
                    yield event
                begun.add(choice.index)
                if isinstance(piece, CompletedChoice):
                    completed.append(piece)
        for event in self.last_events(completed):
            yield event


class CompletionFormat(EndpointFormat):
    """The common part of `/v1/chat/completions` and `/v1/completions`."""

    object_name, chunk_name, id_prefix = "", "", ""  # the field `object` of an answer and of an event

    def __init__(self, body: CompletionOptions, model: str) -> None:
        answer_id = f"{self.id_prefix}-{uuid.uuid4().hex[:24]}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._chunk, self._includes_usage = {**self._head, "object": self.chunk_name}, body.includes_usage
        self._completed = list[CompletedChoice]()

    def whole(self, completed: Sequence[CompletedChoice]) -> dict[str, Any]:
        head = {**self._head, "object": self.object_name}
        return {**head, "choices": [self.choice(each) for each in completed], **usage_and_kv(completed)}

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterable[dict[str, Any]]:
        usage = {"usage": None} if self._includes_usage else {}
        *earlier, last = self.deltas(index, piece, is_first)
        for value in earlier:
            yield {**self._chunk, "choices": [value], **usage}
        if isinstance(piece, CompletedChoice) and not self._includes_usage:
            # OpenAI sends the usage in an event without choices. Clients that did not ask for it may not expect such an
            # event, so they get the usage so far with each choice's last event.
            self._completed.append(piece)
            usage = usage_and_kv(self._completed)
        yield {**self._chunk, "choices": [last], **usage}

    def last_events(self, completed: Sequence[CompletedChoice]) -> Iterable[dict[str, Any]]:
        if self._includes_usage:
            yield {**self._chunk, "choices": [], **usage_and_kv(completed)}

    @abstractmethod
    def choice(self, completed: CompletedChoice) -> dict[str, Any]:
        """One choice of an answer that is not streamed."""

    @abstractmethod
    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        """The `choices` entries of one piece, each of which is sent in an event of its own."""


class ChatFormat(CompletionFormat):
    """`/v1/chat/completions`."""

    object_name, chunk_name, id_prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, completed: CompletedChoice) -> dict[str, Any]:
        calls, text = completed.calls, completed.parsed.text
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {
            "index": completed.choice.index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _chat_logprobs(completed),
            "finish_reason": completed.finish_reason,
        }

    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        values = [_delta(index, {"role": "assistant", "content": "", "refusal": None})] if is_first else []
        if isinstance(piece, str):
            return [*values, _delta(index, {"content": piece})]
        if piece.calls:
            values.append(
                _delta(index, {"tool_calls": [{"index": n, **c} for n, c in enumerate(piece.calls)]})
            )
        return [*values, _delta(index, {}, piece.finish_reason) | {"logprobs": _chat_logprobs(piece)}]


class TextFormat(CompletionFormat):
    """`/v1/completions`."""

    object_name, chunk_name, id_prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, completed: CompletedChoice) -> dict[str, Any]:
        return {
            "index": completed.choice.index,
            "text": completed.result.text,
            "logprobs": _text_logprobs(completed),
            "finish_reason": completed.finish_reason,
        }

    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        if isinstance(piece, str):
            return [{"index": index, "text": piece, "logprobs": None, "finish_reason": None}]
        return [self.choice(piece) | {"text": ""}]


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage_and_kv(completed: Sequence[CompletedChoice]) -> dict[str, Any]:
    """Token usage, in which the prompt of several choices counts once, and KV statistics of each choice."""
    # For each prompt, the report of its first choice.
    reports = {each.choice.prompt_number: each.result.report for each in reversed(completed)}
    prompt = sum(report.tokens.prompt for report in reports.values())
    generated = sum(each.result.report.tokens.generated for each in completed)
    total = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(report.tokens.reused for report in reports.values())},
    }
    return {"usage": total, "kv": [kv_statistics(each.result) for each in completed]}


def _chat_logprobs(completed: CompletedChoice) -> dict[str, Any] | None:
    return None if completed.logprobs is None else {"content": completed.logprobs, "refusal": None}


def _text_logprobs(completed: CompletedChoice) -> dict[str, Any] | None:
    """Log probabilities in the form of `/v1/completions`: one list per field."""
    tokens = completed.logprobs
    if tokens is None:
        return None
    ends = accumulate(len(token["token"]) for token in tokens)
    return {
        "tokens": [token["token"] for token in tokens],
        "token_logprobs": [token["logprob"] for token in tokens],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in tokens
        ],
        "text_offset": [0, *ends][: len(tokens)],
    }


def _finite(token: dict[str, Any]) -> dict[str, Any]:
    top = [each | {"logprob": max(each["logprob"], MIN_LOGPROB)} for each in token["top_logprobs"]]
    return token | {"logprob": max(token["logprob"], MIN_LOGPROB), "top_logprobs": top}
