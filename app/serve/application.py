"""The server's application: its routes, the checks before them, and error responses.

Main path: `AccessMiddleware` (host, origin, key, size, time) -> a route of `chat` -> a `Call`; or a route of `library`
-> `Conversations`. The routes of other APIs (`ollama`, `anthropic`, `responses`) translate their requests to `chat`'s.
"""

import logging
import time
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragblend.app.serve import anthropic, chat, embed, library, ollama, rerank, responses
from ragblend.app.serve.bodies import main_problem
from ragblend.app.serve.errors import OPENAI, ApiError, Dialect, api_error, error_response, json_response
from ragblend.app.serve.keys import Authenticator, Client
from ragblend.app.serve.metrics import MEDIA_TYPE
from ragblend.app.serve.request_checks import LimitedBody
from ragblend.app.serve.service import Limits, Service, client_of, service_of
from ragblend.app.services import AppServices
from ragblend.integrations.threads import in_thread
from ragblend.kvstore.errors import RagBlendError

log = logging.getLogger("ragblend")
router = APIRouter()
# Paths of the APIs whose errors and streams are not OpenAI's.
DIALECTS = {"/api/": ollama.DIALECT, "/v1/messages": anthropic.DIALECT}
# By pydantic's type of error: the API's error code, and messages that are clearer than pydantic's.
ERROR_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_parameter",
    "json_invalid": "invalid_json",
}
ERROR_MESSAGES = {
    "extra_forbidden": "this server has no such parameter",
    "none_required": "this server does nothing with it, so it can only be null",
}
# Error statuses of all routes, for the API's description. `errors.KNOWN_ERRORS` has the status of each exception.
STATUSES = {
    400: "invalid request", 401: "no key, or a wrong one", 403: "from another site, or not allowed for this key",
    404: "not found", 405: "method not allowed", 408: "the request did not arrive in time", 413: "too large",
    415: "a compressed body", 421: "wrong host name", 429: "too many requests; Retry-After", 500: "internal error",
    503: "temporarily unavailable; Retry-After", 504: "the answer took too long", 507: "the disk is full",
}  # fmt: skip


def build(
    services: AppServices, authenticator: Authenticator, limits: Limits | None = None
) -> "AccessMiddleware":
    """Build the server's ASGI application over these services."""
    errors: dict[int | str, dict[str, Any]] = {
        status: {"description": text} for status, text in STATUSES.items()
    }
    app = FastAPI(title="RAGBlend", docs_url=None, redoc_url=None, responses=errors)
    app.state.service = service = Service(services, limits)
    app.include_router(router)
    for each in (chat, embed, responses, ollama, anthropic, rerank, library):
        app.include_router(each.router)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (ApiError, RagBlendError, Exception):
        app.add_exception_handler(kind, partial(_other_error, service))
    return AccessMiddleware(app, service, authenticator)


