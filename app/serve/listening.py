"""Where the page and the server listen, and uvicorn, which says when it answers."""

import ctypes
import gc
import logging
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.types import ASGIApp

from ragblend.app.desk import Desk
from ragblend.app.serve.commands import Commands
from ragblend.app.serve.front import MIB, Address, Rules
from ragblend.app.serve.keys import Door, Keys
from ragblend.app.serve.watchdog import watch
from ragblend.kvstore.errors import StoreLockedError, UsageError
from ragblend.kvstore.files import FOLDER_MODE
from ragblend.kvstore.lock import read_holder, writer_lock

if TYPE_CHECKING:
    from ragblend.app.serve.service import Limits

log = logging.getLogger("ragblend")
LOCK = (
    "ui-page.lock"  # without it a second process would take the first one's running file for a killed one's
)
M_ARENA_MAX, HEAPS = -8, 2  # of glibc's malloc.h
GARBAGE = (700, 10, 10)  # Python's own thresholds
GRACE_S = 30  # for answers under way when the server is told to stop


class UvicornServer(uvicorn.Server):
    """Calls on_ready once it listens. grace_s: for answers under way when it is told to stop; None: till they end."""

    def __init__(self, app: ASGIApp, on_ready: Callable[[], None], grace_s: int | None = None) -> None:
        plain: dict[str, Any] = {"access_log": False, "server_header": False, "proxy_headers": False}
        config = uvicorn.Config(
            app, log_level="warning", ws="none", timeout_graceful_shutdown=grace_s, **plain
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


@contextmanager
def listening(
    host: str, port: int, names: Iterable[str] | None = None, tried: int = 1
) -> Iterator[tuple[Address, socket.socket]]:
    """A socket at that port, or the first free one of so many, or at any for 0; nobody else can take it any more.

    Raises UsageError.
    """
    family, said, ports = socket.AF_INET6 if ":" in host else socket.AF_INET, "", range(port, port + tried)
    for each in ports:
        try:
            at = socket.create_server((host, each), family=family)
        except OSError as error:
            said = error.strerror or str(error)
            continue
        with at:
            # Else what follows an answer's first part, a token of a stream too, waits 40 ms until that is acknowledged.
            # uvloop does this by itself; asyncio only where a socket names its protocol, as this one does not.
            at.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Address(host, at.getsockname()[1], tuple(names or ())), at
        return
    several = f"port {port}" if tried == 1 else f"ports {port} to {ports[-1]}"
    raise UsageError(f"Listening at {host}, {several}: {said}. Name another with --port or --host.")


def check_reach(host: str, names: Iterable[str] | None, keys: Keys) -> None:
    """Raises UsageError for what other machines may reach, themselves or by a proxy, while there is no key."""
    if not (Address(host, names=tuple(names or ())).is_private or keys.clients()):
        raise UsageError(
            f"Serving at {host}: it could be reached from other machines, so it needs a key. Make one with "
            "`ragblend keys add NAME`, or leave --host and --allow-host away."
        )


def serve(
    desk: Desk,
    address: Address,
    at: socket.socket,
    keys: Keys,
    on_ready: Callable[[], None],
    limits: "Limits | None" = None,
    max_upload_bytes: int = 512 * MIB,
) -> None:
    """Serve until Ctrl-C or SIGTERM, which lets answers under way end. Raises StoreLockedError beside the page."""
    from ragblend.app.serve.application import build
    from ragblend.app.serve.library import UPLOAD_PATH

    _few_heaps()
    root = desk.workspaces.home.root
    rules = Rules(address, UPLOAD_PATH, max_upload_bytes)
    with (
        owning(desk, "ragblend serve"),
        files_inside(root / "serve"),
    ):
        front = build(desk, Door(rules, keys, not address.is_private), limits)

        def ready() -> None:
            desk.start()
            front.service.startup.begin(desk)
            on_ready()

        workspace = desk.workspaces.first
        watched = watch(lambda: workspace.queues, front.service.limits.hang_s)
        try:
            UvicornServer(front, ready, GRACE_S).run([at])
        finally:
            watched.set()


@contextmanager
def owning(desk: Desk, command: str) -> Iterator[None]:
    """Be the one process that has the home open: it works on the queue, and runs this user's commands for the home.

    Where it cannot listen for commands they run beside it. SIGTERM ends it as Ctrl-C does. Raises StoreLockedError
    where another one has the home.
    """
    root = desk.workspaces.home.root
    with ExitStack() as held:
        try:
            held.enter_context(writer_lock(root / LOCK, command))
        except StoreLockedError:
            holder = read_holder(root / LOCK) or {}
            raise StoreLockedError(
                f"`{holder.get('command')}` (process {holder.get('pid')}) has the home {root} open, and one process at "
                "a time can: end that one (Ctrl-C in its terminal), or go on in a terminal, where `ragblend ask` and "
                "`chat` are answered by it."
            ) from None
        try:
            held.enter_context(Commands(desk))
        except OSError as error:
            log.warning("commands will open the home %s themselves: listening there: %s", root, error)
        _look_for_garbage()
        held.enter_context(_ended_by_term())
        yield


def _look_for_garbage() -> None:
    """As often as Python does by itself, which a command puts off for its start: a request that was left is garbage in
    a cycle, with its context's KV. What is imported is not looked through.
    """
    gc.freeze()
    gc.set_threshold(*GARBAGE)


def _few_heaps() -> None:
    """Have glibc share heaps between threads: one for each of dozens grows to the most that any of them ever took."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


@contextmanager
def files_inside(folder: Path) -> Iterator[None]:
    """What is uploaded lies here while it comes, for this user only, and nothing of it stays."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=FOLDER_MODE)
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ended_by_term() -> Iterator[None]:
    """uvicorn hands on the signal that ended it, and SIGTERM would end the process before its files are closed."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
