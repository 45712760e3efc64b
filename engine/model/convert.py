"""Converts GGUF files to safetensors once: transformers unpacks GGUF in 15 to 60 s, and loads safetensors in one."""

import logging
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ragblend.engine.model.checkpoints import file_digest
from ragblend.kvstore.chunks import DTYPES
from ragblend.kvstore.errors import CorruptModelError, StoreFullError
from ragblend.kvstore.files import make_private_folder, sync_file
from ragblend.kvstore.system import replace, sync_folder

# Raised by transformers' readers; NotImplementedError is a RuntimeError, KeyError and IndexError are LookupErrors.
CONVERSION_ERRORS = (ValueError, LookupError, RuntimeError, TypeError, EOFError, struct.error)
_TOKENIZER = "tokenizer_config.json"
DRAFT_PREFIX = ".converting-"  # of folders that are not complete yet
ABANDONED_AFTER_S = 24 * 3600
log = logging.getLogger("ragblend")


def convert_gguf(gguf: Path, home: Path, dtype: str) -> Path:
    """The folder under home/models with the model as safetensors, converted on first use.

    Raises CorruptModelError for a damaged or unknown GGUF, StoreFullError if the disk is full.
    """
    folder = _folder(gguf, home, dtype)
    if not is_converted(gguf, home, dtype):
        log.info("converting %s once, to %s", gguf.name, folder)
        tokenizer = convert_gguf_tokenizer(gguf, home, dtype)
        _create(folder, "config.json", lambda draft: _convert(gguf, tokenizer, draft, dtype))
    return folder


def is_converted(gguf: Path, home: Path, dtype: str) -> bool:
    """Whether `convert_gguf` has already converted it."""
    return (_folder(gguf, home, dtype) / "config.json").is_file()


def convert_gguf_tokenizer(gguf: Path, home: Path, dtype: str) -> Path:
    """A folder with the tokenizer; the model itself need not be converted. Raises as `convert_gguf` does."""
    if is_converted(gguf, home, dtype):
        return _folder(gguf, home, dtype)
    folder = _folder(gguf, home, "tokenizer")
    if not (folder / _TOKENIZER).is_file():
        _create(folder, _TOKENIZER, lambda draft: _convert_tokenizer(gguf, draft))
    return folder


def _folder(gguf: Path, home: Path, kind: str) -> Path:
    models = home / "models"
    return models / f"{gguf.stem}-{file_digest(gguf, models / 'digests.json')[:12]}-{kind}"


def _create(folder: Path, marker: str, fill: Callable[[Path], None]) -> None:
    """Create and fill a folder atomically. marker: a file that exists in every complete folder."""
    try:
        make_private_folder(folder.parent)
        _remove_abandoned(folder.parent)
        with tempfile.TemporaryDirectory(
            prefix=DRAFT_PREFIX, dir=folder.parent, ignore_cleanup_errors=True
        ) as name:
            draft = Path(name)
            fill(draft)
            for file in draft.iterdir():  # else a power cut could leave empty files under the final name
                sync_file(file)
            replace(draft, folder)
            sync_folder(folder.parent)
    except OSError as error:
        if (folder / marker).is_file():  # another process was faster
            return
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            raise StoreFullError(
                f"could not write the converted model to {folder.parent}: {error}; free some space"
            ) from error
        raise


def _remove_abandoned(models: Path) -> None:
    """Remove temporary folders of killed conversions; each is as large as a model."""
    for draft in models.glob(f"{DRAFT_PREFIX}*"):
        with suppress(FileNotFoundError):  # finished, or removed by another process
            if draft.stat().st_mtime < time.time() - ABANDONED_AFTER_S:
                shutil.rmtree(draft, ignore_errors=True)


@lru_cache(maxsize=1)
def _cached_reader(gguf: str) -> Any:
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(gguf)


@contextmanager
def _shared_reader(gguf: Path) -> Iterator[None]:
    """Context in which transformers uses one reader of the file, and shows no progress bar: it would create three for a
    model, each of which parses the vocabulary for seconds. Raises CorruptModelError for what the readers raise.
    """
    import gguf as package
    from gguf.gguf_reader import GGUFReader

    weights_reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    package.GGUFReader = _cached_reader  # type: ignore[misc, assignment]
    bar, weights_reader.tqdm = weights_reader.tqdm, partial(weights_reader.tqdm, disable=True)
    try:
        yield
    except CONVERSION_ERRORS as error:
        raise CorruptModelError(
            f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {error}); it may be "
            "cut short: fetch it again"
        ) from error
    finally:
        package.GGUFReader = GGUFReader  # type: ignore[misc]
        weights_reader.tqdm = bar


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with gguf.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise CorruptModelError(
            f"{gguf} does not begin with GGUF (found {magic!r}): it is another kind of file or damaged"
        )
    with _shared_reader(gguf):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _convert(gguf: Path, tokenizer: Path, folder: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    from ragblend.engine.model.device import exclusive_model_loading

    with exclusive_model_loading(), _shared_reader(gguf):
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=DTYPES[dtype],
            quantization_config=GgufConfig(dequantize=True),
        )
        # The safetensors are not quantized any more.
        vars(model.config).pop("quantization_config", None)
        model.hf_quantizer = None  # type: ignore[assignment]
        model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
    _cached_reader.cache_clear()
