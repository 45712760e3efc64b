"""Models of the Hugging Face hub: cached copies and downloads, the engine's only use of the network."""

import json
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ragblend.kvstore.errors import DownloadStoppedError, ModelNotFoundError

FILE_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
_INDEX = "model.safetensors.index.json"
Progress = Callable[[int, int], None]


def is_hub_id(name: str) -> bool:
    """Whether a model's name has the form owner/name, and is no path on this disk."""
    path = Path(os.path.expanduser(name))
    local = (
        os.path.exists(path) or path.is_absolute() or name.startswith(".") or path.suffix.lower() == ".gguf"
    )
    return not local and name.count("/") == 1 and all(name.split("/"))


def local_copy(name: str) -> Path | None:
    """The folder of a model that was downloaded completely, or None; does not use the network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, allow_patterns=FILE_PATTERNS, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None
    return folder if _is_complete(folder) else None


def cached_models() -> list[tuple[str, int]]:
    """Names and bytes of the completely downloaded text models; does not use the network."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = sorted(scan_cache_dir().repos, key=lambda repository: repository.repo_id)
    except (CacheNotFound, ValueError, OSError):
        return []
    models = [(one.repo_id, one.size_on_disk) for one in repositories if one.repo_type == "model"]
    return [(name, size) for name, size in models if (folder := local_copy(name)) and is_causal_lm(folder)]


def is_causal_lm(folder: Path) -> bool:
    """Whether the config in that folder names a causal language model, as those of embedders do not."""
    try:
        named = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    except (OSError, ValueError, AttributeError):
        return False
    return any("ForCausalLM" in str(name) for name in named)


def download(name: str, progress: Progress | None = None, stop: threading.Event | None = None) -> Path:
    """Download a model, resuming an earlier attempt; returns its folder.

    progress(done, total) in bytes, from several threads; without it the hub's library draws bars on stderr. Raises
    ModelNotFoundError, or DownloadStoppedError once `stop` is set.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    fetch = partial(snapshot_download, name, allow_patterns=FILE_PATTERNS)
    try:
        if progress is None:
            return Path(fetch())
        stop = stop or threading.Event()
        files: Any = fetch(dry_run=True, tqdm_class=_bar_class(0, lambda done, total: None, stop))
        missing = sum(file.file_size for file in files if file.will_download)
        return Path(fetch(tqdm_class=_bar_class(missing, progress, stop)))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is no hub id (owner/name): {error}") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"the model {name!r} could not be downloaded from the hub ({type(error).__name__}: {error}); check the "
            "name and the network, or pass a local folder"
        ) from error


def _bar_class(missing_bytes: int, progress: Progress, stop: threading.Event) -> type[Any]:
    """A progress bar class for the hub's library that draws nothing, reports bytes, and can be stopped."""
    from huggingface_hub.utils.tqdm import tqdm

    most, lock = 0, threading.Lock()

    class Reporting(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            if stop.is_set():
                raise DownloadStoppedError(
                    "the download was stopped; what was downloaded is kept for the next one"
                )
            self.n += n or 0
            if self._counts_bytes:
                with lock:  # bytes are counted twice, when they arrive and when files are assembled
                    most = max(most, min(int(self.n), missing_bytes))
                    progress(most, missing_bytes)
            return None

    return Reporting


def _is_complete(folder: Path) -> bool:
    """Whether all weight files that its index names exist: a download may have been interrupted."""
    if not (folder / "config.json").is_file():
        return False
    try:
        named = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except FileNotFoundError:
        return any(folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, AttributeError):
        return False
    return all((folder / str(part)).is_file() for part in named)
