"""One writer at a time: an exclusive lock on the home, whose file says who holds it.

Chroma's files are silently corrupted by two writing processes, so whoever changes the library takes this
lock first. The operating system lets go of it when the holder dies, however it dies: a stale file never blocks.
"""

import fcntl
import json
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ragblend.app.home import FILE_MODE
from ragblend.kvstore.errors import StoreLockedError


@dataclass(frozen=True)
class Hold:
    """One time of writing. before: the mark that the last writer left, None if it was killed; mark: what we leave."""

    before: str | None
    mark: str


@contextmanager
def writer_lock(path: Path, command: str | None = None) -> Iterator[Hold]:
    """Hold the home for writing. Raises StoreLockedError, naming the holder, if another process has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        _take(descriptor, path)
        hold = Hold(_read(path).get("mark"), secrets.token_hex(8))
        _write(descriptor, _holder(command or " ".join(sys.argv)))
        try:
            yield hold
        finally:
            # The file stays: unlinking it would let two processes hold locks on two files of one name.
            with suppress(OSError):  # a full disk: no mark is as good as that of a killed writer
                _write(descriptor, {"mark": hold.mark})
    finally:
        os.close(descriptor)


def read_holder(path: Path) -> dict[str, Any] | None:
    """Who wrote the lock file last and has not let go; None when nobody has."""
    found = _read(path)
    return found if "pid" in found else None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _take(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StoreLockedError(_held_message(path)) from error


def _holder(command: str) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": command,
        "since": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _write(descriptor: int, value: dict[str, Any]) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(value).encode(), 0)


def _held_message(path: Path) -> str:
    holder = read_holder(path)
    who = (
        f"process {holder.get('pid')} on {holder.get('host')} "
        f"(`{holder.get('command')}`, since {holder.get('since')})"
        if holder
        else "another process"
    )
    return (
        f"Writing to {path.parent}: {who} is writing there, and one home takes one writer at a time. "
        "Wait until it ends, stop it, or use another --home."
    )