class AccessMiddleware:
    """ASGI middleware before all routes: checks host, origin and key, and limits a request's size and time.

    Browsers are told which other sites' pages may read the responses (CORS), errors and preflights included.
    """

    def __init__(self, app: ASGIApp, service: Service, authenticator: Authenticator) -> None:
        self.service, self._app, self._authenticator = service, app, authenticator
        self._entry: ASGIApp = self._handle
        if origins := authenticator.rules.origins:
            self._entry = CORSMiddleware(
                self._handle,
                allow_origins=origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("retry-after", "x-should-retry"),
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        sent_status: list[int] = []  # empty until a response has begun
        max_bytes, max_s = self._authenticator.rules.max_bytes(scope["path"]), self.service.limits.body_s

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent_status.append(message["status"])
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-content-type-options", "nosniff")
                headers.setdefault("cache-control", "no-store")
            await send(message)

        inner_scope = dict(scope)  # a copy, in which routing stores the route
        inner_scope["dialect"] = dialect = dialect_of(scope["path"])
        try:
            inner_scope["client_of_key"] = client = self._authenticator.client(scope)
            with self._admit_upload(scope, client):
                await self._app(inner_scope, LimitedBody(receive, max_bytes, max_s), send_with_headers)
        except Exception as error:  # not logged in full, because its message may quote the request
            if not sent_status:
                response = error_response(api_error(error, self.service.hide_paths), dialect)
                await response(scope, receive, send_with_headers)
        route = getattr(inner_scope.get("route"), "path", "other")
        status = str(sent_status[0] if sent_status else 499)  # 499: the client disconnected
        self.service.metrics.count("requests_total", route=route, status=status)

    def _admit_upload(self, scope: Scope, client: Client) -> AbstractContextManager[None]:
        """Admit an upload before its body is read, because it is written to disk as it arrives.

        Other requests are admitted by their routes.
        """
        is_upload = scope["method"] == "POST" and scope["path"] == library.UPLOAD_PATH
        return self.service.admission.enter(client) if is_upload else nullcontext()


async def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    respond = partial(error_response, dialect=request.scope["dialect"])
    problem, field = main_problem(error.errors(), skipped=1)
    kind = problem["type"]
    code, message = ERROR_CODES.get(kind, "invalid_value"), ERROR_MESSAGES.get(kind, problem["msg"])
    if kind == "json_invalid":
        return respond(ApiError(400, f"The body is not JSON: {problem['ctx']['error']}.", code))
    if not field and kind.endswith("_type"):
        media_type = request.headers.get("content-type", "missing")
        is_json = media_type.partition(";")[0].strip().endswith("json")
        expected = (
            "a JSON object" if is_json else f"JSON: Content-Type is {media_type:.100}, not application/json"
        )
        return respond(ApiError(400, f"The body is not {expected}.", "invalid_json"))
    return respond(ApiError(400, f"{field}: {message}" if field else message, code, field or None))


async def _http_error(request: Request, error: Exception) -> Response:
    """For Starlette's own errors (unknown paths and methods, malformed forms), and for too large or too slow bodies."""
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, OSError):  # writing an upload to disk failed
        return error_response(api_error(error.__cause__))
    code = getattr(error, "code", "refused")
    response = error_response(ApiError(error.status_code, str(error.detail), code), request.scope["dialect"])
    response.headers.update(error.headers or {})
    return response


async def _other_error(service: Service, request: Request, error: Exception) -> Response:
    return error_response(api_error(error, service.hide_paths), request.scope["dialect"])


def dialect_of(path: str) -> Dialect:
    return next((dialect for prefix, dialect in DIALECTS.items() if path.startswith(prefix)), OPENAI)


@router.get("/")
@router.head("/")
async def root() -> Response:
    """Say that a server is running; Ollama's command line checks this first."""
    return PlainTextResponse("RAGBlend is running")


@router.get("/healthz")
async def health(request: Request) -> Response:
    """Report whether the server is ready; needs no key."""
    startup = service_of(request).startup
    state = "failed" if startup.problem else "loading" if startup.is_loading else "ok"
    return json_response({"status": state}, 503 if startup.problem else 200)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus' text format, only to the owner: they show what other clients do."""
    service = service_of(request)
    if not client_of(request).is_owner:
        raise ApiError(403, "Metrics need the owner's key.", "not_owner")
    return PlainTextResponse(await in_thread(lambda: _metrics_text(service)), media_type=MEDIA_TYPE)


def _metrics_text(service: Service) -> str:
    overview, store = service.app.jobs.overview(), service.app.workspaces.first.engine.store
    gauges = {
        "requests_inside": service.admission.inside,
        "files_waiting": overview.total - overview.finished,
        "uptime_seconds": time.monotonic() - service.started_monotonic_s,
    }
    store_counts = [
        (f"store_{what}_total", (("tier", tier),), getattr(counts, what))
        for tier, counts in store.counts_by_tier().items()
        for what in ("hits", "misses", "evictions")
    ]
    return service.metrics.text(gauges, store_counts)


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """List the model that answers, the embedder, and the reranker, if there is one."""
    service = service_of(request)
    return json_response({"object": "list", "data": [_model(service, name) for name in service.models]})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """Describe one model."""
    service = service_of(request)
    return json_response(_model(service, service.listed_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": service.started_at, "owned_by": "ragblend"}
