"""GGUF to safetensors, once: transformers unpacks GGUF weights in 15 to 60 s, and loads safetensors in about one."""

import logging
import os
import shutil
import struct
import tempfile
from pathlib import Path

import torch

from ragblend.engine.files import file_digest
from ragblend.kvstore.chunks import DTYPES
from ragblend.kvstore.errors import CorruptModelError, StoreFullError

CONVERSION_ERRORS = (
    ValueError,
    KeyError,
    IndexError,
    RuntimeError,
    TypeError,
    NotImplementedError,
    struct.error,
    EOFError,
)
log = logging.getLogger("ragblend")


def converted(gguf: Path, home: Path, dtype: str) -> Path:
    """The folder under home/models with the same model as safetensors, made on first use (transformers shows a bar).

    Raises CorruptModelError for a damaged or unknown GGUF, StoreFullError when the disk is full.
    """
    models = home / "models"
    models.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{gguf.stem}-{file_digest(gguf, models / 'digests.json')[:12]}-{dtype}"
    folder = models / name
    if (folder / "config.json").is_file():
        return folder
    log.info("converting %s once, to %s", gguf.name, folder)
    draft = Path(tempfile.mkdtemp(prefix=".converting-", dir=models))
    try:
        _convert(gguf, draft, dtype)
        os.replace(draft, folder)
    except OSError as error:
        if (folder / "config.json").is_file():  # another process was quicker
            return folder
        if error.errno is not None and not isinstance(error, FileNotFoundError):
            raise StoreFullError(
                f"could not write the converted model to {models}: {error}; free some space"
            ) from error
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    _check_header(gguf)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=DTYPES[dtype],
            quantization_config=GgufConfig(dequantize=True),
        )
    except CONVERSION_ERRORS as error:
        raise CorruptModelError(
            f"{gguf} cannot be read as a GGUF model ({type(error).__name__}: {error}); it may be "
            "cut short: fetch it again"
        ) from error
    _save(model, tokenizer, folder)


def _save(model: torch.nn.Module, tokenizer: object, folder: Path) -> None:
    # What it was unpacked from is of no use to whoever loads the safetensors.
    model.config.quantization_config = None  # type: ignore[union-attr]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)  # type: ignore[operator]
    tokenizer.save_pretrained(folder)  # type: ignore[attr-defined]


def _check_header(gguf: Path) -> None:
    with gguf.open("rb") as stream:
        magic = stream.read(4)
    if magic != b"GGUF":
        raise CorruptModelError(
            f"{gguf} does not begin with GGUF (found {magic!r}): it is another kind of file or damaged"
        )
