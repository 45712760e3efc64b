"""What `ragblend tune` chose for each model: `tuned.json` beside `settings.toml`, which only people write.

A model's choices are a list, the newest last, so that the last one can be taken back.
"""

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import SettingsError
from ragblend.kvstore.files import replace_durably

FILE_NAME = "tuned.json"
KEPT = 10  # choices a model


@dataclass(frozen=True)
class TunedMethod:
    """A method and its ratio (None: it takes none), when it was chosen, and what was measured for it."""

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
    """Make this the model's choice; the earlier ones stay behind it."""
    everything = _read(path)
    choice = TunedMethod(method, ratio, datetime.now().astimezone().isoformat(timespec="seconds"), measured)
    everything[model] = [*everything.get(model, []), choice][-KEPT:]
    _write(path, everything)
    return choice


def undo_choice(path: Path, model: str) -> tuple[TunedMethod, TunedMethod | None] | None:
    """Take the newest choice back: that one, and the one that now stands (None: the defaults). None: there was none."""
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
            f"Reading what was tuned in {path}: {error!r}. Remove the file, then `ragblend tune` again."
        ) from error


def _write(path: Path, everything: dict[str, list[TunedMethod]]) -> None:
    """Whole or not at all, for this user only: the measurements speak of the user's documents."""
    models = {model: [asdict(choice) for choice in choices] for model, choices in everything.items()}
    try:
        replace_durably(path, json.dumps({"models": models}, indent=1, ensure_ascii=False))
    except OSError as error:
        raise SettingsError(
            f"Saving what was tuned in {path}: {error}. Check the folder's rights and space."
        ) from error
