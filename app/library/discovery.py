"""Paths that a user gives -> the files to ingest, and what was left out and why."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ragblend.app.database import storable
from ragblend.app.home import absolute
from ragblend.app.library.readers import READERS
from ragblend.kvstore.errors import DocumentError, DocumentNotFoundError, UnreadableDocumentError


@dataclass(frozen=True)
class Discovery:
    """files in a stable order; skipped: in a folder, but a link or of no known kind; failed: the path and its error."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    skipped: tuple[Path, ...]
    failed: tuple[tuple[Path, DocumentError], ...]


def discover(paths: Sequence[Path]) -> Discovery:
    """Walk folders, not into hidden ones, and take files as they are.

    A link in a folder is not followed, for whoever may write there could have any file of this account read; what it
    means inside the folder is found there. A link that is given as a path itself is the user's own word.
    """
    files: dict[Path, None] = {}
    folders: list[Path] = []
    skipped: list[Path] = []
    failed: list[tuple[Path, DocumentError]] = []
    for given in paths:
        path = absolute(given)
        try:
            if path.is_dir():
                folders.append(path)
                for file in _walk(path, failed):
                    if is_known(file) and not os.path.islink(file):
                        files[file] = None
                    else:
                        skipped.append(file)
            else:
                files[_checked(path)] = None
        except DocumentError as error:
            failed.append((path, error))
        except OSError as error:
            message = f"Reading {shown(path)}: {error.strerror}. Check its name and rights."
            failed.append((path, UnreadableDocumentError(message)))
    for path in [path for path in files if shown(path) != str(path)]:
        del files[path]
        message = f"Reading {shown(path)}: its name is not UTF-8. Rename the file."
        failed.append((path, UnreadableDocumentError(message)))
    return Discovery(tuple(files), tuple(folders), tuple(dict.fromkeys(skipped)), tuple(failed))


def shown(path: Path) -> str:
    """A name that can be printed and kept, whatever its bytes are."""
    return storable(str(path))


def is_gone(path: Path) -> bool:
    """Whether there is no such file or folder; what may not be looked at is not gone."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    return False


def _checked(path: Path) -> Path:
    name = Path(shown(path))
    if not os.path.lexists(path):
        raise DocumentNotFoundError(f"Looking for {name}: there is no such file or folder. Check the path.")
    if not is_known(path):
        known = ", ".join(READERS)
        raise UnreadableDocumentError(
            f"Reading {name}: {name.suffix or 'no suffix'} is not supported. Convert it to one of {known}."
        )
    return path


def is_known(path: Path) -> bool:
    """Whether its suffix is one that is read."""
    return path.suffix.lower() in READERS


def _walk(folder: Path, failed: list[tuple[Path, DocumentError]]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        path = Path(error.filename)
        message = f"Reading the folder {shown(path)}: {error.strerror}. Check its rights."
        failed.append((path, UnreadableDocumentError(message)))

    for parent, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))
