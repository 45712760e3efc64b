"""Writing `settings.toml`: some values changed, comments and all else in it left as they are."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ragblend.app.settings import Settings
from ragblend.kvstore.errors import SettingsError
from ragblend.kvstore.files import replace_durably


def save_settings(path: Path, changes: Mapping[str, Any]) -> None:
    """Write these (None: take it out, so that the default holds). Raises SettingsError, before anything is written."""
    before = Settings.load(path, environment={})
    before.changed(changes)
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        replace_durably(path, with_changes(text, changes))
    except OSError as error:
        raise SettingsError(f"Writing the settings to {path}: {error.strerror}. Check the disk.") from error


def with_changes(text: str, changes: Mapping[str, Any]) -> str:
    """The file's text with a line for each changed value."""
    lines = text.splitlines()
    for key, value in changes.items():
        mine = re.compile(rf"\s*{re.escape(key)}\s*=")
        places = [number for number, line in enumerate(lines) if mine.match(line)]
        line = [] if value is None else [f"{key} = {_toml(value)}"]
        if places:
            lines[places[0] : places[0] + 1] = line
        else:
            lines += line
    return "".join(f"{line}\n" for line in lines)


def _toml(value: str | int | float) -> str:
    """A TOML value; JSON's strings and numbers are TOML's as well."""
    return json.dumps(value, ensure_ascii=False)
