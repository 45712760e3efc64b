"""What stands in front of every route of the page: host, origin, session, size, and the headers of every answer.

Gradio on loopback answers any Host (DNS rebinding), takes uploads from other origins and keeps nobody out. This is
plain ASGI, so that it sees every route there is, also those that Gradio adds, and streams pass through it untouched.
"""

import logging

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragblend.app.serve.front import LimitedBody, Refusal, Rules, TooLarge, refuse, too_large
from ragblend.ui.document import Rewriter
from ragblend.ui.entrance import Entrance

SAFE_METHODS = ("GET", "HEAD")
UPLOAD_PATH = "/gradio_api/upload"
WITHOUT_SESSION = ("/login",)
LOG = logging.getLogger(__name__)


class Safety:
    """The middleware. Refuses with 4xx and a sentence; lets the rest through, with its headers completed."""

    def __init__(self, app: ASGIApp, rules: Rules, entrance: Entrance) -> None:
        self._app, self._rules, self._entrance = app, rules, entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # the page uses no websockets, so there is nothing to let through
            await send({"type": "websocket.close", "code": 1008})
            return
        rewriter = Rewriter(send)
        refused, visitor = refuse(scope, self._rules), self._visitor(scope)
        refusal = _response(refused) if refused else None
        if refusal is None and visitor is None:
            refusal = await self._entrance.receive_visitor(scope, receive, self._rules.max_body_bytes)
        if refusal is not None:
            await refusal(scope, receive, rewriter)
            return
        meter = LimitedBody(receive, self._rules.limit(scope["path"]))

        async def answer(message: Message) -> None:
            if rewriter.started or not meter.exceeded:  # what is made of half a body is not worth sending
                await rewriter(message)

        try:
            await self._app({**scope, "visitor": visitor}, meter, answer)
        except TooLarge:
            pass
        except Exception as error:  # its message may hold what was sent, and its traceback fills a log
            LOG.error("%s %s failed: %s", scope["method"], scope["path"], type(error).__name__)
            LOG.debug("where it failed", exc_info=error)
            await rewriter.end()
        if meter.exceeded and not rewriter.started:
            await _response(too_large(meter.limit))(scope, receive, rewriter)
        elif not rewriter.started:
            await PlainTextResponse("That request failed.", 500)(scope, receive, rewriter)

    def _visitor(self, scope: Scope) -> str | None:
        if scope["path"] in WITHOUT_SESSION:
            return None
        return self._entrance.visitor(HTTPConnection(scope).cookies.get(self._entrance.cookie_name))


def _response(refusal: Refusal) -> Response:
    status, text = refusal
    return PlainTextResponse(text, status)
