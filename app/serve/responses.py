"""`/v1/responses`: chat in the form of OpenAI's newer API. Responses are not stored."""

import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from ragblend.app.serve.bodies import ResponsesBody
from ragblend.app.serve.chat import CompletedChoice, EndpointFormat, respond_to_chat, usage_and_kv

router = APIRouter(prefix="/v1")
Json = dict[str, Any]
# `status` of a response and of its items
STARTED, DONE, CUT = "in_progress", "completed", "incomplete"


@router.post("/responses")
async def responses(request: Request, body: ResponsesBody) -> Response:
    """Answer as `/v1/chat/completions` does, in items. Function calls work; OpenAI's built-in tools do not."""
    return await respond_to_chat(request, body.to_chat_body(), partial(ResponseFormat, body))


class ResponseFormat(EndpointFormat):
    """`/v1/responses`: one message, then its function calls."""

    def __init__(self, body: ResponsesBody, model: str) -> None:
        self._text = ""
        self._message_id, self._sequence_numbers = f"msg_{uuid.uuid4().hex[:24]}", count()
        self._part_position: Json = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._common_fields: Json = {
            "id": f"resp_{uuid.uuid4().hex[:24]}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": body.text or {"format": {"type": "text"}},
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "metadata": body.metadata or {},
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
        }

    def whole(self, completed: Sequence[CompletedChoice]) -> Json:
        [answer] = completed
        is_cut = answer.finish_reason == "length"
        ended = {
            "status": CUT if is_cut else DONE,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items(answer),
        }
        return {**self._common_fields, **ended, **_usage(completed)}

    def events(self, index: int, piece: str | CompletedChoice, is_first: bool) -> Iterator[Json]:
        # The first events are sent with the first piece (an answer without text has one, too), so that an earlier error
        # gets its own HTTP status.
        if is_first:
            started = {
                **self._common_fields,
                "status": STARTED,
                "error": None,
                "incomplete_details": None,
                "output": [],
            }
            yield self._event("response.created", response=started)
            yield self._event("response.in_progress", response=started)
            yield self._item_event("added", 0, self._message(None))
            yield self._event("response.content_part.added", **self._part_position, part=_part(""))
        if isinstance(piece, str):
            self._text += piece
            yield self._text_event("delta", delta=piece, logprobs=[])
            return
        yield self._text_event("done", text=self._text, logprobs=[])
        yield self._event("response.content_part.done", **self._part_position, part=_part(self._text))
        message, *calls = self._items(piece)
        yield self._item_event("done", 0, message)
        for number, item in enumerate(calls, start=1):
            yield from self._call_events(number, item)
        response = self.whole([piece])
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._sequence_numbers), **more}

    def _text_event(self, kind: str, **more: Any) -> Json:
        return self._event(f"response.output_text.{kind}", **self._part_position, **more)

    def _item_event(self, kind: str, number: int, item: Json) -> Json:
        return self._event(f"response.output_item.{kind}", output_index=number, item=item)

    def _call_events(self, number: int, item: Json) -> Iterator[Json]:
        position = {"output_index": number, "item_id": item["id"]}
        started = item | {"status": STARTED, "arguments": ""}
        yield self._item_event("added", number, started)
        yield self._event("response.function_call_arguments.delta", **position, delta=item["arguments"])
        yield self._event(
            "response.function_call_arguments.done",
            **position,
            name=item["name"],
            arguments=item["arguments"],
        )
        yield self._item_event("done", number, item)

    def _message(self, text: str | None) -> Json:
        """The message as an item; text None: without content, because it has only started."""
        head = {"id": self._message_id, "type": "message", "role": "assistant"}
        if text is None:
            return {**head, "status": STARTED, "content": []}
        return {**head, "status": DONE, "content": [_part(text)]}

    def _items(self, answer: CompletedChoice) -> list[Json]:
        head = {"type": "function_call", "status": DONE}
        calls = [
            {"id": f"fc_{call['id']}", **head, "call_id": call["id"], **call["function"]}
            for call in answer.calls
        ]
        items = [self._message(answer.parsed.text), *calls]
        if answer.finish_reason == "length":
            items[-1]["status"] = CUT
        return items


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(completed: Sequence[CompletedChoice]) -> Json:
    found = usage_and_kv(completed)
    usage = found["usage"]
    return {
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
        "kv": found["kv"],
    }
