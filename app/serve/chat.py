"""`/v1/chat/completions` and `/v1/completions`: what a client sends -> a `Call`, as adapters make it, and back."""

import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import ChatBody, CompletionBody, Options
from ragblend.app.serve.errors import json_response
from ragblend.app.serve.keys import Client
from ragblend.app.serve.service import Service, client_of, service_of, stoppable, streamed, until_gone, whole
from ragblend.engine.prompts.segments import Prompt
from ragblend.engine.prompts.tools import Said
from ragblend.engine.scheduling.queue import Cancel
from ragblend.integrations.backend import kv_statistics, logprobs
from ragblend.integrations.calls import AnswerTimeout, Call
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import Cancelled

if TYPE_CHECKING:
    from ragblend.engine.results import Result

router = APIRouter(prefix="/v1")
DEFAULT_TOKENS = 1024  # of an answer, where nobody says: chat programs hardly ever do
LEAST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True)
class Choice:
    """One answer to one prompt; prompt_number: choices of one prompt have the same."""

    index: int
    prompt_number: int
    call: Call
    prompt: Prompt


@dataclass(frozen=True)
class Chosen:
    """A choice that has been answered."""

    choice: Choice
    result: "Result"
    logprobs: list[dict[str, Any]] | None = None

    @classmethod
    def of(cls, choice: Choice, result: "Result") -> "Chosen":
        """With the texts of up to some thousand likely tokens: not for an event loop."""
        told = logprobs(result, choice.call.backend.engine.tokenizer)
        return cls(choice, result, None if told is None else [_finite(token) for token in told])

    @property
    def finish_reason(self) -> str:
        said = self.said
        if said.calls and said.broken is None:
            return "tool_calls"
        return "stop" if self.result.stopped else "length"

    @cached_property
    def said(self) -> Said:
        return self.choice.call.parse(self.result)

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """What was cut off is a call as well, as OpenAI has it: `finish_reason` is `length` then."""
        made = [
            (call.id, call.name, json.dumps(call.arguments, ensure_ascii=False)) for call in self.said.calls
        ]
        if self.said.broken is not None:
            made.append((f"call_{uuid.uuid4().hex[:24]}", self.said.broken_name or "", self.said.broken))
        return [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in made
        ]


Piece = tuple[Choice, str] | Chosen


@router.post("/chat/completions")
async def chat(request: Request, body: ChatBody) -> Response:
    """A conversation, answered by the model; passages of its collection are found in it by their text."""
    turns = body.turns()
    return await respond(
        request, body, lambda call: [call.chat_prompt(turns)], ChatForm(service_of(request).model)
    )


@router.post("/completions")
async def complete(request: Request, body: CompletionBody) -> Response:
    """Text that is continued as it stands, control tokens and all."""
    form = TextForm(service_of(request).model)
    return await respond(request, body, lambda call: [call.text_prompt(text) for text in body.prompts], form)


async def respond(
    request: Request, body: Options, prompts_of: Callable[[Call], list[Prompt]], form: "Form"
) -> Response:
    service = service_of(request)
    service.check_model(body.model)
    client, sent = client_of(request), await request.body()

    def work(stopped: Cancel) -> list[Choice]:
        with service.reading(sent, stopped):
            return _choices(service, client, body, prompts_of)

    pieces = _answers(service, client, body, work)
    if body.stream:
        return await streamed(request, form.chunks(pieces, body.includes_usage))
    found = await until_gone(request.receive, whole(pieces))
    return json_response(form.whole([each for each in found if isinstance(each, Chosen)]))


async def _answers(
    service: Service, client: Client, body: Options, choices: Callable[[Cancel], list[Choice]]
) -> AsyncGenerator[Piece, None]:
    """Of each choice the pieces, then the whole; one choice after another, as the device reads one prompt at a time."""
    arrived, is_first = time.monotonic(), True
    with service.admission.enter(client), _in_time(service, body.timeout):
        seconds = service.allowed_s(body.timeout)
        try:
            found = await stoppable(choices, seconds)
        except Cancelled as error:
            raise service.too_late(body.timeout) from error
        for choice in found:
            left = seconds - (time.monotonic() - arrived)
            session = service.sessions.of(client.digest, choice.prompt.token_ids)
            call = replace(choice.call, timeout=max(left, 0.001), session=session, client=client.name)
            async with aclosing(call.astream(choice.prompt)) as items:
                async for item in items:
                    if is_first:
                        service.metrics.observe("ttft_seconds", time.monotonic() - arrived)
                    is_first = False
                    if isinstance(item, str):
                        yield choice, item
                    else:
                        service.count(item.report)
                        yield await in_thread(partial(Chosen.of, choice, item))


@contextmanager
def _in_time(service: Service, told: float | None) -> Iterator[None]:
    try:
        yield
    except AnswerTimeout as error:
        raise service.too_late(told) from error


