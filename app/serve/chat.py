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

from ragblend.app.serve.bodies import ChatBody, CompletionBody, Options
from ragblend.app.serve.errors import json_response
from ragblend.app.serve.keys import Client
from ragblend.app.serve.service import Service, client_of, service_of, streamed, until_gone, whole
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.prompts.tools import ParsedAnswer
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.backend import kv_statistics, logprobs
from ragblend.integrations.calls import AnswerTimeout, Call, PreparedCall
from ragblend.integrations.threads import in_thread

if TYPE_CHECKING:
    from ragblend.engine.results import Result

router = APIRouter(prefix="/v1")
DEFAULT_TOKENS = 1024  # longest answer if the request does not say
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


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
        """Decodes up to some thousand likely tokens, so not for an event loop."""
        tokens = logprobs(result, choice.call.backend.engine.tokenizer)
        return cls(choice, result, None if tokens is None else [_finite(token) for token in tokens])

    @property
    def finish_reason(self) -> str:
        said = self.said
        if said.calls and said.broken is None:
            return "tool_calls"
        return "stop" if self.result.stopped else "length"

    @cached_property
    def said(self) -> ParsedAnswer:
        return self.choice.call.parse(self.result)

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls. One that was cut off is included with its arguments as far as they came, as OpenAI does, if its
        name is whole; `finish_reason` is `length` then.
        """
        made = [
            (call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.said.calls
        ]
        if self.said.broken is not None and self.said.broken_name is not None:
            made.append((f"call_{uuid.uuid4().hex[:24]}", self.said.broken_name, self.said.broken))
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in made
        ]


Piece = tuple[RequestedChoice, str | CompletedChoice]


@router.post("/chat/completions")
async def chat(request: Request, body: ChatBody) -> Response:
    """Answer a conversation; known passages of the client's collection are found in it by their text."""
    return await respond_to_chat(request, body, partial(ChatFormat, body))


@router.post("/completions")
async def complete(request: Request, body: CompletionBody) -> Response:
    """Continue a text without a chat template; control tokens in it act as such."""
    prompts = body.prompts
    return await respond(
        request, body, lambda call: [call.text_prompt(text) for text in prompts], partial(TextFormat, body)
    )


async def respond_to_chat(
    request: Request, body: ChatBody, format_of: Callable[[str], "EndpointFormat"]
) -> Response:
    """Answer a conversation in any API's form. Raises UsageError for what the model cannot read."""
    turns = body.turns()
    return await respond(request, body, lambda call: [call.chat_prompt(turns)], format_of)


async def respond(
    request: Request,
    body: Options,
    prompts_of: Callable[[Call], list[Prompt]],
    format_of: Callable[[str], "EndpointFormat"],
) -> Response:
    """Answer the prompts that prompts_of makes, whole or streamed. format_of: of the model's name."""
    service = service_of(request)
    service.check_model(body.model)
    answer_format = format_of(service.model)
    client, raw_body = client_of(request), await request.body()

    def work(stopped: Cancel) -> list[RequestedChoice]:
        with service.tokenizing(raw_body, stopped):
            return _choices(service, client, body, prompts_of)

    pieces = _answers(service, client, body, work)
    if body.stream:
        return await streamed(request, answer_format.stream(pieces))
    found = await until_gone(request.receive, whole(pieces))
    return json_response(
        answer_format.whole([each for _, each in found if isinstance(each, CompletedChoice)])
    )


async def _answers(
    service: Service, client: Client, body: Options, choices: Callable[[Cancel], list[RequestedChoice]]
) -> AsyncGenerator[Piece, None]:
    """Yield each choice's pieces, then the completed choice; one by one, as the device runs one prompt at a time."""
    arrived, is_first = time.monotonic(), True
    deadline = arrived + service.allowed_s(body.timeout)
    with service.admission.enter(client):
        for choice in await service.run(choices, body.timeout):
            left = max(deadline - time.monotonic(), 0.001)
            session = service.sessions.of(client.digest, choice.prompt.token_ids)
            call = replace(choice.call, timeout=left, session=session, client=client.name)
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
                            service.count(item.report)
                            yield choice, await in_thread(partial(CompletedChoice.of, choice, item))
            except AnswerTimeout as error:
                raise service.timeout_error(body.timeout) from error


def _choices(
    service: Service, client: Client, body: Options, prompts_of: Callable[[Call], list[Prompt]]
) -> list[RequestedChoice]:
    settings, options = service.app.settings, body.options()
    defaults: dict[str, Any] = {"method": settings.method, "ratio": settings.ratio}
    if options.get("method") is not None:
        del defaults["ratio"]  # it belongs to the settings' method
    if not options.keys() & {"max_tokens", "max_completion_tokens"}:
        defaults["max_tokens"] = settings.max_new_tokens or DEFAULT_TOKENS
    call = Call.of(service.backend(client), (), body.learn_from_prompts, defaults, options)
    calls, seed = [call] * (body.n or 1), call.arguments.get("seed")
    if seed is not None:  # each choice has its own
        calls = [replace(call, arguments=call.arguments | {"seed": seed + n}) for n, _ in enumerate(calls)]
    index = count()
    return [
        RequestedChoice(next(index), number, each, prompt)
        for number, prompt in enumerate(prompts_of(call))
        for each in calls
    ]


