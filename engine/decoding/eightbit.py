"""Eight-bit weights with one scale a row: half of bfloat16's bytes, for weights that are not on sixteen levels.

Only for models whose file held their weights in about eight bits: weights of five to eight bits in a GGUF file change
by less than the rounding of activations to bfloat16 between two layers. A matrix that changes more stays unpacked.
`implementations.py` measures the effect of all of them together. Torch's CPU kernel takes bfloat16 rows; in float32 it
is ten times slower.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LEVEL = 127
MAX_MEAN_ERROR = 0.03  # mean change of weights by rounding, as a share of their mean size
KERNEL_SHAPE = 16, 32  # N and K must be multiples: with others the kernel reads beyond the end
BLOCK_ROWS = 4096  # rounded at a time


@dataclass(frozen=True)
class EightBit:
    """A linear layer's weight (N, K) as the kernel reads it: int8 levels (N, K), the rows' scales (N,) in bfloat16."""

    levels: Tensor
    scales: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N), in rows' dtype."""
        return torch._weight_int8pack_mm(rows.to(torch.bfloat16), self.levels, self.scales).to(rows.dtype)

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + self.scales.nbytes

    @classmethod
    def concatenated(cls, parts: Sequence["EightBit"]) -> "EightBit":
        """One weight whose output is these weights' outputs, concatenated."""
        return cls(torch.cat([part.levels for part in parts]), torch.cat([part.scales for part in parts]))


def eight_bit(weight: Tensor, check_cancelled: Callable[[], None] = lambda: None) -> EightBit | None:
    """Round a weight (N, K); None if that changes it by more than MAX_MEAN_ERROR, or the kernel does not support its
    shape.

    check_cancelled: called before each block, may raise.
    """
    if any(size % multiple for size, multiple in zip(weight.shape, KERNEL_SHAPE, strict=True)):
        return None
    blocks, total_error = list[EightBit](), 0.0
    for block in weight.split(BLOCK_ROWS):
        check_cancelled()
        exact = block.float()
        # Rounded first, so that levels are divided and multiplied by the same scale.
        scales = (exact.abs().amax(1) / MAX_LEVEL).bfloat16().clamp_min_(torch.finfo(torch.bfloat16).tiny)
        levels = (exact / scales.float()[:, None]).round_().clamp_(-MAX_LEVEL, MAX_LEVEL)
        total_error += float((levels * scales.float()[:, None] - exact).abs_().sum())
        blocks.append(EightBit(levels.to(torch.int8), scales))
    if total_error > MAX_MEAN_ERROR * float(weight.abs().sum(dtype=torch.float32)):
        return None
    return EightBit.concatenated(blocks)
