"""Finds the files to ingest in the paths that a user gives, and says which were left out and why."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from ragblend.app.home import absolute
from ragblend.app.library.documents import composed, printable
from ragblend.app.library.readers import FORMATS
from ragblend.app.settings import Settings
from ragblend.kvstore.errors import DocumentError, DocumentNotFoundError, UnreadableDocumentError

HOME_REASON = "it is the folder with RAGBlend's own data"


@dataclass(frozen=True)
class Discovery:
    """The result: files, in a stable order, and the given folders; failed: (path, error).

    skipped: path -> reason. These are links in folders, unsupported files, the home, and the files and whole folders
    whose name is in the setting `skip`.
    """

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    skipped: dict[Path, str]
    failed: tuple[tuple[Path, DocumentError], ...]


def discover(paths: Sequence[Path], skip: str = Settings.skip, home: Path | None = None) -> Discovery:
    """List the files at these paths and in these folders. skip: the setting; it does not apply to the paths themselves.

    home: this folder is skipped, because it holds copies of the uploads of all collections.

    Links in a folder are not followed: anybody who may write there could make us read any file of this account. A link
    that is given as a path itself is the user's own choice.
    """
    files: dict[str, Path] = {}
    folders: list[Path] = []
    skipped: dict[Path, str] = {}
    failed: list[tuple[Path, DocumentError]] = []

    def add(file: Path) -> None:
        other = files.setdefault(composed(printable(file)), file)
        if other != file:
            message = (
                f"Reading {printable(file)}: {printable(other.name)} has the same name in another Unicode form. "
                "Rename one of them."
            )
            failed.append((file, UnreadableDocumentError(message)))

    for given in paths:
        path = absolute(given)
        try:
            if is_home(path, home):
                skipped[path] = HOME_REASON
            elif path.is_dir():
                folders.append(path)
                for file in _walk_folder(path, skip, home, skipped, failed):
                    if os.path.islink(file):
                        skipped[file] = "links in folders are not followed"
                    elif not is_readable(file):
                        skipped[file] = f"{file.suffix or 'a file without a suffix'} is not supported"
                    else:
                        add(file)
            else:
                add(_check_given(path))
        except DocumentError as error:
            failed.append((path, error))
        except OSError as error:
            message = f"Reading {printable(path)}: {error.strerror}. Check its name and rights."
            failed.append((path, UnreadableDocumentError(message)))
    return Discovery(tuple(files.values()), tuple(folders), skipped, tuple(dict(failed).items()))


def is_home(folder: Path | str, home: Path | None) -> bool:
    """Whether this path leads to the home, also through a link."""
    with suppress(OSError):
        return home is not None and os.path.samefile(folder, home)
    return False


def is_gone(path: Path) -> bool:
    """Whether there is nothing at this path, or a folder; False if that cannot be known."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def is_replaced(path: Path) -> bool:
    """Whether a folder is where the file was, or a file where one of its folders was."""
    return path.is_dir() or any(parent.is_file() for parent in path.parents)


def is_readable(path: Path) -> bool:
    """Whether there is a reader for its suffix."""
    return path.suffix.lower() in FORMATS


def is_skipped(name: str, skip: str) -> bool:
    """Whether the name of a file or folder matches one of the comma-separated patterns, ignoring case."""
    patterns = (pattern.strip() for pattern in skip.casefold().split(","))
    return any(fnmatchcase(name.casefold(), pattern) for pattern in patterns)


def _check_given(path: Path) -> Path:
    name = printable(path)
    if not os.path.lexists(path):
        raise DocumentNotFoundError(f"Looking for {name}: there is no such file or folder. Check the path.")
    if not is_readable(path):
        known = ", ".join(FORMATS)
        raise UnreadableDocumentError(
            f"Reading {name}: {path.suffix or 'no suffix'} is not supported. Convert it to one of {known}."
        )
    return path


def _walk_folder(
    folder: Path,
    skip: str,
    home: Path | None,
    skipped: dict[Path, str],
    failed: list[tuple[Path, DocumentError]],
) -> Iterator[Path]:
    def note(error: OSError) -> None:
        path = Path(error.filename)
        message = f"Reading the folder {printable(path)}: {error.strerror}. Check its rights."
        failed.append((path, UnreadableDocumentError(message)))

    for parent, folders, names in os.walk(folder, onerror=note):
        left_out = {name for name in (*folders, *names) if is_skipped(name, skip)}
        skipped |= {Path(parent, name): "the setting `skip` leaves out its name" for name in sorted(left_out)}
        homes = {name for name in folders if is_home(os.path.join(parent, name), home)} - left_out
        skipped |= {Path(parent, name): HOME_REASON for name in homes}
        folders[:] = sorted(set(folders) - left_out - homes)
        links = {name for name in folders if os.path.islink(os.path.join(parent, name))}
        yield from (Path(parent, name) for name in sorted((links | set(names)) - left_out))