class EndpointFormat(ABC):
    """How an API writes answers, whole and streamed."""

    @abstractmethod
    def whole(self, chosen: Sequence[CompletedChoice]) -> dict[str, Any]:
        """The body of a whole answer."""

    @abstractmethod
    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterable[dict[str, Any]]:
        """The events of one piece of a streamed choice; the completed choice is its last piece."""

    def last_events(self, chosen: Sequence[CompletedChoice]) -> Iterable[dict[str, Any]]:
        """The events after all choices."""
        return ()

    async def stream(self, pieces: AsyncGenerator[Piece, None]) -> AsyncGenerator[dict[str, Any], None]:
        """All events."""
        chosen, begun = list[CompletedChoice](), set[int]()
        async with aclosing(pieces):
            async for choice, piece in pieces:
                for event in self.events(choice.index, piece, choice.index not in begun):
                    yield event
                begun.add(choice.index)
                if isinstance(piece, CompletedChoice):
                    chosen.append(piece)
        for event in self.last_events(chosen):
            yield event


class CompletionFormat(EndpointFormat):
    """The common part of `/v1/chat/completions` and `/v1/completions`."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, body: Options, model: str) -> None:
        answer_id = f"{self.prefix}-{uuid.uuid4().hex[:24]}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}
        self._chunk, self._includes_usage = {**self._head, "object": self.chunk_kind}, body.includes_usage
        self._ended = list[CompletedChoice]()

    def whole(self, chosen: Sequence[CompletedChoice]) -> dict[str, Any]:
        head = {**self._head, "object": self.kind}
        return {**head, "choices": [self.choice(each) for each in chosen], **usage_and_kv(chosen)}

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterable[dict[str, Any]]:
        usage_yet = {"usage": None} if self._includes_usage else {}
        *earlier, last = self.deltas(index, piece, is_first)
        for value in earlier:
            yield {**self._chunk, "choices": [value], **usage_yet}
        if isinstance(piece, CompletedChoice) and not self._includes_usage:
            # An event without choices, as OpenAI's with the usage, would surprise who did not ask for it.
            self._ended.append(piece)
            usage_yet = usage_and_kv(self._ended)
        yield {**self._chunk, "choices": [last], **usage_yet}

    def last_events(self, chosen: Sequence[CompletedChoice]) -> Iterable[dict[str, Any]]:
        if self._includes_usage:
            yield {**self._chunk, "choices": [], **usage_and_kv(chosen)}

    @abstractmethod
    def choice(self, chosen: CompletedChoice) -> dict[str, Any]:
        """One choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        """The choices in the events of one piece."""


class ChatFormat(CompletionFormat):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, chosen: CompletedChoice) -> dict[str, Any]:
        calls, text = chosen.calls, chosen.said.text
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {
            "index": chosen.choice.index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _chat_logprobs(chosen),
            "finish_reason": chosen.finish_reason,
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

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, chosen: CompletedChoice) -> dict[str, Any]:
        return {
            "index": chosen.choice.index,
            "text": chosen.result.text,
            "logprobs": _text_logprobs(chosen),
            "finish_reason": chosen.finish_reason,
        }

    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        if isinstance(piece, str):
            return [{"index": index, "text": piece, "logprobs": None, "finish_reason": None}]
        return [self.choice(piece) | {"text": ""}]


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage_and_kv(chosen: Sequence[CompletedChoice]) -> dict[str, Any]:
    """Token usage, counting a prompt of several choices once; and KV statistics for each choice."""
    firsts = {each.choice.prompt_number: each.result.report for each in reversed(chosen)}
    prompt = sum(report.tokens.prompt for report in firsts.values())
    completion = sum(each.result.report.tokens.generated for each in chosen)
    total = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(report.tokens.reused for report in firsts.values())},
    }
    return {"usage": total, "kv": [kv_statistics(each.result) for each in chosen]}


def _chat_logprobs(chosen: CompletedChoice) -> dict[str, Any] | None:
    return None if chosen.logprobs is None else {"content": chosen.logprobs, "refusal": None}


def _text_logprobs(chosen: CompletedChoice) -> dict[str, Any] | None:
    """In the older form of `/v1/completions`: one list per field."""
    tokens = chosen.logprobs
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
    likely = [each | {"logprob": max(each["logprob"], LEAST_LOGPROB)} for each in token["top_logprobs"]]
    return token | {"logprob": max(token["logprob"], LEAST_LOGPROB), "top_logprobs": likely}
