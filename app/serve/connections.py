"""Limits of HTTP connections: requests that stay half-sent cannot use up the process's files."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ragblend.app.system import open_file_limit

BACKLOG = 64  # most connections that are accepted before the limits are checked
RESERVED_FILES = 192  # for the store, documents and models


@dataclass(frozen=True)
class ConnectionLimits:
    """Most connections, in all and from one address, and the time until a header must be complete.

    If they are reached, the connection is closed whose client was silent for longest, among those that have not sent a
    whole request; only if there is none, the new one is.
    """

    total: int = 512
    of_one: int = 384
    header_s: float = 20.0

    @property
    def fitting(self) -> Self:
        """The same limits, lower if the process may open fewer files."""
        total = max(16, min(self.total, open_file_limit() - RESERVED_FILES))
        return type(self)(total, max(8, min(self.of_one, total * 3 // 4)), self.header_s)


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """One connection: uvicorn's protocol within `ConnectionLimits`."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._timer, self._heard_s = limits, None, self.loop.time()

    @property
    def _needs_header(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _needs_client(self) -> bool:
        """Whether it waits for the client to send the rest of a request, or the next one."""
        return self._needs_header or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch_header()
        address = (self.client or ("",))[0]
        same = [each for each in self.connections if (each.client or ("",))[0] == address]
        if len(same) > self._limits.of_one:
            self._make_room(same)
        elif len(self.connections) > self._limits.total:
            self._make_room(self.connections)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._heard_s = self.loop.time()
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _make_room(self, connections: "Iterable[GuardedProtocol]") -> None:
        waiting = (each for each in connections if each is not self and each._needs_client)
        silent = min(waiting, key=lambda each: each._heard_s, default=self)
        self.connections.discard(silent)  # it is closed in the event loop's next round
        silent.transport.abort()

    def _watch_header(self) -> None:
        """Close the connection in time unless the client has sent a whole header by then, however slowly."""
        if not self._needs_header or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._limits.header_s, self._expire)

    def _expire(self) -> None:
        if self._needs_header:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