def _choices(
    service: Service, client: Client, body: Options, prompts_of: Callable[[Call], list[Prompt]]
) -> list[Choice]:
    settings, told = service.desk.settings, body.options()
    first: dict[str, Any] = {"method": settings.method, "ratio": settings.ratio}
    if told.get("method") is not None:
        del first["ratio"]  # it belongs to the method that it was chosen for
    if not told.keys() & {"max_tokens", "max_completion_tokens"}:
        first["max_tokens"] = settings.max_new_tokens or DEFAULT_TOKENS
    call = Call.of(service.backend(client), (), body.learn_from_prompts, first, told)
    calls = [_seeded(call, number) for number in range(body.n or 1)]
    pairs = [(number, each, prompt) for number, prompt in enumerate(prompts_of(call)) for each in calls]
    return [Choice(index, number, each, prompt) for index, (number, each, prompt) in enumerate(pairs)]


def _seeded(call: Call, number: int) -> Call:
    """The same; with a seed, another one for each choice."""
    seed = call.arguments.get("seed")
    return call if seed is None else replace(call, arguments=call.arguments | {"seed": seed + number})


class Form:
    """How answers are written in one of OpenAI's two interfaces."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(self, model: str) -> None:
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex[:24]}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, chosen: Sequence[Chosen]) -> dict[str, Any]:
        head = {**self._head, "object": self.kind}
        return {**head, "choices": [self.choice(each) for each in chosen], **usage_and_kv(chosen)}

    async def chunks(
        self, pieces: AsyncGenerator[Piece, None], includes_usage: bool
    ) -> AsyncGenerator[dict[str, Any], None]:
        chosen, head = list[Chosen](), {**self._head, "object": self.chunk_kind}
        usage_yet = {"usage": None} if includes_usage else {}
        begun: set[int] = set()
        async with aclosing(pieces):
            async for piece in pieces:
                choice = piece.choice if isinstance(piece, Chosen) else piece[0]
                if choice.index not in begun:
                    begun.add(choice.index)
                    for value in self.begin(choice.index):
                        yield {**head, "choices": [value], **usage_yet}
                if isinstance(piece, Chosen):
                    chosen.append(piece)
                values = (
                    self.end(piece) if isinstance(piece, Chosen) else [self.piece(choice.index, piece[1])]
                )
                for value in values:
                    yield {**head, "choices": [value], **usage_yet}
        if includes_usage:
            yield {**head, "choices": [], **usage_and_kv(chosen)}

    def choice(self, chosen: Chosen) -> dict[str, Any]:
        raise NotImplementedError

    def begin(self, index: int) -> list[dict[str, Any]]:
        return []

    def piece(self, index: int, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def end(self, chosen: Chosen) -> list[dict[str, Any]]:
        raise NotImplementedError


class ChatForm(Form):
    """`/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, chosen: Chosen) -> dict[str, Any]:
        calls, text = chosen.calls, chosen.said.text
        message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        return {
            "index": chosen.choice.index,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "logprobs": _content(chosen),
            "finish_reason": chosen.finish_reason,
        }

    def begin(self, index: int) -> list[dict[str, Any]]:
        return [_delta(index, {"role": "assistant", "content": "", "refusal": None})]

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return _delta(index, {"content": text})

    def end(self, chosen: Chosen) -> list[dict[str, Any]]:
        index, calls = chosen.choice.index, chosen.calls
        made = (
            [_delta(index, {"tool_calls": [{"index": n, **c} for n, c in enumerate(calls)]})] if calls else []
        )
        last = _delta(index, {}, chosen.finish_reason) | {"logprobs": _content(chosen)}
        return [*made, last]


class TextForm(Form):
    """`/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def choice(self, chosen: Chosen) -> dict[str, Any]:
        return {
            "index": chosen.choice.index,
            "text": chosen.result.text,
            "logprobs": _columns(chosen),
            "finish_reason": chosen.finish_reason,
        }

    def piece(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def end(self, chosen: Chosen) -> list[dict[str, Any]]:
        return [self.choice(chosen) | {"text": ""}]


def _delta(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def usage_and_kv(chosen: Sequence[Chosen]) -> dict[str, Any]:
    """Usage, where a prompt that several choices answer counts once; and what was reused for each choice."""
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


def _content(chosen: Chosen) -> dict[str, Any] | None:
    told = chosen.logprobs
    return None if told is None else {"content": told, "refusal": None}


def _columns(chosen: Chosen) -> dict[str, Any] | None:
    """The form that completions had before chat did."""
    told = chosen.logprobs
    if told is None:
        return None
    offsets, at = [], 0
    for token in told:
        offsets.append(at)
        at += len(token["token"])
    return {
        "tokens": [token["token"] for token in told],
        "token_logprobs": [token["logprob"] for token in told],
        "top_logprobs": [
            {each["token"]: each["logprob"] for each in token["top_logprobs"]} for token in told
        ],
        "text_offset": offsets,
    }


def _finite(token: dict[str, Any]) -> dict[str, Any]:
    likely = [each | {"logprob": max(each["logprob"], LEAST_LOGPROB)} for each in token["top_logprobs"]]
    return token | {"logprob": max(token["logprob"], LEAST_LOGPROB), "top_logprobs": likely}
