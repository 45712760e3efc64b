"""GGUF to safetensors, once: transformers unpacks GGUF weights in 15 to 60 s, and loads safetensors in about one."""

import logging
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ragblend.engine.model.checkpoints import file_digest
from ragblend.kvstore.chunks import DTYPES
from ragblend.kvstore.errors import CorruptModelError, StoreFullError
from ragblend.kvstore.files import make_private_folder, sync_file, sync_folder

# What transformers' readers raise; NotImplementedError is a RuntimeError, KeyError and IndexError are LookupErrors.
CONVERSION_ERRORS = (ValueError, LookupError, RuntimeError, TypeError, EOFError, struct.error)
_TOKENIZER = "tokenizer_config.json"
DRAFT, LEFT_S = ".converting-", 24 * 3600
log = logging.getLogger("ragblend")


def convert_gguf(gguf: Path, home: Path, dtype: str) -> Path:
    """The folder under home/models with the same model as safetensors, made on first use (transformers shows a bar).

    Raises CorruptModelError for a damaged or unknown GGUF, StoreFullError when the disk is full.
    """
    folder = _folder(gguf, home, dtype)
    if not is_converted(gguf, home, dtype):
        log.info("converting %s once, to %s", gguf.name, folder)
        tokenizer = convert_gguf_tokenizer(gguf, home, dtype)
        _make(folder, "config.json", lambda draft: _convert(gguf, tokenizer, draft, dtype))
    return folder


def is_converted(gguf: Path, home: Path, dtype: str) -> bool:
    """Whether that was done before."""
    return (_folder(gguf, home, dtype) / "config.json").is_file()


def convert_gguf_tokenizer(gguf: Path, home: Path, dtype: str) -> Path:
    """A folder with the tokenizer alone, or the whole model if it is there: its files are the same in both.

    Raises as `convert_gguf` does.
    """
    if is_converted(gguf, home, dtype):
        return _folder(gguf, home, dtype)
    folder = _folder(gguf, home, "tokenizer")
    if not (folder / _TOKENIZER).is_file():
        _make(folder, _TOKENIZER, lambda draft: _convert_tokenizer(gguf, draft))
    return folder


def _folder(gguf: Path, home: Path, kind: str) -> Path:
    models = home / "models"
    return models / f"{gguf.stem}-{file_digest(gguf, models / 'digests.json')[:12]}-{kind}"


def _make(folder: Path, sign: str, fill: Callable[[Path], None]) -> None:
    """Fill a folder, all or nothing. sign: the file by which one is known that is whole."""
    try:
        make_private_folder(folder.parent)
        _clear(folder.parent)
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=folder.parent, ignore_cleanup_errors=True) as name:
            draft = Path(name)
            fill(draft)
            for file in draft.iterdir():  # or a power cut leaves a folder that is whole by its name alone
                sync_file(file)
            os.replace(draft, folder)
            sync_folder(folder.parent)
    except OSError as error:
        if (folder / sign).is_file():  # another process was quicker
            return
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            raise StoreFullError(
                f"could not write the converted model to {folder.parent}: {error}; free some space"
            ) from error
        raise


def _clear(models: Path) -> None:
    """Remove what was begun so long ago that whoever did it was killed: each is as large as a model."""
    for left in models.glob(f"{DRAFT}*"):
        with suppress(FileNotFoundError):  # it is done, or somebody else clears
            if left.stat().st_mtime < time.time() - LEFT_S:
                shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _named_errors(gguf: Path) -> Iterator[None]:
    try:
        yield
    except CONVERSION_ERRORS as error:
        raise CorruptModelError(
            f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {error}); it may be "
            "cut short: fetch it again"
        ) from error


def _convert_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with gguf.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise CorruptModelError(
            f"{gguf} does not begin with GGUF (found {magic!r}): it is another kind of file or damaged"
        )
    with _named_errors(gguf):
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _convert(gguf: Path, tokenizer: Path, folder: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    from ragblend.engine.model.device import exclusive_model_loading

    with exclusive_model_loading(shows_bars=True), _named_errors(gguf):
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=DTYPES[dtype],
            quantization_config=GgufConfig(dequantize=True),
        )
    # What it was unpacked from is of no use to whoever loads the safetensors.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    shutil.copytree(tokenizer, folder, dirs_exist_ok=True)
