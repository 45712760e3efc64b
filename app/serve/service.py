"""What the server's routes share: access to models and collections, admission, timeouts, disconnects and streams."""

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ragblend.app.serve.errors import OPENAI, ApiError, Dialect, api_error, encode_json
from ragblend.app.serve.keys import Client
from ragblend.app.serve.metrics import Metrics
from ragblend.app.serve.sessions import SessionCache
from ragblend.app.services import AppServices, ModelStartup
from ragblend.app.settings import BUNDLED
from ragblend.engine.config import Report
from ragblend.engine.model.hub import is_hub_id
from ragblend.engine.prompts.tokenizing import LONG_CHARACTERS
from ragblend.engine.scheduling.queue import POLL_S, Cancel
from ragblend.integrations.backend import Backend
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import Cancelled

T = TypeVar("T")
SEND_TIMEOUT_S = 60.0  # a client that does not read an event for this long is disconnected


@dataclass(frozen=True)
class Limits:
    """Limits of the server. requests, requests_per_client: running and waiting requests, in total and of one client.

    answer_s: for one answer, waiting included; body_s: for receiving a request; hang_s: for one layer, token or batch.
    """

    requests: int = 64
    requests_per_client: int = 16
    answer_s: float = 600.0
    body_s: float = 60.0
    hang_s: float = 600.0


class Admission:
    """Limits how many requests run and wait. The others are refused, with a time to retry. Not thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inside: Counter[str] = Counter()
        self._typical_s = 1.0  # duration of a request, a moving average

    @property
    def inside(self) -> int:
        """Number of waiting and running requests."""
        return self._inside.total()

    @contextmanager
    def enter(self, client: Client) -> Iterator[None]:
        """Admit one request for the block. Raises ApiError (429)."""
        is_own_limit = self._inside[client.name] >= self._limits.requests_per_client
        if is_own_limit or self.inside >= self._limits.requests:
            whose = "of this key " if is_own_limit else ""
            wait_s = min(60, max(1, ceil(self._typical_s * self.inside / 2)))
            raise ApiError(
                429,
                f"Too many requests {whose}are waiting. Try again in {wait_s} s.",
                "queue_full",
                retry_s=wait_s,
            )
        self._inside[client.name] += 1
        started_s = time.monotonic()
        try:
            yield
        finally:
            self._typical_s += (time.monotonic() - started_s - self._typical_s) / 8
            self._inside[client.name] -= 1
            if not self._inside[client.name]:
                del self._inside[client.name]


class Service:
    """The state of one server, shared by its routes."""

    def __init__(self, services: AppServices, limits: Limits | None = None) -> None:
        self.app, self.limits = services, limits or Limits()
        self.startup, self.metrics, self.sessions = ModelStartup(), Metrics(), SessionCache()
        self.admission, self._long_text_lock = Admission(self.limits), threading.Lock()
        self.home = str(services.workspaces.home.root)
        self.started_at = int(time.time())  # Unix time; the clock may be set while the server runs
        self.started_monotonic_s = time.monotonic()

    @property
    def model(self) -> str:
        """The model's name for clients, never its path."""
        named = self.app.settings.model
        return BUNDLED if named == "default" else _without_folders(named)

    @property
    def embedder(self) -> str:
        """The name of the default collection's embedder for clients, never its path."""
        return _without_folders(self.app.workspaces.first.embedder.name)

    @property
    def reranker(self) -> str:
        """The reranker's name for clients, never its path; "" without one."""
        return _without_folders(self.app.settings.reranker or "")

    @property
    def models(self) -> tuple[str, ...]:
        """The names of the model that answers, the embedder, and the reranker, if there is one."""
        return tuple(filter(None, (self.model, self.embedder, self.reranker)))

    def hide_paths(self, text: str) -> str:
        """Replace the paths of the home and of models by names."""
        settings, text = self.app.settings, text.replace(self.home, "HOME")
        embedders = [each.model for each in self.app.workspaces.embedders]  # of other collections, too
        for named in filter(None, (settings.model, settings.reranker, settings.embedder, *embedders)):
            path = os.path.expanduser(named)
            text = text.replace(path, _without_folders(named)) if os.path.isabs(path) else text
        return text

    def check_model(self, name: str) -> str:
        """Check that a client's name for the model that answers is right (see `is_named`), and return the model's own
        name. Raises ApiError (404).
        """
        if not is_named(name, self.model, self.app.settings.model):
            raise ApiError(
                404, f"There is no model {name!r:.100}; there is {self.model!r}.", "model_not_found", "model"
            )
        return self.model

    def listed_model(self, name: str) -> str:
        """As `check_model`, but the name may also be the embedder's or the reranker's."""
        if name in self.models:
            return name
        known = (each for each in self.models if each.lower() == name.lower())
        return next(known, None) or self.check_model(name)

    def check_collection(self, client: Client, name: str | None = None) -> str:
        """Return the name of the collection, by default of the client's first one, if it exists and the client may use
        it. Raises ApiError (404).

        A key's collection that was removed is not created again: passages learned from the request would be visible to
        a later key of that name.
        """
        existing = self.app.workspaces.names()
        allowed = existing if client.is_owner else [each for each in client.collections if each in existing]
        if name is None:
            name = next(iter(client.collections), self.app.settings.collection)
        if name not in allowed:
            raise ApiError(
                404, f"There is no collection {name!r:.100}.", "collection_not_found", "collection"
            )
        return name

    def allowed_s(self, timeout: float | None) -> float:
        """Seconds allowed for an answer: the client's timeout, at most the server's limit."""
        return min(timeout or self.limits.answer_s, self.limits.answer_s)

    def timeout_error(self, timeout: float | None) -> ApiError:
        """The error of a late answer: 408 after the client's own timeout, 504 after the server's limit."""
        seconds = self.allowed_s(timeout)
        message = (
            f"The answer was not complete within {seconds:g} seconds; allow more time, or fewer max_tokens."
        )
        status = 408 if timeout is not None and timeout <= self.limits.answer_s else 504
        return ApiError(status, message, "timeout", is_final=True)

    async def run(self, work: Callable[[Cancel], T], timeout: float | None) -> T:
        """Run work in a thread, and cancel it with the caller, or after the allowed time, which raises ApiError."""
        cancel = threading.Event()
        task = asyncio.ensure_future(in_thread(partial(work, cancel)))
        try:
            await asyncio.wait((task,), timeout=self.allowed_s(timeout))
        finally:
            cancel.set()
            with suppress(Exception):
                await task
        try:
            return task.result()
        except Cancelled as error:
            raise self.timeout_error(timeout) from error

    @contextmanager
    def tokenizing(self, body: bytes, cancel: Cancel) -> Iterator[None]:
        """Tokenize in the block. Long requests take turns, to limit memory. Raises Cancelled while it waits."""
        if len(body) <= LONG_CHARACTERS:
            yield
            return
        while not self._long_text_lock.acquire(timeout=POLL_S):
            if cancel.is_set():
                raise Cancelled("the request was cancelled while it waited to be tokenized")
        try:
            yield
        finally:
            self._long_text_lock.release()

    def record_answer(self, report: Report) -> None:
        """Record that the model works, and count the answer's tokens."""
        self.startup.problem = ""
        for kind in ("reused", "recomputed", "fresh", "missing", "not_loaded", "generated"):
            self.metrics.count("tokens_total", getattr(report.tokens, kind), kind=kind)

    def backend(self, client: Client) -> Backend:
        """The engine and the client's passages. Slow, because it may import torch: not for an event loop."""
        settings, collection = self.app.settings, self.check_collection(client)
        # Open the engine here, with the settings' budgets; the backend shares it.
        _ = self.app.workspaces.of(collection).engine
        return Backend(settings.model, self.home, collection, settings.device, settings.dtype, settings.vllm)


