"""Checks of a request's host name, origin, path and size, for the page and the server.

Any web site can make a browser send requests here: from the site's own origin, or under a host name that resolves to
this machine (DNS rebinding). uvicorn by itself would answer them.
"""

import asyncio
import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

Refusal = tuple[int, str]  # an HTTP status and a message
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MIB = 1 << 20
PORT_DIGITS = 5
OVERHEAD_BYTES = MIB  # what a multipart upload may have besides its file


@dataclass(frozen=True)
class Address:
    """Where to listen. names: further accepted host names, at any port unless they name one: a TLS proxy, for example,
    passes on the host name that its clients use.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    names: tuple[str, ...] = ()

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_private(self) -> bool:
        """Whether only programs on this machine can connect; further host names mean that a proxy forwards requests."""
        return self.is_loopback and not self.names

    @property
    def url(self) -> str:
        shown = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"


@dataclass(frozen=True)
class Rules:
    """Accepted host names (those of the address and of loopback) and size limits.

    upload_path: the route that receives files. origins: other web sites whose pages may send requests; `*` is all.
    """

    address: Address
    upload_path: str = ""
    max_upload_bytes: int = 512 * MIB
    max_body_bytes: int = 8 * MIB
    origins: tuple[str, ...] = ()

    def is_own_host(self, netloc: str) -> bool:
        """Whether `netloc` (host, or host:port) names this server.

        If it listens on all addresses, any IP address is accepted: DNS rebinding needs a host name.
        """
        name, port = split_netloc(netloc.lower())
        host, names = self.address.host, [each.lower() for each in self.address.names]
        if netloc.lower() in names or (name in names and port is not None):
            return True
        if not name or port != self.address.port:
            return False
        is_any_ip_address = host in ("0.0.0.0", "::", "") and is_ip_address(name)
        return is_any_ip_address or name in (*LOOPBACK_NAMES, f"[{host}]" if ":" in host else host.lower())

    def max_bytes(self, path: str) -> int:
        """The size limit of a request's body at this path."""
        return self.max_upload_bytes + OVERHEAD_BYTES if path == self.upload_path else self.max_body_bytes


class TooLarge(HTTPException):
    """A body exceeded its limit while it was read. It is an HTTPException because FastAPI raises those unchanged."""

    code = "too_large"


class TooSlow(HTTPException):
    """A body did not arrive in time."""

    code = "timeout"


class LimitedBody:
    """Receives a body, limited in bytes and in seconds (None: no time limit). Raises TooLarge, TooSlow."""

    def __init__(self, receive: Receive, max_bytes: int, seconds: float | None = None) -> None:
        self._receive, self.max_bytes, self._received_bytes = receive, max_bytes, 0
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._is_whole = False

    @property
    def is_exceeded(self) -> bool:
        return self._received_bytes > self.max_bytes

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(None if self._is_whole else self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise TooSlow(408, "The request did not arrive in time.") from None
        self._received_bytes += len(message.get("body", b""))
        self._is_whole = self._is_whole or not message.get("more_body", False)
        if self.is_exceeded:
            raise TooLarge(*too_large(self.max_bytes))
        return message


async def read_body(receive: Receive, max_bytes: int | None = None) -> bytes:
    """Read a body to its end, or its first `max_bytes` bytes."""
    body, more = bytearray(), True
    while more and (max_bytes is None or len(body) < max_bytes):
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body[:max_bytes])


def reason_to_refuse(scope: Scope, rules: Rules) -> Refusal | None:
    """The status and message with which to refuse a request; None if it is acceptable."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not rules.is_own_host(hosts[0]):
        return 421, "This server does not answer under that host name."
    is_allowed = "*" in rules.origins or headers.get("origin") in rules.origins
    if not is_allowed and not is_same_origin(scope, headers, hosts[0]):
        return 403, "Requests from other sites are refused."
    if has_unsafe_path(scope):
        return 404, "There is nothing at that path."
    if headers.get("content-encoding", "identity").lower() != "identity":
        return 415, "Compressed bodies are not read: send it without Content-Encoding."
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        return 400, "Content-Length must be a number."
    max_bytes = rules.max_bytes(scope["path"])
    return too_large(max_bytes) if len(length) > 18 or int(length) > max_bytes else None


def is_same_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """Whether a request is from this site, by Origin if sent, else Sec-Fetch-Site. Other sites may link to `/`."""
    origins = headers.getlist("origin")
    if origins:
        with suppress(ValueError):  # not a URL
            parts = urlsplit(origins[0])
            return len(origins) == 1 and parts.scheme in ("http", "https") and parts.netloc == host
        return False
    site = headers.get("sec-fetch-site", "none")
    opens_page = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return site in ("same-origin", "none") or (opens_page and scope["path"] == "/")


def has_unsafe_path(scope: Scope) -> bool:
    """Whether a path has `.`, `..`, backslashes or control characters, percent-encoded or not. No route has any."""
    raw = scope.get("raw_path", b"").decode("latin-1").lower()
    path = scope["path"].replace("\\", "/")
    has_encoded = any(mark in raw for mark in ("%2e%2e", "%5c", "%00", "%25"))
    has_dots = any(part in ("..", ".") for part in path.replace("=", "/").split("/"))
    return has_encoded or has_dots or "\\" in scope["path"] or any(ord(character) < 32 for character in path)


def too_large(max_bytes: int) -> Refusal:
    return 413, f"That is larger than the limit of {max_bytes // MIB} MiB."


def split_netloc(netloc: str) -> tuple[str, int | None]:
    """Host and port; port 80 if none is given, None if it is not a number."""
    bracket = netloc.rfind("]")
    name, colon, port = netloc[bracket + 1 :].rpartition(":")
    if not colon:
        return netloc, 80
    is_number = port.isascii() and port.isdigit() and len(port) <= PORT_DIGITS
    return netloc[: bracket + 1] + name, int(port) if is_number else None


def is_ip_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
