"""Security of every route of the page: host, origin, session, body size, and response headers.

Gradio on loopback answers any Host (DNS rebinding), accepts uploads from other origins and asks for no login. This is
plain ASGI, so that it covers all routes, also those that Gradio adds, and streams pass through it unchanged.
"""

import logging

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragblend.app.serve.request_checks import (
    LimitedBody,
    Refusal,
    Rules,
    TooLarge,
    reason_to_refuse,
    too_large,
)
from ragblend.ui.login import PageLogin
from ragblend.ui.response_headers import ResponseRewriter

SAFE_METHODS = ("GET", "HEAD")
UPLOAD_PATH = "/gradio_api/upload"
WITHOUT_SESSION = ("/login",)
LOG = logging.getLogger(__name__)


class SecurityMiddleware:
    """Refuses a request with 4xx and a sentence, or passes it on and completes the response headers."""

    def __init__(self, app: ASGIApp, rules: Rules, login: PageLogin) -> None:
        self._app, self._rules, self._login = app, rules, login

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no websockets
            await send({"type": "websocket.close", "code": 1008})
            return
        rewriter = ResponseRewriter(send)
        refused, visitor = reason_to_refuse(scope, self._rules), self._visitor(scope)
        refusal = _response(refused) if refused else None
        if refusal is None and visitor is None:
            refusal = await self._login.answer_visitor(scope, receive)
        if refusal is not None:
            await refusal(scope, receive, rewriter)
            return
        meter = LimitedBody(receive, self._rules.max_bytes(scope["path"]))

        async def answer(message: Message) -> None:
            if rewriter.started or not meter.is_exceeded:  # a response to half a body is not worth sending
                await rewriter(message)

        try:
            await self._app({**scope, "visitor": visitor}, meter, answer)
        except TooLarge:
            pass
        except (
            Exception
        ) as error:  # its message may repeat what was sent, and its traceback would fill the log
            LOG.error("%s %s failed: %s", scope["method"], scope["path"], type(error).__name__)
            LOG.debug("traceback", exc_info=error)
            await rewriter.end()
        if meter.is_exceeded and not rewriter.started:
            await _response(too_large(meter.max_bytes))(scope, receive, rewriter)
        elif not rewriter.started:
            await PlainTextResponse("That request failed.", 500)(scope, receive, rewriter)

    def _visitor(self, scope: Scope) -> str | None:
        if scope["path"] in WITHOUT_SESSION:
            return None
        return self._login.visitor(HTTPConnection(scope).cookies.get(self._login.cookie_name))


def _response(refusal: Refusal) -> Response:
    status, text = refusal
    return PlainTextResponse(text, status)
