"""Load a checkpoint, and say by content what it is."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.model.attention import EAGER, NAME, register
from ragblend.engine.model.checkpoints import find_model, tokenizer_digest, weights_digest
from ragblend.engine.model.convert import convert_gguf, convert_gguf_tokenizer, is_converted
from ragblend.engine.model.decoder import Decoder, TransformersDecoder, kv_geometry, rope_parameters
from ragblend.engine.model.device import exclusive_model_loading
from ragblend.engine.model.packing import pack
from ragblend.kvstore.chunks import DTYPES
from ragblend.kvstore.errors import (
    CorruptModelError,
    DeviceError,
    TokenizerMissingError,
    UnsupportedModelError,
)
from ragblend.kvstore.keys import ModelFingerprint

MAX_BITS_PER_WEIGHT = (
    10  # a weight, of a file whose weights had been rounded: GGUF's eight bits are eight and a half
)


def read_config(folder: Path) -> Any:
    """The decoder's own config. Raises CorruptModelError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder)).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise CorruptModelError(f"the config in {folder} cannot be read: {error}") from error


def was_quantized(name: str, parameters: int) -> bool:
    """Whether the file that a model was unpacked from has at most MAX_BITS_PER_WEIGHT a weight; a folder's weights never have."""
    found = find_model(name)
    return found.is_file() and 8 * found.stat().st_size <= MAX_BITS_PER_WEIGHT * parameters


def load_tokenizer(folder: Path) -> Any:
    """Raises TokenizerMissingError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerMissingError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def locate(name: str, home: Path, dtype: str) -> Path:
    """A folder of safetensors with its tokenizer; a GGUF is converted on first use. Raises ModelError's children."""
    found = find_model(name)
    return convert_gguf(found, home, dtype) if found.is_file() else found


def locate_tokenizer(name: str, home: Path, dtype: str) -> Path:
    """The folder of a model's tokenizer; of a GGUF nothing else is converted, which takes a second or two."""
    found = find_model(name)
    return convert_gguf_tokenizer(found, home, dtype) if found.is_file() else found


def needs_conversion(name: str, home: Path, dtype: str) -> bool:
    """Whether a model's first use will take a minute."""
    found = find_model(name)
    return found.is_file() and not is_converted(found, home, dtype)


@dataclass
class LoadedModel:
    """A model on its device. decoder is None, and unsupported says why, where it can only be run as it is."""

    model: Any
    decoder: Decoder | None
    unsupported: str | None


def load(folder: Path, device: torch.device, dtype: str) -> LoadedModel:
    """Load the weights. Raises CorruptModelError for damaged files."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        # With this option two values come back; the annotations know of one.
        with exclusive_model_loading():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=DTYPES[dtype], device_map={"": device}, output_loading_info=True
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceError(
            f"there is too little memory on {device} for the model in {folder}; a smaller model, or --device cpu"
        ) from error
    except SafetensorError as error:
        raise CorruptModelError(f"the weights in {folder} are damaged: {error}; fetch them again") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CorruptModelError(f"the model in {folder} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        # transformers fills them with random numbers and goes on; an answer from those is worse than an error.
        raise CorruptModelError(
            f"the model in {folder} lacks {len(missing)} weights ({missing[0]}, ...); fetch it again"
        )
    model.eval().requires_grad_(False)
    use_own_attention(model)
    pack(model)
    try:
        return LoadedModel(model, TransformersDecoder(model, dtype), None)
    except UnsupportedModelError as error:
        return LoadedModel(model, None, str(error))


def use_own_attention(model: Any) -> None:
    """Have the model call our attention (`attention.py`) where it would call sdpa, or its own eager one.

    Soft caps are eager: before 5.20 transformers calls sdpa for them, which leaves them out.
    """
    register()
    caps = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    own = EAGER if caps else {"sdpa": NAME, "eager": EAGER}.get(model.config._attn_implementation)
    if own is not None:
        model.set_attn_implementation(own)


def fingerprint(folder: Path, ledger: Path, config: Any, dtype: str) -> ModelFingerprint:
    """What KV of this model may be mixed with: the same content, dtype, shape and rotation, nothing else."""
    weights, tokenizer = weights_digest(folder, ledger), tokenizer_digest(folder, ledger)
    rope = json.dumps(rope_parameters(config), sort_keys=True, default=str)
    return ModelFingerprint(weights, tokenizer, kv_geometry(config, dtype), rope)


def end_ids(model: Any) -> list[int]:
    """Ids of the tokens that end an answer."""
    found = model.generation_config.eos_token_id
    return found if isinstance(found, list) else [found]
