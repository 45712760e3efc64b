"""Results on the disk: one JSON file, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import UsageError


def make_folder(folder: Path) -> Path:
    """The output folder, made if needed and found writable before any work. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output: the folder {folder} cannot be made ({error.strerror}); name another"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"--output: the folder {folder} is not writable; name another")
    return folder


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by `value` as JSON; whoever reads it meanwhile sees the old file or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
