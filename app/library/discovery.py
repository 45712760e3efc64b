"""Finds the files to ingest in the paths that a user gives, and says which were left out and why."""

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ragblend.app.database import storable
from ragblend.app.home import absolute
from ragblend.app.library.readers import READERS
from ragblend.kvstore.errors import DocumentError, DocumentNotFoundError, UnreadableDocumentError

# Lock files of office programs and unfinished downloads, which come and go beside documents.
TEMPORARY = ("~$*", ".~lock.*", "*.tmp", "*.part", "*.crdownload", "*.swp", "*~", "Thumbs.db", "desktop.ini")


@dataclass(frozen=True)
class Discovery:
    """files in a stable order; skipped: in a folder, but a link, temporary or of no known kind; failed: path, error."""

    files: tuple[Path, ...]
    folders: tuple[Path, ...]
    skipped: tuple[Path, ...]
    failed: tuple[tuple[Path, DocumentError], ...]


def discover(paths: Sequence[Path]) -> Discovery:
    """List the files of these paths and folders, without hidden ones.

    Links in a folder are not followed: whoever may write there could have any file of this account read. A link that
    is given as a path itself is the user's own choice.
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
                for file in _walk_folder(path, failed):
                    if is_known(file) and not os.path.islink(file):
                        files[file] = None
                    else:
                        skipped.append(file)
            else:
                files[_check_given(path)] = None
        except DocumentError as error:
            failed.append((path, error))
        except OSError as error:
            message = f"Reading {printable(path)}: {error.strerror}. Check its name and rights."
            failed.append((path, UnreadableDocumentError(message)))
    for path in [path for path in files if printable(path) != str(path)]:
        del files[path]
        message = f"Reading {printable(path)}: its name is not UTF-8. Rename the file."
        failed.append((path, UnreadableDocumentError(message)))
    return Discovery(tuple(files), tuple(folders), tuple(dict.fromkeys(skipped)), tuple(failed))


def printable(path: Path) -> str:
    """A path that can be printed and stored, whatever its bytes are."""
    return storable(str(path))


def is_gone(path: Path) -> bool:
    """Whether the file or folder does not exist; False if that cannot be known."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
    return False


def _check_given(path: Path) -> Path:
    name = Path(printable(path))
    if not os.path.lexists(path):
        raise DocumentNotFoundError(f"Looking for {name}: there is no such file or folder. Check the path.")
    if not is_known(path):
        known = ", ".join(READERS)
        raise UnreadableDocumentError(
            f"Reading {name}: {name.suffix or 'no suffix'} is not supported. Convert it to one of {known}."
        )
    return path


def is_known(path: Path) -> bool:
    """Whether there is a reader for its suffix, and its name is not one that programs give to temporary files."""
    return path.suffix.lower() in READERS and not any(fnmatch(path.name, each) for each in TEMPORARY)


def _walk_folder(folder: Path, failed: list[tuple[Path, DocumentError]]) -> Iterator[Path]:
    def note(error: OSError) -> None:
        path = Path(error.filename)
        message = f"Reading the folder {printable(path)}: {error.strerror}. Check its rights."
        failed.append((path, UnreadableDocumentError(message)))

    for parent, folders, names in os.walk(folder, onerror=note):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))
