"""uvicorn's server, which says when it answers."""

import socket
from collections.abc import Callable

import uvicorn


class Server(uvicorn.Server):
    """Calls on_ready once it listens. Streams that are open when it is told to stop get one second."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()
