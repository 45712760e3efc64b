"""Asymmetric quantization, number = minimum + step * code; and joining a layer's parts into one run of bytes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A layer's length is a multiple of this, so that parts of any dtype can be viewed in a buffer of several layers.
ALIGNMENT_BYTES = 16
Parts = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # dtype and shape of a layer's parts, in order


def quantize(numbers: Tensor, dim: int, max_code: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 numbers: float16 minimum and step along `dim` (size 1 there), uint8 codes from 0 to max_code."""
    infinity = torch.tensor(torch.inf, dtype=torch.float16)
    # Minimum and step are rounded outwards: numbers below the first or above the last code would be clamped.
    minimum = torch.nextafter(numbers.amin(dim, keepdim=True).half(), -infinity)
    step = (numbers.amax(dim, keepdim=True) - minimum.float()).div_(max_code)
    step = torch.nextafter(step.half(), infinity)
    codes = (numbers - minimum.float()).div_(step.float()).round_().clamp_(0, max_code)
    return minimum, step, codes.to(torch.uint8)


def dequantize(out: Tensor, codes: Tensor, minimum: Tensor, step: Tensor) -> None:
    """Fill out, of any float dtype, with the numbers of these codes."""
    # Computed in float32 and cast once: bfloat16 would round the product and the sum.
    out.copy_(torch.addcmul(minimum.float(), codes.float(), step.float()))


def parts_nbytes(parts: Parts) -> int:
    """Bytes of one packed layer, with its padding."""
    nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
    return math.ceil(nbytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def join_parts(scales: Sequence[Tensor], codes: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """A layer's parts and their padding, contiguous; None if a scale is infinite or NaN, as beyond float16."""
    if not all(bool(scale.isfinite().all()) for scale in scales):
        return None
    parts = [part.contiguous() for part in (*scales, *codes)]
    nbytes = sum(part.nbytes for part in parts)
    return (*parts, torch.zeros(-nbytes % ALIGNMENT_BYTES, dtype=torch.uint8))


def split_parts(packed: Tensor, parts: Parts) -> list[Tensor]:
    """Views of a layer's bytes (n,) uint8 as its parts."""
    found, begin = list[Tensor](), 0
    for dtype, shape in parts:
        stop = begin + dtype.itemsize * math.prod(shape)
        found.append(packed[begin:stop].view(dtype).view(shape))
        begin = stop
    return found
