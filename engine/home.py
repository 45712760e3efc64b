"""Where data lives."""

import os
from pathlib import Path

from ragblend.kvstore.errors import StoreError

HOME_VARIABLE = "RAGBLEND_HOME"


def resolve_home(home: str | Path | None) -> Path:
    """The folder given, or RAGBLEND_HOME, or the user's data folder; made if absent (0700). Raises StoreError."""
    if home is None:
        home = os.environ.get(HOME_VARIABLE) or _user_data_folder()
    folder = Path(home).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"the home folder {folder} cannot be made: {error.strerror}; pass another with --home or {HOME_VARIABLE}"
        ) from error
    return folder


def _user_data_folder() -> str:
    from platformdirs import user_data_dir

    return user_data_dir("ragblend", appauthor=False)
