"""`/v1/chat/completions` and `/v1/completions`: run requests as a `Call`, like the adapters, and format the answers."""

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import ChatBody, CompletionBody, Options
from ragblend.app.serve.errors import json_response
from ragblend.app.serve.keys import Client
from ragblend.app.serve.service import Service, client_of, service_of, stoppable, streamed, until_gone, whole
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.prompts.tools import ParsedAnswer
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.backend import kv_statistics, logprobs
from ragblend.integrations.calls import AnswerTimeout, Call, PreparedCall
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import Cancelled

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
        """Tool calls; an incomplete one is included, as OpenAI does, and `finish_reason` is `length` then."""
        made = [
            (call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.said.calls
        ]
        if self.said.broken is not None:
            made.append((f"call_{uuid.uuid4().hex[:24]}", self.said.broken_name or "", self.said.broken))
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in made
        ]


Piece = tuple[RequestedChoice, str | CompletedChoice]


@router.post("/chat/completions")
async def chat(request: Request, body: ChatBody) -> Response:
    """Answer a conversation; known passages of the client's collection are found in it by their text."""
    turns = body.turns()
    return await respond(
        request, body, lambda call: [call.chat_prompt(turns)], ChatFormat(service_of(request).model)
    )


@router.post("/completions")
async def complete(request: Request, body: CompletionBody) -> Response:
    """Continue a text without a chat template; control tokens in it are read as such."""
    answer_format = TextFormat(service_of(request).model)
    return await respond(
        request, body, lambda call: [call.text_prompt(text) for text in body.prompts], answer_format
    )


async def respond(
    request: Request,
    body: Options,
    prompts_of: Callable[[Call], list[Prompt]],
    answer_format: "EndpointFormat",
) -> Response:
    """Answer the prompts that prompts_of makes, whole or streamed."""
    service = service_of(request)
    service.check_model(body.model)
    client, raw_body = client_of(request), await request.body()

    def work(stopped: Cancel) -> list[RequestedChoice]:
        with service.tokenizing(raw_body, stopped):
            return _choices(service, client, body, prompts_of)

    pieces = _answers(service, client, body, work)
    if body.stream:
        return await streamed(request, answer_format.chunks(pieces, body.includes_usage))
    found = await until_gone(request.receive, whole(pieces))
    return json_response(
        answer_format.whole([each for _, each in found if isinstance(each, CompletedChoice)])
    )


async def _answers(
    service: Service, client: Client, body: Options, choices: Callable[[Cancel], list[RequestedChoice]]
) -> AsyncGenerator[Piece, None]:
    """Yield each choice's pieces, then the completed choice; one by one, as the device runs one prompt at a time."""
    arrived, is_first = time.monotonic(), True
    with service.admission.enter(client), _timeout_as_api_error(service, body.timeout):
        seconds = service.allowed_s(body.timeout)
        try:
            found = await stoppable(choices, seconds)
        except Cancelled as error:
            raise service.timeout_error(body.timeout) from error
        for choice in found:
            left = seconds - (time.monotonic() - arrived)
            session = service.sessions.of(client.digest, choice.prompt.token_ids)
            call = replace(choice.call, timeout=max(left, 0.001), session=session, client=client.name)
            prepared = PreparedCall(call, choice.make_prompt)
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


@contextmanager
def _timeout_as_api_error(service: Service, timeout: float | None) -> Iterator[None]:
    try:
        yield
    except AnswerTimeout as error:
        raise service.timeout_error(timeout) from error


def _choices(
    service: Service, client: Client, body: Options, prompts_of: Callable[[Call], list[Prompt]]
) -> list[RequestedChoice]:
    settings, options = service.desk.settings, body.options()
    defaults: dict[str, Any] = {"method": settings.method, "ratio": settings.ratio}
    if options.get("method") is not None:
        del defaults["ratio"]  # it belongs to the settings' method
    if not options.keys() & {"max_tokens", "max_completion_tokens"}:
        defaults["max_tokens"] = settings.max_new_tokens or DEFAULT_TOKENS
    call = Call.of(service.backend(client), (), body.learn_from_prompts, defaults, options)
    calls = [_with_seed_of(call, number) for number in range(body.n or 1)]
    pairs = [(number, each, prompt) for number, prompt in enumerate(prompts_of(call)) for each in calls]
    return [
        RequestedChoice(index, number, each, prompt) for index, (number, each, prompt) in enumerate(pairs)
    ]


def _with_seed_of(call: Call, number: int) -> Call:
    """The call of choice `number`: if there is a seed, each choice has its own."""
    seed = call.arguments.get("seed")
    return call if seed is None else replace(call, arguments=call.arguments | {"seed": seed + number})


class EndpointFormat(Protocol):
    """How one of OpenAI's APIs writes answers, whole and streamed."""

    def whole(self, chosen: Sequence[CompletedChoice]) -> dict[str, Any]:
        """The body of a whole answer."""
        ...

    def chunks(
        self, pieces: AsyncGenerator[Piece, None], includes_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer."""
        ...


class CompletionFormat(ABC):
    """What `/v1/chat/completions` and `/v1/completions` have in common."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str) -> None:
        answer_id = f"{self.prefix}-{uuid.uuid4().hex[:24]}"
        self._head = {"id": answer_id, "created": int(time.time()), "model": model}

    def whole(self, chosen: Sequence[CompletedChoice]) -> dict[str, Any]:
        head = {**self._head, "object": self.kind}
        return {**head, "choices": [self.choice(each) for each in chosen], **usage_and_kv(chosen)}

    async def chunks(
        self, pieces: AsyncGenerator[Piece, None], includes_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        chosen, head = list[CompletedChoice](), {**self._head, "object": self.chunk_kind}
        usage_yet = {"usage": None} if includes_usage else {}
        begun: set[int] = set()
        async with aclosing(pieces):
            async for choice, piece in pieces:
                if isinstance(piece, CompletedChoice):
                    chosen.append(piece)
                for value in self.deltas(choice.index, piece, is_first=choice.index not in begun):
                    yield {**head, "choices": [value], **usage_yet}
                begun.add(choice.index)
        if includes_usage:
            yield {**head, "choices": [], **usage_and_kv(chosen)}

    @abstractmethod
    def choice(self, chosen: CompletedChoice) -> dict[str, Any]:
        """One choice of a whole answer."""

    @abstractmethod
    def deltas(self, index: int, piece: str | CompletedChoice, is_first: bool) -> list[dict[str, Any]]:
        """The events of one piece of a streamed choice; the completed choice is the last piece."""


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
