"""Shared by the server's routes: access to collections, admission, timeouts, and disconnected clients."""

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

from ragblend.app.serve.errors import OPENAI, ApiError, Dialect, api_error, encoded
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
    """Limits of the server. requests, requests_of_one: running and waiting ones, of all clients and of each.

    answer_s: for one answer, waiting included; body_s: for receiving a request; hang_s: for one layer or token.
    """

    requests: int = 64
    requests_of_one: int = 16
    answer_s: float = 600.0
    body_s: float = 60.0
    hang_s: float = 600.0


class Admission:
    """Limits how many requests run and wait; refused ones are told when to retry. For one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._inside: Counter[str] = Counter()
        self._typical_s = 1.0  # duration of a request, a moving average

    @property
    def inside(self) -> int:
        return self._inside.total()

    @contextmanager
    def enter(self, client: Client) -> Iterator[None]:
        """Admit one request for the block. Raises ApiError (429)."""
        mine = self._inside[client.name] >= self._limits.requests_of_one
        if mine or self.inside >= self._limits.requests:
            whose = "of this key " if mine else ""
            wait_s = min(60, max(1, ceil(self._typical_s * self.inside / 2)))
            raise ApiError(
                429,
                f"Too many requests {whose}are waiting. Try again in {wait_s} s.",
                "queue_full",
                retry_s=wait_s,
            )
        self._inside[client.name] += 1
        begun = time.monotonic()
        try:
            yield
        finally:
            self._typical_s += (time.monotonic() - begun - self._typical_s) / 8
            self._inside[client.name] -= 1
            if not self._inside[client.name]:
                del self._inside[client.name]


class Service:
    """The state of one server, shared by its routes."""

    def __init__(self, services: AppServices, limits: Limits | None = None) -> None:
        self.app, self.limits = services, limits or Limits()
        self.startup, self.metrics, self.sessions = ModelStartup(), Metrics(), SessionCache()
        self.admission, self._long_text = Admission(self.limits), threading.Lock()
        self.home = str(services.workspaces.home.root)
        self.begun, self.begun_s = int(time.time()), time.monotonic()  # the wall clock may be set

    @property
    def model(self) -> str:
        """The model's name for clients, never its path."""
        named = self.app.settings.model
        return BUNDLED if named == "default" else _without_folders(named)

    @property
    def embedder(self) -> str:
        """The default collection's embedder's name for clients, never its path."""
        return _without_folders(self.app.workspaces.first.embedder.name)

    @property
    def reranker(self) -> str:
        """The reranker's name for clients, never its path; "" without one."""
        return _without_folders(self.app.settings.reranker or "")

    @property
    def models(self) -> tuple[str, ...]:
        """The models' names: of the one that answers, the embedder and the reranker."""
        return tuple(filter(None, (self.model, self.embedder, self.reranker)))

    def shown(self, text: str) -> str:
        """The text without paths of this machine."""
        settings, text = self.app.settings, text.replace(self.home, "HOME")
        embedders = [each.model for each in self.app.workspaces.embedders]  # of other collections, too
        for named in filter(None, (settings.model, settings.reranker, settings.embedder, *embedders)):
            path = os.path.expanduser(named)
            text = text.replace(path, _without_folders(named)) if os.path.isabs(path) else text
        return text

    def check_model(self, name: str) -> str:
        """The model's name for clients. Raises ApiError (404) for another model; case does not count, nor an empty
        name.
        """
        if not is_named(name, self.model, self.app.settings.model):
            raise ApiError(
                404, f"There is no model {name!r:.100}; there is {self.model!r}.", "model_not_found", "model"
            )
        return self.model

    def listed_model(self, name: str) -> str:
        """The same for a model of any kind."""
        known = (each for each in self.models if each.lower() == name.lower())
        return next(known, None) or self.check_model(name)

    def collection(self, client: Client, name: str | None = None) -> str:
        """The named collection, if the client may use it, or the client's first one. Raises ApiError (404).

        Also if it was removed: passages learned from the request would be visible to a later key of that name.
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
        """Seconds for an answer: the client's timeout, at most the server's limit."""
        return min(timeout or self.limits.answer_s, self.limits.answer_s)

    def timeout_error(self, timeout: float | None) -> ApiError:
        """408 for the client's own timeout, 504 for the server's limit."""
        seconds = self.allowed_s(timeout)
        message = (
            f"The answer was not complete within {seconds:g} seconds; allow more time, or fewer max_tokens."
        )
        status = 408 if timeout is not None and timeout <= self.limits.answer_s else 504
        return ApiError(status, message, "timeout", is_final=True)

    async def run(self, work: Callable[[Cancel], T], timeout: float | None) -> T:
        """Run work in a thread, and cancel it after the allowed time, or if this is cancelled. Raises ApiError."""
        stopped = threading.Event()
        task = asyncio.ensure_future(in_thread(partial(work, stopped)))
        try:
            await asyncio.wait((task,), timeout=self.allowed_s(timeout))
        finally:
            stopped.set()
            with suppress(Exception):
                await task
        try:
            return task.result()
        except Cancelled as error:
            raise self.timeout_error(timeout) from error

    @contextmanager
    def tokenizing(self, body: bytes, stopped: Cancel) -> Iterator[None]:
        """Tokenize long requests one at a time, to limit memory. Raises Cancelled if stopped while it waits."""
        if len(body) <= LONG_CHARACTERS:
            yield
            return
        while not self._long_text.acquire(timeout=POLL_S):
            if stopped.is_set():
                raise Cancelled("the request was cancelled while it waited to be tokenized")
        try:
            yield
        finally:
            self._long_text.release()

    def count(self, report: Report) -> None:
        """Count an answer's tokens."""
        self.startup.problem = ""  # the model works
        for kind in ("reused", "recomputed", "fresh", "missing", "not_loaded", "generated"):
            self.metrics.count("tokens_total", getattr(report.tokens, kind), kind=kind)

    def backend(self, client: Client) -> Backend:
        """The engine and the passages of that client. Imports torch, so not for an event loop."""
        settings, collection = self.app.settings, self.collection(client)
        _ = self.app.workspaces.of(collection).engine  # opens it with the settings' budgets
        where = settings.device, settings.dtype, settings.vllm
        return Backend(settings.model, self.home, collection, *where)


