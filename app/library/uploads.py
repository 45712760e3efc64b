"""Uploaded files: the home keeps its own copy of each, under a safe file name."""

import os
import re
import shutil
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ragblend.app.home import Home
from ragblend.app.library.documents import composed, content_digest
from ragblend.kvstore.errors import LibraryError, StoreFullError, UnreadableDocumentError
from ragblend.kvstore.files import FILE_MODE, FOLDER_MODE, NO_ROOM, sync_file
from ragblend.kvstore.system import replace, sync_folder

NAME_BYTES = 200


def store_upload(home: Home, collection: str, path: Path) -> Path:
    """Copy a file into the home. The same content is not copied twice; another file of the same name gets a number.

    Not thread-safe. Raises UnreadableDocumentError, StoreFullError.
    """
    folder = home.originals / collection
    wanted, doing = folder / safe_name(path.name), f"Copying {path.name} to {folder}"
    try:
        for each in (home.originals, folder):
            each.mkdir(exist_ok=True, mode=FOLDER_MODE)
        for target in _candidate_names(wanted):
            if not target.exists():
                return _copy_durably(path, target)
            if content_digest(path) == content_digest(target):
                return target
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StoreFullError(f"{doing}: the disk is full. Free some space.") from error
        raise UnreadableDocumentError(f"{doing}: {error.strerror}. Check its permissions.") from error
    raise UnreadableDocumentError(f"{doing}: too many files have that name. Rename it.")


def delete_upload(home: Home, path: Path) -> int:
    """Delete the home's copy of an uploaded file, and nothing outside the home. Returns the bytes freed.

    Raises LibraryError.
    """
    if path.is_relative_to(home.originals):
        with _deleting(path):
            size = path.stat().st_size
            path.unlink()
            return size
    return 0


def delete_uploads(home: Home, collection: str) -> int:
    """Delete all copies of a collection's uploads. Returns the bytes freed. Raises LibraryError."""
    folder = home.originals / collection
    with _deleting(folder):
        size = sum(path.stat().st_size for path in folder.iterdir())
        shutil.rmtree(folder)
        return size
    return 0


@contextmanager
def _deleting(path: Path) -> Iterator[None]:
    """Ignore that the file to delete does not exist. Raises LibraryError for other failures."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        raise LibraryError(
            f"Deleting {path}: {error.strerror or error}. The document stays listed: check its permissions, and "
            "delete it again."
        ) from error


def _candidate_names(wanted: Path) -> Iterator[Path]:
    yield wanted
    for number in range(2, 10_000):
        yield wanted.with_name(f"{wanted.stem} ({number}){wanted.suffix}")


def safe_name(name: str) -> str:
    """A file name that every file system takes: no folders, control characters or leading dots, not too long.

    The name is in the Unicode form in which names are compared, so that its other form counts as the same name.
    """
    last = composed(re.split(r"[/\\]", name)[-1])
    shown = "".join(c for c in last if unicodedata.category(c)[0] != "C").strip().lstrip(".")
    stem, dot, suffix = shown.rpartition(".")
    stem, suffix = (stem, dot + suffix) if stem and len(suffix) < 20 else (shown, "")
    room = NAME_BYTES - len(suffix.encode())
    return (stem.encode()[:room].decode("utf-8", "ignore").strip() or "document") + suffix


def _copy_durably(path: Path, target: Path) -> Path:
    """Copy a file completely or not at all, even if the power fails."""
    partial = target.with_name(f".{target.name[:100]}.{os.getpid()}.part")
    try:
        shutil.copyfile(path, partial)
        partial.chmod(FILE_MODE)
        sync_file(partial)
        replace(partial, target)
        sync_folder(target.parent)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return target
