"""Models to choose from: those on this disk, a list of suggestions from the hub, and downloads."""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ragblend.engine.model.checkpoints import DEFAULT, find_model
from ragblend.engine.model.hub import cached_models, download, is_causal_lm, is_hub_id, local_copy
from ragblend.kvstore.errors import DownloadStoppedError, ModelError, SettingsError, did_you_mean


@dataclass(frozen=True)
class LocalModel:
    """A model on this disk. name: for `--model`; kind: offline demo, hub, .gguf or converted; bytes: of its files."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Suggestion:
    """A model of the hub that is free to use, needs no login, and can answer without reasoning first. Approximate.

    download_bytes: of its bfloat16 safetensors; kv_bytes: of one token, in bfloat16; window: in tokens.
    """

    name: str
    parameters: float
    download_bytes: float
    window: int
    licence: str
    kv_bytes: int


# Smallest first. From the models' pages; Qwen2.5-3B is left out for its licence. Qwen3 and SmolLM3 are asked not to
# reason first (`enable_thinking`).
SUGGESTIONS = (
    Suggestion("HuggingFaceTB/SmolLM2-360M-Instruct", 0.36e9, 0.72e9, 8_192, "Apache-2.0", 40_960),
    Suggestion("Qwen/Qwen2.5-0.5B-Instruct", 0.49e9, 0.99e9, 32_768, "Apache-2.0", 12_288),
    Suggestion("Qwen/Qwen2.5-1.5B-Instruct", 1.54e9, 3.09e9, 32_768, "Apache-2.0", 28_672),
    Suggestion("Qwen/Qwen3-1.7B", 2.03e9, 4.06e9, 40_960, "Apache-2.0", 114_688),
    Suggestion("HuggingFaceTB/SmolLM3-3B", 3.08e9, 6.15e9, 65_536, "Apache-2.0", 73_728),
    Suggestion("ibm-granite/granite-4.0-micro", 3.4e9, 6.81e9, 131_072, "Apache-2.0", 81_920),
    Suggestion("microsoft/Phi-4-mini-instruct", 3.84e9, 7.67e9, 131_072, "MIT", 131_072),
    Suggestion("Qwen/Qwen3-4B-Instruct-2507", 4.02e9, 8.04e9, 262_144, "Apache-2.0", 147_456),
    Suggestion("Qwen/Qwen2.5-7B-Instruct", 7.62e9, 15.2e9, 32_768, "Apache-2.0", 57_344),
)
SUGGESTED_NAMES = [one.name for one in SUGGESTIONS]
# Never suggested: the hub gives them only to an account that has accepted the licence.
GATED = {
    "google/gemma-3-1b-it": "Gemma licence",
    "meta-llama/Llama-3.2-1B-Instruct": "Llama licence",
    "meta-llama/Llama-3.2-3B-Instruct": "Llama licence",
}
# The bundled model's name for users: nobody should judge RAGBlend by its answers.
OFFLINE_DEMO = "offline demo"


def local_models(models: Path, *folders: Path) -> list[LocalModel]:
    """The bundled model, those in the hub's cache, .gguf files in all these folders, and converted ones in `models`."""
    bundled = []
    with suppress(ModelError):  # it may not be installed
        bundled.append(find_model(DEFAULT))
    found = [LocalModel(DEFAULT, OFFLINE_DEMO, path.stat().st_size) for path in bundled]
    found += [LocalModel(name, "hub", size) for name, size in cached_models()]
    for folder in (models, *folders):
        files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
        found += [LocalModel(str(file), ".gguf", file.stat().st_size) for file in files]
    return [*found, *_converted(models, bundled)]


def _converted(models: Path, bundled: Sequence[Path]) -> Iterator[LocalModel]:
    """Models that were converted from a .gguf, except for the bundled one, which is listed as bundled."""
    for config in sorted(models.glob("*/config.json")):
        folder = config.parent
        if is_causal_lm(folder) and not any(folder.name.startswith(f"{path.stem}-") for path in bundled):
            weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            yield LocalModel(str(folder), "converted", weights)


def full_name(name: str, here: Sequence[LocalModel]) -> str:
    """The full name for a name that may be only the last part of a known one."""
    known = [*(one.name for one in here), *SUGGESTED_NAMES]
    matching = {one for one in known if one.rpartition("/")[2] == name}
    return name if name in known or len(matching) != 1 else matching.pop()


def check_model(name: str, models: Path) -> None:
    """Raise SettingsError for a path that does not exist, naming the nearest known model. Hub ids are not looked up."""
    if name == DEFAULT or is_hub_id(name) or os.path.exists(os.path.expanduser(name)):
        return
    known = list(dict.fromkeys([DEFAULT, *(one.name for one in local_models(models)), *SUGGESTED_NAMES]))
    raise SettingsError(
        f"There is no model {name!r}. Name a folder or .gguf file that exists, a hub id (owner/name), or one of "
        f"{', '.join(known)}{did_you_mean(name, known)}"
    )


def needs_download(model: str) -> bool:
    """Whether a model is a hub id without a complete local copy."""
    return model != DEFAULT and is_hub_id(model) and local_copy(model) is None


class ModelDownload:
    """A download in the background, started at once. done, total: bytes, 0 until the hub has answered."""

    def __init__(self, name: str) -> None:
        self.name, self.done, self.total = name, 0, 0
        self._started = time.monotonic()
        self._stop, self._ended = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="model download", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait for the end, at most this long; returns whether it has ended.

        Raises the download's error: ModelNotFoundError or DownloadStoppedError. After `stop` this returns at once; the
        thread itself ends with its next bytes, or the network's time limit.
        """
        if not self._ended.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def stop(self) -> None:
        """Stop the download; the received part is kept for the next one."""
        self._stop.set()
        if not self._ended.is_set():
            self._error = DownloadStoppedError(
                f"The download of {self.name} was stopped; what has arrived is kept for the next time."
            )
            self._ended.set()

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the speed so far; None before there is one."""
        passed = time.monotonic() - self._started
        return (self.total - self.done) * passed / self.done if self.done else None

    def _run(self) -> None:
        def progress(done: int, total: int) -> None:
            self.done, self.total = done, total

        try:
            download(self.name, progress, self._stop)
        except Exception as error:  # any error, because an incomplete model must not look complete
            self._error = self._error or error
        finally:
            self._ended.set()
