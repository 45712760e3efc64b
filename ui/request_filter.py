"""Allows only the requests to Gradio that the page makes: a list of routes, and the type of every value in a call.

Gradio copies any file that a value names into its public folder, whatever component the value is for. Here a call is
parsed, checked against its components, and written replay from the checked values: only a `gr.File` may name files, and
only those that the same visitor uploaded.
"""

import logging
import os
import re
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import gradio as gr
import orjson
from pydantic import ValidationError
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragblend.app.serve.request_checks import read_body
from ragblend.ui.callback_checks import LONGEST_TEXT, MAX_VALUES, value_type
from ragblend.ui.security import SAFE_METHODS, UPLOAD_PATH

# Route -> whether its functions run in Gradio's queue.
CALL_ROUTES = {"/gradio_api/queue/join": True, "/gradio_api/run/predict": False}
READ_ROUTES = re.compile(
    r"/|/theme\.css|/(assets|static|ragblend)/.+|"
    r"/gradio_api/(app_id|queue/data|upload_progress|heartbeat/[0-9a-z]{1,32})"
)
SESSION_HASH = re.compile(r"[0-9a-z]{1,32}")
LOG = logging.getLogger(__name__)


class RefusedCall(Exception):
    """A call that the page would not make. Its message says what is wrong, and repeats nothing that was sent."""


class RequestFilter:
    """ASGI middleware between `SecurityMiddleware`, which identifies the visitor, and Gradio."""

    def __init__(self, app: ASGIApp, page: gr.Blocks) -> None:
        self.app, self._page = app, page
        self._uploads: dict[str, set[str]] = {}  # visitor -> uploaded files that still exist

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if method == "POST" and path in CALL_ROUTES:
            await self._call(scope, receive, send)
        elif method == "POST" and path == UPLOAD_PATH:
            await self._upload(scope, receive, send)
        elif method in SAFE_METHODS and READ_ROUTES.fullmatch(path):
            # Without the query, by which Gradio would restore stored states.
            await self.app({**scope, "query_string": b""} if path == "/" else scope, receive, send)
        else:
            await PlainTextResponse("There is nothing at that path.", 404)(scope, receive, send)

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = self._checked_call(await read_body(receive), CALL_ROUTES[scope["path"]], scope["visitor"])
        except RefusedCall as refusal:
            LOG.warning("A call was refused: %s", refusal)
            await JSONResponse({"error": str(refusal)}, 422)(scope, receive, send)
            return
        headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"content-type")]
        headers += [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await self.app({**scope, "headers": headers}, _replayed(body, receive), send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Note which files the upload created. If it fails, the request was at fault: 400 instead of 500."""
        answer = bytearray()

        async def note(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 500:
                message["status"] = 400
            answer.extend(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, note)
        paths = None
        with suppress(RefusedCall):  # an error as plain text, or nothing because the client is gone
            paths = _parsed(bytes(answer))
        if isinstance(paths, list):
            kept = {path for path in self._uploads.get(scope["visitor"], ()) if os.path.lexists(path)}
            self._uploads[scope["visitor"]] = kept | {path for path in paths if isinstance(path, str)}

    def _checked_call(self, body: bytes, is_queued: bool, visitor: str) -> bytes:
        """The call's JSON, written again from its checked values. Raises RefusedCall."""
        call = _parsed(body)
        _require(isinstance(call, dict), "a call must be a JSON object")
        index, session, trigger = (call.get(name) for name in ("fn_index", "session_hash", "trigger_id"))
        _require(type(index) is int and index in self._page.fns, "there is no such function")
        _require(
            isinstance(session, str) and bool(SESSION_HASH.fullmatch(session)), "session_hash is invalid"
        )
        _require(trigger is None or type(trigger) is int, "trigger_id is not a number")
        function, values = self._page.fns[index], call.get("data")
        _require(
            function.fn is not None and bool(function.queue) is is_queued,
            "that function is called by another route",
        )
        count = len(function.inputs)
        _require(isinstance(values, list) and len(values) == count, f"the function takes {count} values")
        checked = {
            "data": [self._value(*each, visitor) for each in zip(function.inputs, values, strict=True)],
            "event_data": _event(call.get("event_data"), [name for _, name in function.targets]),
            "fn_index": index,
            "trigger_id": trigger,
            "session_hash": session,
        }
        return orjson.dumps(checked)

    def _value(self, component: Any, value: Any, visitor: str) -> Any:
        if value is None:
            return None
        adapter = value_type(component)
        if adapter is None:
            raise RefusedCall("states stay on the server and are never sent")
        if isinstance(component, gr.File):
            files = value if isinstance(value, list) else [value]
            _require(len(files) <= MAX_VALUES, "too many files at once")
            own = [self._file(each, visitor) for each in files]
            return own if isinstance(value, list) else own[0]
        try:
            return adapter.validate_python(value)
        except ValidationError:
            raise RefusedCall(f"that is not a value for a {type(component).__name__}") from None

    def _file(self, value: Any, visitor: str) -> dict[str, Any]:
        """A file value for Gradio. Only its path comes from the request, and must be an upload of this visitor."""
        path = value.get("path") if isinstance(value, dict) else None
        is_own = isinstance(path, str) and path in self._uploads.get(visitor, ()) and _is_plain_file(path)
        _require(is_own, "that file was not uploaded here")
        return {"path": path, "orig_name": os.path.basename(str(path)), "meta": {"_type": "gradio.FileData"}}


def _require(holds: bool, reason: str) -> None:
    if not holds:
        raise RefusedCall(reason)


def _event(value: Any, events: list[str]) -> dict[str, Any] | None:
    """The data of a click: names and plain values. A change's data, the new value, is dropped: no callback reads it."""
    if value is None or ("change" in events and isinstance(value, str | int | float)):
        return None
    _require(isinstance(value, dict) and len(value) <= MAX_VALUES, "event_data is not an object")
    plain = all(
        len(each) <= LONGEST_TEXT if isinstance(each, str) else each is None or isinstance(each, int | float)
        for each in value.values()
    )
    _require(plain and "path" not in value, "event_data has more than plain values")
    return dict(value)


def _is_plain_file(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and not os.path.islink(os.path.dirname(path))
    except (OSError, ValueError):
        return False


def _parsed(body: bytes) -> Any:
    """Parse JSON strictly: no NaN, no broken characters, limited nesting. Raises RefusedCall."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        raise RefusedCall("that is not JSON") from None


def _replayed(body: bytes, receive: Receive) -> Callable[[], Any]:
    """A `receive` that returns this body first, then the connection's own messages, such as its end."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