def is_named(name: str, *known: str | None) -> bool:
    """Whether a client means the model of these names: case does not count, nor an empty name."""
    return name.lower() in ("", *(each.lower() for each in known if each))


def _without_folders(model: str) -> str:
    """A model's name without its path, and a file's without `.gguf`."""
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


class ClientGone(HTTPException):
    """The client has disconnected, so that nobody reads the response."""


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await work; if the client disconnects, cancel it and raise ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone(499, "The client disconnected.")
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Events(StreamingResponse):
    """Server-sent events: a `data:` line for each value, then [DONE]; an error is the last event.

    Values with a `type` have it as `event:` name too, and end without [DONE]. In a dialect of lines each value is one
    line. The first value is given, so that an error before it has a status of its own.
    """

    def __init__(
        self,
        first: object,
        rest: AsyncGenerator[object, None],
        shown: Callable[[str], str],
        dialect: Dialect = OPENAI,
    ) -> None:
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        kind = "application/x-ndjson" if dialect.has_lines else "text/event-stream"
        super().__init__(_lines(first, rest, shown, dialect), headers=headers, media_type=kind)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)

        lines: Any = self.body_iterator
        async with aclosing(lines):
            with suppress(ClientGone, TimeoutError):  # it has disconnected, or does not read
                await until_gone(receive, self.stream_response(send_in_time))


async def _lines(
    first: object, rest: AsyncGenerator[object, None], shown: Callable[[str], str], dialect: Dialect
) -> AsyncGenerator[bytes, None]:
    written = _json_line if dialect.has_lines else _event
    async with aclosing(rest):
        try:
            yield written(first)
            async for value in rest:
                yield written(value)
        except Exception as error:
            yield written(dialect.error(api_error(error, shown)))
        else:
            if not (dialect.has_lines or _event_name(first)):
                yield b"data: [DONE]\n\n"


def _json_line(value: object) -> bytes:
    return encoded(value) + b"\n"


def _event(value: object) -> bytes:
    name = _event_name(value)
    return (f"event: {name}\n" if name else "").encode() + b"data: " + encoded(value) + b"\n\n"


def _event_name(value: object) -> str:
    return str(value.get("type", "")) if isinstance(value, dict) else ""


async def streamed(request: Request, values: AsyncGenerator[object, None]) -> Response:
    """A response that streams the values, as the route's dialect does."""
    try:
        first = await until_gone(request.receive, anext(values))
    except BaseException:
        await values.aclose()
        raise
    return Events(first, values, service_of(request).shown, request.scope["dialect"])


async def whole(values: AsyncIterator[T]) -> list[T]:
    return [value async for value in values]
