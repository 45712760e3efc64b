"""What the parser of a hostile file may do, run in the sandbox by its tests."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path


def crash(path, on_page):
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(path, on_page):
    raise SystemExit


def hang(path, on_page):
    on_page(2, 7)
    time.sleep(3600)


def swallow(path, on_page):
    held = []
    while True:
        held.append(bytes(8 * 2**20))


def spin(path, on_page):
    """Never to be asked; says which process it is."""
    on_page(os.getpid(), 0)
    while True:
        pass


def process_id(path, on_page):
    return os.getpid()


def parent_id(path, on_page):
    return os.getppid()


def modules(path, on_page):
    return [name for name in ("sunau", "colorsys") if name in sys.modules]


def attempts(path, other, on_page):
    """What is tried with the rights of a parser: what succeeded, and the name of the error of what did not.

    path: the document; other: a file that is not.
    """
    tried = {
        "read the document": path.read_bytes,
        "write to the document": lambda: os.open(path, os.O_WRONLY),
        "read another file": Path(other).read_bytes,
        "write to another file": lambda: os.open(other, os.O_WRONLY),
        "list another folder": lambda: os.listdir(Path(other).parent),
        "make a file": lambda: Path(f"{other}.new").write_text("x"),
        "make a folder": lambda: Path(f"{other}.d").mkdir(),
        "delete a file": Path(other).unlink,
        "rename a file": lambda: Path(other).rename(f"{other}.old"),
        "change a file's mode": lambda: Path(other).chmod(0o777),
        "link to a file": lambda: os.link(other, f"{other}.link"),
        "make a fifo": lambda: os.mkfifo(f"{other}.fifo"),
        "read another process's environment": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
        "signal another process": lambda: os.kill(os.getppid(), 0),
        "use TCP": socket.socket,
        "use UDP": lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM),
        "use a local socket": lambda: socket.socket(socket.AF_UNIX),
        "fork": lambda: os.fork() or os._exit(0),
        "start a program": lambda: subprocess.run([sys.executable, "--version"]),
        "become a program": lambda: os.execv(sys.executable, [sys.executable, "--version"]),
        "discard what is written": lambda: Path(os.devnull).write_text("x"),
        "start a thread": threading.Thread(target=list).start,
        "import a package": lambda: import_module("pypdf"),
        "import more of Python": lambda: import_module("sunau"),
    }
    return {what: _outcome(attempt) for what, attempt in tried.items()}


def _outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"
