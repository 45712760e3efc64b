"""Where data lives."""

import os
from pathlib import Path

from ragblend.kvstore.errors import StoreError

HOME_VARIABLE = "RAGBLEND_HOME"


def resolve_home(home: str | Path | None) -> Path:
    """The folder given, or RAGBLEND_HOME, or the user's data folder; made if absent (0700). Raises StoreError."""
    folder = Path(default_home() if home is None else home).expanduser().resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreError(
            f"the home folder {folder} cannot be made: {error.strerror}; pass another with --home or {HOME_VARIABLE}"
        ) from error
    return folder


def default_home() -> str:
    """RAGBLEND_HOME, or else the user's data folder."""
    from platformdirs import user_data_dir

    return os.environ.get(HOME_VARIABLE) or user_data_dir("ragblend", appauthor=False)
