"""Files that came through the page: the home keeps a copy of its own, under a name that is one."""

import os
import re
import shutil
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from ragblend.app.documents import content_digest
from ragblend.app.home import Home
from ragblend.kvstore.errors import StoreFullError, UnreadableDocumentError
from ragblend.kvstore.files import FILE_MODE, FOLDER_MODE, NO_ROOM

NAME_BYTES = 200
_KEEPING = threading.Lock()  # a home's uploads are one process's


def keep_upload(home: Home, collection: str, path: Path) -> Path:
    """Copy a file into the home; the same file twice is one copy, another one of that name gets a number.

    Raises UnreadableDocumentError, StoreFullError.
    """
    folder = home.originals / collection
    wanted, doing = folder / safe_name(path.name), f"Keeping {path.name} in {folder}"
    try:
        for each in (home.originals, folder):
            each.mkdir(exist_ok=True, mode=FOLDER_MODE)
        with _KEEPING:  # of two of one name the second must see the first
            for target in _names_like(wanted):
                if not target.exists():
                    return _copied(path, target)
                if content_digest(path) == content_digest(target):
                    return target
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFullError(f"{doing}: the disk is full. Free some space.") from error
        raise UnreadableDocumentError(f"{doing}: {error.strerror}. Check its rights.") from error
    raise UnreadableDocumentError(f"{doing}: too many files have that name. Rename it.")


def _names_like(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in range(2, 10_000):
        yield wanted.with_name(f"{wanted.stem} ({number}){wanted.suffix}")


def safe_name(name: str) -> str:
    """A file name without folders, control characters and leading dots, that every file system takes."""
    last = re.split(r"[/\\]", name)[-1]
    shown = "".join(c for c in last if unicodedata.category(c)[0] != "C").strip().lstrip(".")
    stem, dot, suffix = shown.rpartition(".")
    stem, suffix = (stem, dot + suffix) if stem and len(suffix) < 20 else (shown, "")
    room = NAME_BYTES - len(suffix.encode())
    return (stem.encode()[:room].decode("utf-8", "ignore").strip() or "document") + suffix


def _copied(path: Path, target: Path) -> Path:
    """Whole or not at all: a name that is there has its content."""
    partial = target.with_name(f".{target.name[:100]}.{os.getpid()}.part")
    try:
        shutil.copyfile(path, partial)
        partial.chmod(FILE_MODE)
        os.replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target
