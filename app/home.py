"""The home folder of one user: its layout and permissions.

KV files can be inverted to the text they were made from, so the home is as secret as the documents.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from ragblend.engine.config import SETTINGS_NAME, default_home
from ragblend.kvstore.errors import LibraryError
from ragblend.kvstore.files import FILE_MODE, FOLDER_MODE
from ragblend.kvstore.system import HAS_MODES


def absolute(path: Path | str) -> Path:
    """The absolute path, with ".." and "~" resolved but not links; "~$report.docx" is a file, not a user's home."""
    return Path(os.path.abspath(os.path.expanduser(path)))


class Home:
    """The paths inside one home folder; nothing is created until `create` is called.

    originals: copies of uploaded files; models_suggested: exists once the user was told which models
    fit this machine.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kv, self.chroma, self.models = root / "kv", root / "chroma", root / "models"
        self.profiles, self.originals = root / "profiles", root / "originals"
        self.library, self.nodes = root / "library.sqlite", root / "nodes.sqlite"
        self.chats, self.jobs = root / "chats.sqlite", root / "jobs.sqlite"
        self.settings = root / SETTINGS_NAME
        self.lock, self.encoder_lock = root / "writer.lock", root / "encoder.lock"
        self.undo_lock = root / "undo.lock"
        self.models_suggested = root / ".models-named"

    @classmethod
    def resolve(cls, home: Path | str | None = None) -> "Home":
        """The given home, else `RAGBLEND_HOME`, else the user's data folder."""
        return cls(absolute(home or default_home()))

    def create(self) -> "Home":
        """Create the folder for this user only. Raises LibraryError if it cannot be created or written."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=FOLDER_MODE)
            if HAS_MODES and stat.S_IMODE(self.root.stat().st_mode) & 0o077:
                self.root.chmod(FOLDER_MODE)
        except OSError as error:
            raise LibraryError(_cannot_use(self.root, error)) from error
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise LibraryError(_cannot_use(self.root, "it is not writable"))
        return self

    def paths_open_to_others(self) -> list[Path]:
        """Files and folders that other users may read or enter; models are left out, because they are public."""
        if not self.root.exists():
            return []
        inside = (path for path in sorted(self.root.rglob("*")) if not path.is_relative_to(self.models))
        return [path for path in (self.root, *inside) if _is_open_to_others(path)]


def make_private(folder: Path) -> None:
    """Remove other users' rights from a folder and its contents, for libraries that do not let us choose a mode."""
    for path in (folder, *folder.rglob("*")):
        if _is_open_to_others(path):
            with suppress(FileNotFoundError):  # a journal of SQLite that was deleted meanwhile
                path.chmod(FOLDER_MODE if path.is_dir() else FILE_MODE)


def _is_open_to_others(path: Path) -> bool:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:  # a temporary file that was deleted meanwhile
        return False
    return HAS_MODES and not stat.S_ISLNK(mode) and bool(stat.S_IMODE(mode) & 0o077)


def _cannot_use(root: Path, reason: object) -> str:
    return (
        f"Opening the home folder {root}: {reason}. "
        "Give a folder that you may write to with --home or RAGBLEND_HOME."
    )
