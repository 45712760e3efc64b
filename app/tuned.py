"""The method and ratio that `ragblend tune` chose for each model, in `tuned.json` beside `settings.toml`.

Each model has a list of choices, the newest last, so that the last one can be undone.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import SettingsError
from ragblend.kvstore.files import replace_durably

FILE_NAME = "tuned.json"
MAX_CHOICES = 10  # per model


@dataclass(frozen=True)
class TunedMethod:
    """A chosen method and its ratio (None: the method takes none), the time, and the measurements behind the choice."""

    method: str
    ratio: float | None
    chosen_at: str = ""
    measured: dict[str, Any] = field(default_factory=dict)


def tuned_file(settings: Path) -> Path:
    return settings.with_name(FILE_NAME)


def choice_for(path: Path, model: str) -> TunedMethod | None:
    """The newest choice for the model. Raises SettingsError if the file cannot be read."""
    choices = _read(path).get(model)
    return choices[-1] if choices else None


def save_choice(
    path: Path, model: str, method: str, ratio: float | None, measured: dict[str, Any]
) -> TunedMethod:
    """Append a choice for the model; earlier ones are kept for `undo_choice`."""
    everything = _read(path)
    choice = TunedMethod(method, ratio, datetime.now().astimezone().isoformat(timespec="seconds"), measured)
    everything[model] = [*everything.get(model, []), choice][-MAX_CHOICES:]
    _write(path, everything)
    return choice


def undo_choice(path: Path, model: str) -> tuple[TunedMethod, TunedMethod | None] | None:
    """Remove the newest choice. Returns it and the one now in force (None: the defaults); None if there was none."""
    everything = _read(path)
    choices = everything.get(model)
    if not choices:
        return None
    undone = choices.pop()
    if not choices:
        del everything[model]
    _write(path, everything)
    return undone, choices[-1] if choices else None


def _read(path: Path) -> dict[str, list[TunedMethod]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return {
            model: [TunedMethod(**choice) for choice in choices] for model, choices in found["models"].items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SettingsError(
            f"Reading the tuned methods in {path}: {error!r}. Remove the file, then run `ragblend tune` again."
        ) from error


def _write(path: Path, everything: dict[str, list[TunedMethod]]) -> None:
    """Replace the file atomically, readable for this user only: measurements can quote the user's documents."""
    models = {model: [asdict(choice) for choice in choices] for model, choices in everything.items()}
    try:
        replace_durably(path, json.dumps({"models": models}, indent=1, ensure_ascii=False))
    except OSError as error:
        raise SettingsError(
            f"Saving the tuned methods in {path}: {error}. Check the folder's rights and space."
        ) from error
