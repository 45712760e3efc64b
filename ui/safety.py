"""What stands in front of every route of the page: host, origin, session, size, and the headers of every answer.

Gradio on loopback answers any Host (DNS rebinding), takes uploads from other origins and keeps nobody out. This is
plain ASGI, so that it sees every route there is, also those that Gradio adds, and streams pass through it untouched.
"""

import ipaddress
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragblend.ui.document import Rewriter
from ragblend.ui.entrance import Entrance

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
SAFE_METHODS = ("GET", "HEAD")
MIB = 1 << 20
OVERHEAD_BYTES = MIB  # of a multipart upload, beside the file
UPLOAD_PATH = "/gradio_api/upload"
WITHOUT_SESSION = ("/login",)
LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """Who may ask for what. names: hosts by name, without port; any_address: also every IP address (wildcard bind)."""

    names: frozenset[str]
    port: int
    any_address: bool = False
    max_upload_bytes: int = 512 * MIB
    max_body_bytes: int = 8 * MIB

    @classmethod
    def of(cls, host: str, port: int, more_names: Iterable[str] = (), **limits: int) -> "Rules":
        """The rules for a bind address: loopback names, that address, and names that the user allows."""
        names = {*LOOPBACK_NAMES, *(name.lower() for name in more_names)}
        wildcard = host in ("0.0.0.0", "::", "")
        if not wildcard:
            names.add(f"[{host}]".lower() if ":" in host else host.lower())
        return cls(frozenset(names), port, wildcard, **limits)

    def knows(self, netloc: str) -> bool:
        """Whether `netloc` (host, or host:port) is this server. Rebinding needs a name, so addresses are harmless."""
        name, port = split_netloc(netloc.lower())
        if port != self.port:
            return False
        return name in self.names or (self.any_address and is_address(name))

    def limit(self, path: str) -> int:
        """The most bytes that a request to this path may carry."""
        return self.max_upload_bytes + OVERHEAD_BYTES if path == UPLOAD_PATH else self.max_body_bytes


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
        refusal, visitor = refuse(scope, self._rules), self._visitor(scope)
        if refusal is None and visitor is None:
            refusal = await self._entrance.receive_visitor(scope, receive, self._rules.max_body_bytes)
        if refusal is not None:
            await refusal(scope, receive, rewriter)
            return
        meter = _Meter(receive, self._rules.limit(scope["path"]))

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
            await too_large(meter.limit)(scope, receive, rewriter)
        elif not rewriter.started:
            await PlainTextResponse("That request failed.", 500)(scope, receive, rewriter)

    def _visitor(self, scope: Scope) -> str | None:
        if scope["path"] in WITHOUT_SESSION:
            return None
        return self._entrance.visitor(cookies(scope).get(self._entrance.cookie_name))


class TooLarge(Exception):
    """A body grew past its limit while it was read."""


class _Meter:
    """Counts a body that did not say how long it is."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self.limit, self._seen = receive, limit, 0

    @property
    def exceeded(self) -> bool:
        return self._seen > self.limit

    async def __call__(self) -> Message:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self.exceeded:
            raise TooLarge
        return message


def refuse(scope: Scope, rules: Rules) -> Response | None:
    """The answer to a request that must not pass, whoever sends it; None for one that may."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not rules.knows(hosts[0]):
        return PlainTextResponse("This page does not answer under that host name.", 421)
    if not is_same_origin(scope, headers, hosts[0]):
        return PlainTextResponse("Requests from other sites are refused.", 403)
    if has_odd_path(scope):
        return PlainTextResponse("There is nothing at that path.", 404)
    length = headers.get("content-length", "0")
    if not length.isdigit():
        return PlainTextResponse("Content-Length must be a number.", 400)
    return too_large(rules.limit(scope["path"])) if int(length) > rules.limit(scope["path"]) else None


def is_same_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """By Origin where there is one, else by Sec-Fetch-Site; a link from elsewhere may open the page, and only that."""
    origins = headers.getlist("origin")
    if origins:
        parts = urlsplit(origins[0]) if len(origins) == 1 else None
        return parts is not None and parts.scheme in ("http", "https") and parts.netloc == host
    site = headers.get("sec-fetch-site", "none")
    opens_page = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site in ("same-origin", "none") or (opens_page and scope["path"] == "/")


def has_odd_path(scope: Scope) -> bool:
    """Steps upwards, backslashes and control characters, decoded or not: no route of the page has any."""
    raw = scope.get("raw_path", b"").decode("latin-1").lower()
    path = scope["path"].replace("\\", "/")
    encoded = any(mark in raw for mark in ("%2e%2e", "%5c", "%00", "%25"))
    steps = any(part in ("..", ".") for part in path.replace("=", "/").split("/"))
    return encoded or steps or "\\" in scope["path"] or any(ord(character) < 32 for character in path)


def too_large(limit: int) -> Response:
    return PlainTextResponse(f"That is larger than the limit of {limit // MIB} MiB.", 413)


def cookies(scope: Scope) -> dict[str, str]:
    """The request's cookies by name; none where they cannot be read."""
    jar: SimpleCookie = SimpleCookie()
    for text in Headers(scope=scope).getlist("cookie"):
        try:
            jar.load(text)
        except CookieError:
            continue
    return {name: morsel.value for name, morsel in jar.items()}


def split_netloc(netloc: str) -> tuple[str, int | None]:
    """host and port; port 80 where none is named, None where it is no number."""
    bracket = netloc.rfind("]")
    name, colon, port = netloc[bracket + 1 :].rpartition(":")
    if not colon:
        return netloc, 80
    return netloc[: bracket + 1] + name, int(port) if port.isascii() and port.isdigit() else None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