def is_named(name: str, *known: str | None) -> bool:
    """Whether a client's name for a model is one of these. Case is ignored, and an empty name always fits."""
    return name.lower() in ("", *(each.lower() for each in known if each))


def _without_folders(model: str) -> str:
    """A hub id unchanged, or the last part of a path, without `.gguf`."""
    path = Path(model)
    if is_hub_id(model):
        return model
    return path.stem if path.suffix.lower() == ".gguf" else path.name


def service_of(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


def client_of(request: Request) -> Client:
    found: Client = request.scope["client_of_key"]
    return found


class ClientDisconnected(HTTPException):
    """The client has disconnected, so nobody will read the response."""


async def until_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await work; if the client disconnects, cancel it and raise ClientDisconnected."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected(499, "The client disconnected.")
        return task.result()
    finally:
        disconnect.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """A stream of JSON values: server-sent events, or lines if the dialect has them. An error is the last value.

    A value's `type`, if it has one, is also the event's name. Events without a type are followed by [DONE]. The first
    value is an argument, so that an error before it can still be answered with its own HTTP status.
    """

    def __init__(
        self,
        first: object,
        rest: AsyncGenerator[object, None],
        hide_paths: Callable[[str], str],
        dialect: Dialect = OPENAI,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        media_type = "application/x-ndjson" if dialect.has_json_lines else "text/event-stream"
        super().__init__(
            _encode_stream(first, rest, hide_paths, dialect), headers=headers, media_type=media_type
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        chunks: Any = self.body_iterator
        async with aclosing(chunks):
            with suppress(ClientDisconnected, TimeoutError):  # TimeoutError: the client does not read
                await until_disconnected(receive, self.stream_response(send_in_time))


async def _encode_stream(
    first: object, rest: AsyncGenerator[object, None], hide_paths: Callable[[str], str], dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    encode = _json_line if dialect.has_json_lines else _event
    async with aclosing(rest):
        try:
            yield encode(first)
            async for value in rest:
                yield encode(value)
        except Exception as error:
            yield encode(dialect.error(api_error(error, hide_paths)))
        else:
            if not (dialect.has_json_lines or _event_name(first)):
                yield b"data: [DONE]\n\n"


def _json_line(value: object) -> bytes:
    return encode_json(value) + b"\n"


def _event(value: object) -> bytes:
    name = _event_name(value)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + encode_json(value) + b"\n\n"


def _event_name(value: object) -> str:
    return str(value.get("type", "")) if isinstance(value, dict) else ""


async def stream_response(request: Request, values: AsyncGenerator[object, None]) -> Response:
    """A response that streams the values, as the route's dialect does."""
    try:
        first = await until_disconnected(request.receive, anext(values))
    except BaseException:
        await values.aclose()
        raise
    return Events(first, values, service_of(request).hide_paths, request.scope["dialect"])


async def collect(values: AsyncIterator[T]) -> list[T]:
    return [value async for value in values]
