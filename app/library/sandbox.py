"""Parses untrusted files in a limited subprocess: no parser can crash or block the caller, or use its files.

The process is a new interpreter: not a fork of the caller, which has torch and its threads, and not multiprocessing's,
which runs the caller's main script again. The process forks for each file, so that what a file does to its parser ends
with that file; where it cannot fork (on Windows), it ends after one file. On Linux the fork may read its file and the
installed programs, and nothing else: it may not write, connect, or start a program. A fork that takes too much memory
or time is killed; if the caller ends, all processes end.
"""

import atexit
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from ragblend.app import system
from ragblend.app.linux import restrict_process
from ragblend.app.progress import silent
from ragblend.kvstore.errors import DocumentError, OversizedDocumentError, UnreadableDocumentError

MIB = 1024**2
MEMORY_BYTES = 1024 * MIB  # what a call may allocate beyond the process's own memory: enforced on Linux
PAGE_TIMEOUT_S = 300.0  # how long a call may take without finishing a page
POLL_S = 0.2  # between two calls of the caller's on_page, which may cancel the work
IDLE_S = 60.0  # how long an idle process waits for the next file
MEMORY_EXIT = 76  # the exit code of a process that is out of memory
MAX_REPLY_BYTES = 512 * MIB
PROGRESS_START = b'{"page"'  # the beginning of a progress message; any other message is the reply
# Read by parsers besides their file, their code and Python's: shared libraries, media types, facts about the processor.
READABLE_PATHS = (
    "/usr", "/lib", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/localtime", "/etc/mime.types", "/proc/self",
    "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system", "/dev/urandom",
)  # fmt: skip
ERRORS = {error.__name__: error for error in DocumentError.__subclasses__()}
OnPage = Callable[[int, int], None]


def run_in_sandbox(
    work: Callable[..., Any],
    path: Path,
    *arguments: Any,
    on_page: OnPage = silent,
    imports: Sequence[str] = (),
    readable: Sequence[str] = (),
    memory_bytes: int = MEMORY_BYTES,
    page_timeout_s: float = PAGE_TIMEOUT_S,
) -> Any:
    """Run work(path, *arguments, on_page), a module's function, in another process and return its result, a JSON value.

    Nothing from that process is unpickled: a file that has taken over its parser must not reach this process.
    on_page(done, total) is called here several times a second ((0, 0): not known yet); if it raises, the work is
    cancelled. imports: modules that the work needs, imported once for all files; readable: more files that it may read;
    page_timeout_s: how long it may take without finishing a page. Raises the work's DocumentError,
    OversizedDocumentError if a limit is exceeded, and UnreadableDocumentError for any other failure, a crash included.
    """
    reply, name = None, (work.__module__, work.__qualname__)
    request = _Request(*name, str(path), arguments, imports, readable, memory_bytes)
    while reply is None:
        with _idle_lock:
            process = _idle.pop() if _idle else _Process()
        reply = process.reply(request, on_page, page_timeout_s)
    if (code := reply.get("exit")) is not None:
        raise _crash_error(request, code)
    if (error := reply.get("error")) is not None:
        raise ERRORS.get(error, UnreadableDocumentError)(str(reply["message"]))
    return reply["result"]


class _Request(NamedTuple):
    module: str
    function: str
    path: str
    arguments: Sequence[Any]
    imports: Sequence[str]
    readable: Sequence[str]
    memory_bytes: int


