"""Checks of a request's host name, origin, path and size, for the page and the server.

A browser sends requests on behalf of other sites: under a host name that resolves to this machine (DNS rebinding), or
from their own origin. uvicorn by itself would answer them.
"""

import asyncio
import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

Refusal = tuple[int, str]  # a status and a sentence
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MIB = 1 << 20
PORT_DIGITS = 5
OVERHEAD_BYTES = MIB  # how much larger a multipart upload may be than its file


@dataclass(frozen=True)
class Address:
    """Where to listen. names: further accepted host names, at any port unless they name one.

    A proxy with TLS passes on the host name that its clients use.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    names: tuple[str, ...] = ()

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_private(self) -> bool:
        """Whether only programs on this machine can connect; further names mean that there is a proxy."""
        return self.is_loopback and not self.names

    @property
    def url(self) -> str:
        shown = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"


@dataclass(frozen=True)
class Rules:
    """Accepted host names (those of the address and of loopback) and size limits.

    upload_path: its bodies are files. origins: other web sites whose pages may send requests; `*` is all.
    """

    address: Address
    upload_path: str = ""
    max_upload_bytes: int = 512 * MIB
    max_body_bytes: int = 8 * MIB
    origins: tuple[str, ...] = ()

    def knows(self, netloc: str) -> bool:
        """Whether `netloc` (host, or host:port) names this server.

        If it listens on all addresses, any IP address is accepted: DNS rebinding needs a host name.
        """
        name, port = split_netloc(netloc.lower())
        host, names = self.address.host, [each.lower() for each in self.address.names]
        if netloc.lower() in names or (name in names and port is not None):
            return True
        if not name or port != self.address.port:
            return False
        anywhere = host in ("0.0.0.0", "::", "") and is_address(name)
        return anywhere or name in (*LOOPBACK_NAMES, f"[{host}]" if ":" in host else host.lower())

    def limit(self, path: str) -> int:
        """The largest body of a request to this path, in bytes."""
        return self.max_upload_bytes + OVERHEAD_BYTES if path == self.upload_path else self.max_body_bytes


class TooLarge(HTTPException):
    """A body exceeded its limit while it was read. As an HTTPException, FastAPI passes it on as it is."""

    code = "too_large"


class TooSlow(HTTPException):
    """A body did not arrive in time."""

    code = "timeout"


class LimitedBody:
    """Receives a body, limited in bytes and in seconds (None: no time limit). Raises TooLarge, TooSlow."""

    def __init__(self, receive: Receive, limit: int, seconds: float | None = None) -> None:
        self._receive, self.limit, self._seen = receive, limit, 0
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._is_whole = False

    @property
    def exceeded(self) -> bool:
        return self._seen > self.limit

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(None if self._is_whole else self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(408, "The request did not arrive in time.") from None
        self._seen += len(message.get("body", b""))
        self._is_whole = self._is_whole or not message.get("more_body", False)
        if self.exceeded:
            raise TooLarge(*too_large(self.limit))
        return message


async def whole_body(receive: Receive, most: int | None = None) -> bytes:
    """Read a body to its end, or its first `most` bytes."""
    body, more = bytearray(), True
    while more and (most is None or len(body) < most):
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body[:most])


def refuse(scope: Scope, rules: Rules) -> Refusal | None:
    """Why a request is refused, as a status and a message; None for an acceptable one."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not rules.knows(hosts[0]):
        return 421, "This server does not answer under that host name."
    is_allowed = "*" in rules.origins or headers.get("origin") in rules.origins
    if not is_allowed and not is_same_origin(scope, headers, hosts[0]):
        return 403, "Requests from other sites are refused."
    if has_odd_path(scope):
        return 404, "There is nothing at that path."
    if headers.get("content-encoding", "identity").lower() != "identity":
        return 415, "Compressed bodies are not read: send it without Content-Encoding."
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        return 400, "Content-Length must be a number."
    limit = rules.limit(scope["path"])
    return too_large(limit) if len(length) > 18 or int(length) > limit else None


def is_same_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """Whether a request is from this site, by Origin if sent, else Sec-Fetch-Site. Links elsewhere may open `/`."""
    origins = headers.getlist("origin")
    if origins:
        with suppress(ValueError):  # not a URL
            parts = urlsplit(origins[0])
            return len(origins) == 1 and parts.scheme in ("http", "https") and parts.netloc == host
        return False
    site = headers.get("sec-fetch-site", "none")
    opens_page = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site in ("same-origin", "none") or (opens_page and scope["path"] == "/")


def has_odd_path(scope: Scope) -> bool:
    """Whether a path has `..`, backslashes or control characters, decoded or not: no route has any."""
    raw = scope.get("raw_path", b"").decode("latin-1").lower()
    path = scope["path"].replace("\\", "/")
    encoded = any(mark in raw for mark in ("%2e%2e", "%5c", "%00", "%25"))
    steps = any(part in ("..", ".") for part in path.replace("=", "/").split("/"))
    return encoded or steps or "\\" in scope["path"] or any(ord(character) < 32 for character in path)


def too_large(limit: int) -> Refusal:
    return 413, f"That is larger than the limit of {limit // MIB} MiB."


def split_netloc(netloc: str) -> tuple[str, int | None]:
    """Host and port; port 80 if none is given, None if it is not a number."""
    bracket = netloc.rfind("]")
    name, colon, port = netloc[bracket + 1 :].rpartition(":")
    if not colon:
        return netloc, 80
    is_number = port.isascii() and port.isdigit() and len(port) <= PORT_DIGITS
    return netloc[: bracket + 1] + name, int(port) if is_number else None


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
