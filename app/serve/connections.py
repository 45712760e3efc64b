"""Limits of HTTP connections: unfinished requests cannot use up the process's open files."""

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
    """The maximum numbers of connections, in total and per address, and the time until a header must be complete.

    When a number is exceeded, one connection is closed: of those whose client has not sent a whole request, the one
    that was silent for longest; if there is none, the new one.
    """

    total: int = 512
    per_address: int = 384
    header_s: float = 20.0

    @property
    def within_file_limit(self) -> Self:
        """These limits, lowered if the process may not open enough files."""
        total = max(16, min(self.total, open_file_limit() - RESERVED_FILES))
        return type(self)(total, max(8, min(self.per_address, total * 3 // 4)), self.header_s)


class GuardedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """One connection: uvicorn's protocol within `ConnectionLimits`."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self._timer, self._received_at_s = limits, None, self.loop.time()

    @property
    def _awaits_header(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _awaits_client(self) -> bool:
        """Whether the client has to send the rest of a request, or the next one."""
        return self._awaits_header or self.cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch_header()
        address = (self.client or ("",))[0]
        of_address = [each for each in self.connections if (each.client or ("",))[0] == address]
        if len(of_address) > self._limits.per_address:
            self._close_one(of_address)
        elif len(self.connections) > self._limits.total:
            self._close_one(self.connections)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._received_at_s = self.loop.time()
        self._watch_header()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _close_one(self, connections: "Iterable[GuardedProtocol]") -> None:
        candidates = (each for each in connections if each is not self and each._awaits_client)
        chosen = min(candidates, key=lambda each: each._received_at_s, default=self)
        self.connections.discard(chosen)  # at once: `abort` takes effect in the event loop's next round
        chosen.transport.abort()

    def _watch_header(self) -> None:
        """While a header is awaited, run the timer that closes the connection if it is not complete in time."""
        if not self._awaits_header or self.transport.is_closing():
            self._stop_timer()
        elif self._timer is None:
            self._timer = self.loop.call_later(self._limits.header_s, self._expire)

    def _expire(self) -> None:
        if self._awaits_header:
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