class _Process:
    def __init__(self) -> None:
        self._has_served = False
        self._process, self._connection = system.start_python(
            "from ragblend.app.library.sandbox import serve_requests; serve_requests()",
            {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        )

    def reply(self, request: _Request, on_page: OnPage, page_timeout_s: float) -> Any:
        """The reply: `result`, or `error` and `message`, or `exit`, the code of a crash.

        None if a new process should be used instead: a process that has served before may have ended while it was idle.
        """
        served, self._has_served = self._has_served, True
        try:
            self._connection.send_bytes(json.dumps(request._asdict()).encode())
            reply = self._wait_for_reply(request, on_page, page_timeout_s)
        except (EOFError, ConnectionError):
            self.end()
            if served:
                return None
            raise _crash_error(request, self._process.returncode) from None
        except BaseException:  # the caller cancels
            self.end()
            raise
        with _idle_lock:
            is_kept = system.CAN_FORK and not _idle
            _idle.extend([self] * is_kept)
        if not is_kept:
            self.end()
        return reply

    def _wait_for_reply(self, request: _Request, on_page: OnPage, page_timeout_s: float) -> Any:
        page, last_message_at, parser, limit = (0, 0), time.monotonic(), None, 0
        while True:
            if self._connection.poll(POLL_S):
                reply = json.loads(self._connection.recv_bytes(MAX_REPLY_BYTES))
                if "page" not in reply:
                    return reply
                page, last_message_at = (int(reply["page"][0]), int(reply["page"][1])), time.monotonic()
                if "process" in reply:
                    parser = int(reply["process"])
                    limit = _resident_bytes(parser) + request.memory_bytes
            elif time.monotonic() - last_message_at > page_timeout_s:
                where = f"page {page[0] + 1} of {page[1]}" if page[1] else "it"
                raise _limit_error(request, f"{where} took more than {page_timeout_s:.0f} seconds")
            if parser is not None and _resident_bytes(parser) > limit:
                raise _crash_error(request, MEMORY_EXIT)
            on_page(*page)

    def end(self) -> None:
        """Kill the process, unless it has exited."""
        self._connection.close()
        try:
            self._process.wait(POLL_S)  # keeps the exit code of a process that has exited or crashed
        except subprocess.TimeoutExpired:
            system.end_process_group(self._process.pid)
            self._process.wait()


_idle: list[_Process] = []
_idle_lock = threading.Lock()


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().end()


if system.CAN_FORK:
    os.register_at_fork(after_in_child=_idle.clear)  # the processes belong to the parent


def _crash_error(request: _Request, code: int) -> DocumentError:
    if code in {MEMORY_EXIT, -signal.SIGABRT}:
        needs = f"it needs more than {request.memory_bytes // MIB} MiB of memory"
        # pdfium aborts without memory, and the process cannot say why.
        return _limit_error(request, needs if code == MEMORY_EXIT else f"the parser aborted: maybe {needs}")
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return UnreadableDocumentError(
        f"Reading {request.path}: the parser crashed ({how}). Open it in its own program and save it again."
    )


def _limit_error(request: _Request, what: str) -> DocumentError:
    advice = "Split it into parts, or save it as plain text."
    return OversizedDocumentError(f"Reading {request.path}: {what}, the limit. {advice}")


# --- in the subprocess


def serve_requests() -> None:
    """Answer requests, one after the other, until none comes for a while; only one if this process cannot fork."""
    system.disable_core_dumps()
    warnings.simplefilter("ignore")  # parsers warn of oddities in files; real errors are raised
    logging.disable()
    _code_folders()  # once, for all forks
    with suppress(EOFError, OSError), system.parent_connection() as connection:  # the caller has ended
        while connection.poll(IDLE_S):
            request = _Request(**json.loads(connection.recv_bytes()))
            for module in (request.module, *request.imports):
                import_module(module)
            if not system.CAN_FORK:
                _send(connection, {"page": (0, 0), "process": os.getpid()})
                threading.Thread(target=_end_with_caller, args=(connection,), daemon=True).start()
                _work_in_fork(request, connection, ())
                return
            _serve_by_fork(connection, request)


def _end_with_caller(connection: Connection) -> None:
    with suppress(OSError):
        connection.poll(None)  # the only event during the work is that the caller ends
    os._exit(0)


def _serve_by_fork(connection: Connection, request: _Request) -> None:
    """Have a fork do the work, and pass on its messages without parsing them: the file may control the fork."""
    ours, theirs = Pipe(duplex=False)
    with ours:
        parser = system.fork(partial(_work_in_fork, request, theirs, (connection, ours)))
        theirs.close()
        message = json.dumps({"page": (0, 0), "process": parser}).encode()
        while message.startswith(PROGRESS_START):
            connection.send_bytes(message)
            if connection in wait([connection, ours]):  # the caller has ended
                system.end_process_group(os.getpid())
            try:
                message = ours.recv_bytes(MAX_REPLY_BYTES)
            except EOFError:
                message = b""
        code = system.reap(parser)
    connection.send_bytes(message or json.dumps({"exit": code}).encode())


# --- in its fork


def _work_in_fork(request: _Request, connection: Connection, others: Sequence[Connection]) -> None:
    for other in others:
        other.close()
    try:
        # Stops allocations that are faster than the caller's checks. Twice the limit, because Python that reaches it in
        # small steps may lose its own errors and hang.
        system.limit_allocations(2 * request.memory_bytes)
        restrict_process([request.path, *request.readable, *READABLE_PATHS, *_code_folders()], [os.devnull])
        _send(connection, _answer(connection, request))
    except MemoryError:
        os._exit(MEMORY_EXIT)  # there may be no memory for a message


@cache
def _code_folders() -> list[str]:
    """Where Python and its packages are; not the script's folder, nor folders that contain the user's home."""
    folders = {each for each in sys.path if next(Path(each).glob("*.dist-info"), None) is not None}
    folders |= {sys.prefix, sys.base_prefix, str(Path(__file__).resolve().parents[2])}
    return [folder for folder in folders if not Path.home().is_relative_to(os.path.realpath(folder))]


def _send(connection: Connection, reply: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(reply).encode())


def unneeded_rights(_path: Path, other: str, _: OnPage) -> list[str]:
    """In the sandbox: what a parser could do, although it need not. other: a file that is not its document."""
    left = []
    with suppress(PermissionError), open(other, "rb"):
        left.append("read and change your files")
    with suppress(PermissionError), socket.socket():
        left.append("use the network")
    if not system.CAN_LIMIT:
        left.append("exceed its memory for a moment")
    return left


def _answer(connection: Connection, request: _Request) -> dict[str, Any]:
    def on_page(done: int, total: int) -> None:
        _send(connection, {"page": (done, total)})

    path = Path(request.path)
    try:
        work = getattr(import_module(request.module), request.function)
        return {"result": work(path, *request.arguments, on_page)}
    except DocumentError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except MemoryError:
        raise
    except Exception as error:  # parsers of hostile formats raise anything
        message = (
            f"Reading {path}: it cannot be read as {path.suffix.lower()} ({type(error).__name__}: {error}). "
            "Open it in its own program and save it again."
        )
        return {"error": UnreadableDocumentError.__name__, "message": message}


def _resident_bytes(process_id: int) -> int:
    """The resident memory of a process; 0 if it has ended."""
    try:
        return int(psutil.Process(process_id).memory_info().rss)
    except psutil.Error:
        return 0
