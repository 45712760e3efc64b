"""Loads a checkpoint: config, tokenizer, weights; and computes its fingerprint."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ragblend.engine.model.attention import OWN_ATTENTION, OWN_EAGER, register
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
from ragblend.kvstore.fingerprint import ModelFingerprint

MAX_BITS_PER_WEIGHT = 10  # of a quantized file: GGUF's eight bits are eight and a half


def read_config(folder: Path) -> Any:
    """The decoder's own config. Raises CorruptModelError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(folder)).get_text_config(decoder=True)
    except (OSError, ValueError, KeyError) as error:
        raise CorruptModelError(f"the config in {folder} cannot be read: {error}") from error


def was_quantized(name: str, parameters: int) -> bool:
    """Whether the model is a file with at most MAX_BITS_PER_WEIGHT per weight; a folder never counts."""
    found = find_model(name)
    return found.is_file() and 8 * found.stat().st_size <= MAX_BITS_PER_WEIGHT * parameters


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in that folder. Raises TokenizerMissingError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TokenizerMissingError(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def locate(name: str, home: Path, dtype: str) -> Path:
    """The model's folder of safetensors and tokenizer; a GGUF is converted on first use. Raises ModelError."""
    found = find_model(name)
    return convert_gguf(found, home, dtype) if found.is_file() else found


def locate_tokenizer(name: str, home: Path, dtype: str) -> Path:
    """The folder of a model's tokenizer; of a GGUF only the tokenizer is converted, in a second or two."""
    found = find_model(name)
    return convert_gguf_tokenizer(found, home, dtype) if found.is_file() else found


def needs_conversion(name: str, home: Path, dtype: str) -> bool:
    """Whether the model is a GGUF that its first use will convert, which takes a minute."""
    found = find_model(name)
    return found.is_file() and not is_converted(found, home, dtype)


@dataclass
class LoadedModel:
    """A model on its device. decoder is None, and unsupported the reason, if its KV cannot be fused."""

    model: Any
    decoder: Decoder | None
    unsupported: str | None


def load(folder: Path, device: torch.device, dtype: str) -> LoadedModel:
    """Load the weights. Raises CorruptModelError for damaged files."""
    from safetensors import SafetensorError

    try:
        with exclusive_model_loading():
            from transformers import AutoModelForCausalLM

            # With output_loading_info it returns two values; the annotations have one.
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=DTYPES[dtype], device_map={"": device}, output_loading_info=True
            )
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise DeviceError(
            f"there is too little memory on {device} for the model in {folder}; use a smaller model, or --device cpu"
        ) from error
    except SafetensorError as error:
        raise CorruptModelError(f"the weights in {folder} are damaged: {error}; fetch them again") from error
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CorruptModelError(f"the model in {folder} cannot be loaded: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        # transformers would continue with random weights.
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
    """Make the model call our attention (`attention.py`) in place of sdpa or its own eager one.

    Models with soft caps get the eager one: transformers before 5.20 calls sdpa for them, which ignores caps.
    """
    register()
    caps = getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    replacements = {"sdpa": OWN_ATTENTION, "eager": OWN_EAGER}
    own = OWN_EAGER if caps else replacements.get(model.config._attn_implementation)
    if own is not None:
        model.set_attn_implementation(own)


def fingerprint(folder: Path, digest_cache: Path, config: Any, dtype: str) -> ModelFingerprint:
    """The model's identity: KV may be shared only between models of the same content, dtype, shape and rotation."""
    weights, tokenizer = weights_digest(folder, digest_cache), tokenizer_digest(folder, digest_cache)
    rope = json.dumps(rope_parameters(config), sort_keys=True, default=str)
    return ModelFingerprint(weights, tokenizer, kv_geometry(config, dtype), rope)
