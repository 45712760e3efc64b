"""Four-bit weights: recovers the levels of weights that were four-bit numbers in a GGUF file, and multiplies by them.

Most GGUF files hold blocks of 32 weights as sixteen evenly spaced levels (Q4_0, Q4_1, Q4_K). Unpacked to bfloat16 they
are four times as many bytes, and the levels are still there, up to the dtype's rounding. Other weights are not rounded
to such levels, which would cost quality (`eightbit.py` is for those). Torch's CPU kernel takes bfloat16 rows, on any
processor with AVX2 or AVX-512.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
LEVELS = 16
# As a share of the group's largest weight: twice the error of rounding to bfloat16.
MAX_ROUNDING_ERROR = 2**-7
SAMPLED_ROWS = 16
BLOCK_WEIGHTS = 1 << 22  # examined at a time
OUT_FEATURES = 16  # the kernel computes multiples of this
KERNEL_ROWS = 64  # the period of the kernel's order of weights


@dataclass(frozen=True)
class FourBit:
    """A linear layer's weight (N, K) as the kernel reads it: packed levels, scale and offset of each group."""

    levels: Tensor
    scales: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """(R, K) -> (R, N), in rows' dtype."""
        out = torch._weight_int4pack_mm_for_cpu(rows.to(torch.bfloat16), self.levels, GROUP, self.scales)
        return out.to(rows.dtype)

    @property
    def nbytes(self) -> int:
        return self.levels.nbytes + self.scales.nbytes

    @classmethod
    def concatenated(cls, parts: Sequence["FourBit"]) -> "FourBit | None":
        """One weight whose output is these weights' outputs, concatenated; None if they do not fill kernel blocks."""
        if any(part.levels.shape[0] % KERNEL_ROWS for part in parts):
            return None
        levels = torch.cat([part.levels for part in parts])
        return cls(levels, torch.cat([part.scales for part in parts], 1))


def multiplies_four_bit() -> bool:
    """Whether this version of torch has the operators."""
    return hasattr(torch, "_weight_int4pack_mm_for_cpu") and hasattr(
        torch, "_convert_weight_to_int4pack_for_cpu"
    )


def four_bit(weight: Tensor, check_cancelled: Callable[[], None] = lambda: None) -> FourBit | None:
    """Pack a weight (N, K) if every group lies on sixteen levels; else None.

    check_cancelled: called before each block, may raise.
    """
    if weight.shape[0] % OUT_FEATURES or weight.shape[1] % GROUP:
        return None
    step, rows = max(1, weight.shape[0] // SAMPLED_ROWS), max(1, BLOCK_WEIGHTS // weight.shape[1])
    blocks = [weight[begin : begin + rows] for begin in range(0, weight.shape[0], rows)]
    if _find_levels(weight[::step]) is None:  # most weights without levels are rejected here
        return None
    found = []
    for block in blocks:
        check_cancelled()
        if (part := _find_levels(block)) is None:
            return None
        found.append(part)
    levels, scales, lowest = (torch.cat(each) for each in zip(*found, strict=True))
    packed = torch._convert_weight_to_int4pack_for_cpu(levels, 1)
    # The kernel computes (level - 8) * scale + offset.
    offsets = lowest + LEVELS // 2 * scales
    both = torch.stack([scales, offsets], -1).transpose(0, 1).contiguous()  # (K / GROUP, N, 2)
    return FourBit(packed, both.to(torch.bfloat16))


def _find_levels(weight: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """(N, K) -> levels (N, K) int32, and by group (N, K / GROUP) the step between levels and the lowest; or None.

    A group may use fewer than sixteen levels, so fewer are tried for groups that do not fit.
    """
    groups = weight.float().reshape(-1, GROUP)
    lowest, highest = groups.aminmax(dim=1, keepdim=True)
    allowed = MAX_ROUNDING_ERROR * torch.maximum(lowest.abs(), highest.abs())
    levels, steps, fits = _nearest(groups, lowest, highest, allowed, LEVELS - 1)
    for top in range(LEVELS - 2, 0, -1):
        left = (~fits).nonzero().squeeze(1)
        if not left.numel():
            break
        levels[left], steps[left], fits[left] = _nearest(
            groups[left], lowest[left], highest[left], allowed[left], top
        )
    if not fits.all():
        return None
    shape = weight.shape[0], -1
    return levels.to(torch.int32).view(weight.shape), steps.view(shape), lowest.view(shape)


def _nearest(
    groups: Tensor, lowest: Tensor, highest: Tensor, allowed: Tensor, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Nearest levels 0..top of groups (M, GROUP), the steps (M, 1), and whether each group lies on its levels (M,)."""
    steps = ((highest - lowest) / top).clamp_min_(torch.finfo(torch.float32).tiny)
    levels = (groups - lowest).div_(steps).round_()
    error = torch.addcmul(lowest, levels, steps).sub_(groups).abs_().amax(1, keepdim=True)
    return levels, steps, (error <= allowed)[:, 0]
