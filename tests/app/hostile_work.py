"""What the parser of a hostile file may do, run in the sandbox by its tests."""

import os
import signal
import time
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


def spin(path, started, on_page):
    """Never to be asked; says which process it is."""
    Path(started).write_text(str(os.getpid()))
    while True:
        pass


def process_id(path, on_page):
    return os.getpid()


def grow(path, on_page):
    """As a parser that keeps what it has read."""
    kept.append(b"x" * (800 * 2**20))
    return os.getpid()


kept = []
