"""Numbers in fewer bits, asymmetric: number = least + step * code; and the parts that one packed layer consists of."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNED = (
    16  # bytes: a layer's length is a multiple, so that parts of any type can be viewed in a longer buffer
)
Parts = Sequence[tuple[torch.dtype, tuple[int, ...]]]  # of one layer, in order


def quantized(numbers: Tensor, dim: int, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Least and step along `dim`, kept with size 1 (float16), and the codes from 0 to levels (uint8) of float32."""
    infinity = torch.tensor(torch.inf, dtype=torch.float16)
    # Rounded outwards: what lies beyond the first or the last code would be cut off.
    least = torch.nextafter(numbers.amin(dim, keepdim=True).half(), -infinity)
    step = (numbers.amax(dim, keepdim=True) - least.float()).div_(levels)
    step = torch.nextafter(step.half(), infinity)
    codes = (numbers - least.float()).div_(step.float()).round_().clamp_(0, levels)
    return least, step, codes.to(torch.uint8)


def restore(out: Tensor, codes: Tensor, least: Tensor, step: Tensor) -> None:
    """Fill out, of any float type, with the numbers of these codes."""
    # In float32, cast once: half the precision of bfloat16's would be lost otherwise.
    out.copy_(torch.addcmul(least.float(), codes.float(), step.float()))


def parts_nbytes(parts: Parts) -> int:
    """Bytes of one layer."""
    nbytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in parts)
    return math.ceil(nbytes / ALIGNED) * ALIGNED


def joined(scales: Sequence[Tensor], codes: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
    """The parts of one layer, to its full length; None if a scale is beyond float16 or no number."""
    if not all(bool(scale.isfinite().all()) for scale in scales):
        return None
    parts = [part.contiguous() for part in (*scales, *codes)]
    nbytes = sum(part.nbytes for part in parts)
    return (*parts, torch.zeros(-nbytes % ALIGNED, dtype=torch.uint8))


def split(packed: Tensor, parts: Parts) -> list[Tensor]:
    """Views of a layer's bytes (n,) uint8 as its parts."""
    found, begin = list[Tensor](), 0
    for dtype, shape in parts:
        stop = begin + dtype.itemsize * math.prod(shape)
        found.append(packed[begin:stop].view(dtype).view(shape))
        begin = stop
    return found
