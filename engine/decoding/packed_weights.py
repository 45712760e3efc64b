"""A decoder's weights in four or eight bits: packed, saved and loaded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ragblend.engine.decoding.eightbit import EightBit, eight_bit
from ragblend.engine.decoding.fourbit import FourBit, four_bit, multiplies_four_bit
from ragblend.engine.model.decoder import TransformersDecoder
from ragblend.engine.model.device import available_bytes
from ragblend.kvstore.checksum import crc32
from ragblend.kvstore.errors import Cancelled
from ragblend.kvstore.files import FILE_MODE
from ragblend.kvstore.system import replace

MAX_FREE_MEMORY_SHARE = 0.25
PackedWeight = FourBit | EightBit
PackedWeights = dict[str, PackedWeight | None]  # by `LAYER.NAME`, and HEAD; None: not packed
HEAD = "head"  # the output layer
ATTENTION_LINEARS = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP_LINEARS = {"gate_proj", "up_proj", "down_proj"}


@torch.inference_mode()
def pack_weights(
    decoder: TransformersDecoder,
    packed: PackedWeights,
    allows_rounding: bool,
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Add missing weights to `packed`: in four bits if they are on sixteen levels, else in eight if rounding is
    allowed.

    Adds nothing on devices other than the CPU, or if memory does not allow a second copy. Raises Cancelled once
    cancelled() is true; weights added by then stay.
    """
    if decoder.device.type != "cpu":
        return
    linears: dict[str, Any] = {}
    for number, layer in enumerate(decoder.layers):
        for part, names in (("self_attn", ATTENTION_LINEARS), ("mlp", MLP_LINEARS)):
            linears |= {f"{number}.{name}": getattr(getattr(layer, part), name) for name in names}
    # Last, because it is the largest: a cancellation discards the weight in progress.
    linears[HEAD] = decoder.model.lm_head
    size = sum(linear.weight.numel() for linear in linears.values())
    if not packed and not (multiplies_four_bit() and fits_memory(size)):
        return

    def check_cancelled() -> None:
        if cancelled():
            raise Cancelled("packing weights was interrupted by other work")

    for name, linear in linears.items():
        if name not in packed:
            check_cancelled()
            packed[name] = four_bit(linear.weight, check_cancelled) or (
                eight_bit(linear.weight, check_cancelled) if allows_rounding else None
            )


def fits_memory(nbytes: int) -> bool:
    """Whether memory allows a copy of weights of this size."""
    return nbytes <= MAX_FREE_MEMORY_SHARE * available_bytes()


def save_packed(packed: PackedWeights, path: Path) -> int:
    """Write the weights; returns the checksum that `load_packed` needs. A killed process leaves at most a temporary
    file.
    """
    tensors = {
        f"{name}.{part}": getattr(weight, part)
        for name, weight in packed.items()
        if weight is not None
        for part in ("levels", "scales")
    }
    draft = path.with_suffix(".part")
    save_file(tensors, draft)  # leaves nothing if the disk is full
    draft.chmod(FILE_MODE)
    replace(draft, path)
    return _checksum(tensors)


def load_packed(path: Path, checksum: int) -> PackedWeights:
    """Load the weights. Raises ValueError for another checksum, MemoryError if they do not fit."""
    if not fits_memory(path.stat().st_size):
        raise MemoryError(f"too little memory for {path}")
    tensors = load_file(path)
    if _checksum(tensors) != checksum:
        raise ValueError(f"{path} is damaged")
    names = {name.rpartition(".")[0] for name in tensors}
    parts = {name: (tensors[f"{name}.levels"], tensors[f"{name}.scales"]) for name in names}
    return {
        name: (FourBit if part[0].dtype == torch.uint8 else EightBit)(*part) for name, part in parts.items()
    }


def _checksum(tensors: dict[str, Tensor]) -> int:
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = crc32(tensor.contiguous().view(torch.uint8).numpy().data, checksum)
    return checksum
