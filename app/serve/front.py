"""Who may ask this process for anything, by host name, origin, path and size: for the page and the server.

A browser sends requests for other sites: under a name that leads here (DNS rebinding), or from their own origin.
uvicorn answers them all.
"""

import asyncio
import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

Refusal = tuple[int, str]  # a status and a sentence
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
MIB = 1 << 20
PORT_DIGITS = 5
OVERHEAD_BYTES = MIB  # of a multipart upload, beside the file


@dataclass(frozen=True)
class Address:
    """Where to listen. names: further host names that are answered to, at any port where they name none: a proxy with
    TLS hands on the name that its clients know.
    """

    host: str = "127.0.0.1"
    port: int = 7860
    names: tuple[str, ...] = ()

    @property
    def is_loopback(self) -> bool:
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    @property
    def is_private(self) -> bool:
        """Whether nobody but programs of this machine asks here: who has other names is behind a proxy."""
        return self.is_loopback and not self.names

    @property
    def url(self) -> str:
        shown = "127.0.0.1" if self.host == "0.0.0.0" else self.host
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self.port}/"


@dataclass(frozen=True)
class Rules:
    """Who may ask for what: under the names of this address and of loopback. upload_path: whose bodies are files."""

    address: Address
    upload_path: str = ""
    max_upload_bytes: int = 512 * MIB
    max_body_bytes: int = 8 * MIB

    def knows(self, netloc: str) -> bool:
        """Whether `netloc` (host, or host:port) is this server; where it listens everywhere, by every IP address too.

        Rebinding needs a name, so addresses are harmless.
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
        """The most bytes that a request to this path may carry."""
        return self.max_upload_bytes + OVERHEAD_BYTES if path == self.upload_path else self.max_body_bytes


class TooLarge(Exception):
    """A body grew past its limit while it was read."""


class TooSlow(Exception):
    """A body was not there in time."""


class LimitedBody:
    """Counts a body that did not say how long it is. seconds: in which it must be there; None: as long as it takes."""

    def __init__(self, receive: Receive, limit: int, seconds: float | None = None) -> None:
        self._receive, self.limit, self._seen = receive, limit, 0
        self._deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
        self._is_whole = False
        self.late = False

    @property
    def exceeded(self) -> bool:
        return self._seen > self.limit

    async def __call__(self) -> Message:
        try:
            async with asyncio.timeout_at(None if self._is_whole else self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.late = True
            raise TooSlow from None
        self._seen += len(message.get("body", b""))
        self._is_whole = self._is_whole or not message.get("more_body", False)
        if self.exceeded:
            raise TooLarge
        return message


async def whole_body(receive: Receive, most: int | None = None) -> bytes:
    """A body to its end, or the first bytes of a longer one."""
    body, more = bytearray(), True
    while more and (most is None or len(body) < most):
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body[:most])


def refuse(scope: Scope, rules: Rules) -> Refusal | None:
    """Why a request must not pass, whoever sends it; None for one that may."""
    headers = Headers(scope=scope)
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not rules.knows(hosts[0]):
        return 421, "This server does not answer under that host name."
    if not is_same_origin(scope, headers, hosts[0]):
        return 403, "Requests from other sites are refused."
    if has_odd_path(scope):
        return 404, "There is nothing at that path."
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        return 400, "Content-Length must be a number."
    limit = rules.limit(scope["path"])
    return too_large(limit) if len(length) > 18 or int(length) > limit else None


def is_same_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """By Origin where there is one, else by Sec-Fetch-Site; a link from elsewhere may open the page, and only that."""
    origins = headers.getlist("origin")
    if origins:
        with suppress(ValueError):  # what is no URL is not ours
            parts = urlsplit(origins[0])
            return len(origins) == 1 and parts.scheme in ("http", "https") and parts.netloc == host
        return False
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


def too_large(limit: int) -> Refusal:
    return 413, f"That is larger than the limit of {limit // MIB} MiB."


def split_netloc(netloc: str) -> tuple[str, int | None]:
    """host and port; port 80 where none is named, None where it is no number."""
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
