"""What the page and the server share: the listening socket, uvicorn, the checks before the start, and owning the home.

Only one process owns a home: it runs the ingest queue, and the commands that other processes forward to it.
"""

import gc
import logging
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from ragblend.app.remote import OWNER_LOCK
from ragblend.app.serve.commands import CommandListener
from ragblend.app.serve.connections import BACKLOG, ConnectionLimits, GuardedProtocol
from ragblend.app.serve.keys import Authenticator, Keys
from ragblend.app.serve.request_checks import MIB, Address, Rules
from ragblend.app.serve.watchdog import watch
from ragblend.app.services import AppServices
from ragblend.app.system import limit_malloc_arenas, on_signal
from ragblend.kvstore.errors import StoreLockedError, UsageError
from ragblend.kvstore.files import FOLDER_MODE
from ragblend.kvstore.lock import read_holder, writer_lock

if TYPE_CHECKING:
    from ragblend.app.serve.service import Limits

log = logging.getLogger("ragblend")
GC_THRESHOLDS = (700, 10, 10)  # Python's defaults
GRACE_S = 30  # for running requests when the server stops


class UvicornServer(uvicorn.Server):
    """uvicorn that calls on_ready once it accepts requests, and limits connections.

    grace_s: how long running requests may continue when it stops; None: until they end.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_ready: Callable[[], None],
        grace_s: int | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        protocol: Any = partial(GuardedProtocol, (limits or ConnectionLimits()).within_file_limit)
        config = uvicorn.Config(
            app,
            http=protocol,
            log_level="warning",
            ws="none",
            timeout_graceful_shutdown=grace_s,
            backlog=BACKLOG,
            access_log=False,
            server_header=False,
            proxy_headers=False,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@contextmanager
def listening(
    host: str, port: int, names: Iterable[str] | None = None, ports_tried: int = 1
) -> Iterator[tuple[Address, socket.socket]]:
    """Listen for the block, at the first free one of the `ports_tried` ports from `port` on (port 0: any free port).

    names: further host names, as in `Address`. Raises UsageError if no port is free.
    """
    family, reason = socket.AF_INET6 if ":" in host else socket.AF_INET, ""
    ports = range(port, port + ports_tried)
    for number in ports:
        try:
            listener = socket.create_server((host, number), family=family)
        except OSError as error:
            reason = error.strerror or str(error)
            continue
        with listener:
            # Without TCP_NODELAY every packet after the first, such as a streamed token, waits up to 40 ms for an
            # acknowledgement. uvloop sets it; asyncio only if the socket names its protocol, which this one does not.
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Address(host, listener.getsockname()[1], tuple(names or ())), listener
        return
    tried = f"port {port}" if ports_tried == 1 else f"ports {port} to {ports[-1]}"
    raise UsageError(f"Listening at {host}, {tried}: {reason}. Name another with --port or --host.")


def require_key_if_reachable(host: str, names: Iterable[str] | None, keys: Keys) -> None:
    """Raise UsageError if other machines can reach the server, directly or through a proxy, and there is no key."""
    if not (Address(host, names=tuple(names or ())).is_private or keys.clients()):
        raise UsageError(
            f"Serving at {host}: it could be reached from other machines, so it needs a key. Make one with "
            "`ragblend keys add NAME`, or leave out --host and --allow-host."
        )


def check_origins(origins: Iterable[str] | None, keys: Keys) -> tuple[str, ...]:
    """Return the origins of other web sites whose pages may use the server. Raises UsageError for a text that is not an
    origin, and for `*` if there is no key.
    """
    checked = tuple(origins or ())
    for each in checked:
        if each != "*" and not re.fullmatch(r"https?://[^/\s?#@]+", each):
            raise UsageError(f"--allow-origin {each!r}: an origin looks like https://app.example, or is *.")
    if "*" in checked and not keys.clients():
        raise UsageError(
            "--allow-origin '*': every page that this machine's browsers open could use the server, so it needs a "
            "key. Make one with `ragblend keys add NAME`, or name the origins."
        )
    return checked


def serve(
    services: AppServices,
    address: Address,
    listener: socket.socket,
    keys: Keys,
    on_ready: Callable[[], None],
    limits: "Limits | None" = None,
    max_upload_bytes: int = 512 * MIB,
    origins: tuple[str, ...] = (),
) -> None:
    """Run `ragblend serve` until Ctrl-C or SIGTERM; running requests may finish. Raises StoreLockedError if the home is
    in use.

    listener: the socket at `address`. on_ready: called once it accepts requests. origins: as `check_origins` returns
    them.
    """
    from ragblend.app.serve.application import build
    from ragblend.app.serve.library import UPLOAD_PATH

    limit_malloc_arenas()
    root = services.workspaces.home.root
    rules = Rules(address, UPLOAD_PATH, max_upload_bytes, origins=origins)
    with owning(services, "ragblend serve"), temporary_files_in(root / "serve"):
        application = build(services, Authenticator(rules, keys, not address.is_private), limits)

        def ready() -> None:
            services.start()
            application.service.startup.begin(services)
            on_ready()

        workspace = services.workspaces.first
        stop_watchdog = watch(lambda: workspace.queues, application.service.limits.hang_s)
        try:
            UvicornServer(application, ready, GRACE_S).run([listener])
        finally:
            stop_watchdog.set()


@contextmanager
def owning(services: AppServices, command: str) -> Iterator[None]:
    """Make this process the home's owner for the block: it may run the ingest queue, and runs forwarded commands.

    command: this process's command line, for messages in other processes. If this process cannot listen for commands,
    they run in their own processes. SIGTERM acts like Ctrl-C. Raises StoreLockedError if the home has another owner.
    """
    root = services.workspaces.home.root
    with ExitStack() as stack:
        try:
            stack.enter_context(writer_lock(root / OWNER_LOCK, command))
        except StoreLockedError:
            holder = read_holder(root / OWNER_LOCK) or {}
            raise StoreLockedError(
                f"`{holder.get('command')}` (process {holder.get('pid')}) has the home {root} open, and only one "
                "process at a time can: end that one (Ctrl-C in its terminal), or use `ragblend ask` and `chat`, "
                "which it answers."
            ) from None
        try:
            stack.enter_context(CommandListener(services))
        except OSError as error:
            log.warning(
                "commands run in their own processes: listening in the home %s failed: %s", root, error
            )
        # The command line raises the thresholds while it starts. They are restored, because a cancelled request leaves
        # a reference cycle that holds its KV. Freezing keeps the imported modules out of each collection.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        stack.enter_context(on_signal(signal.SIGTERM, _interrupt))
        yield


@contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have temporary files created in this folder, for this user only, and delete them at the end of the block."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=FOLDER_MODE)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


def _interrupt(*_: Any) -> None:
    """Handle SIGTERM: uvicorn sends it again when it has stopped, which would end the process with files open."""
    raise KeyboardInterrupt
