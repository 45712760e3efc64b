"""Linear layers with a second copy of their weights in oneDNN's order, which makes passes over few rows faster.

Such a pass is bound by reading weights, and torch reorders bfloat16 weights on every call: on a Xeon with AMX a third
of the time at 68 rows, half of it at one. With many rows the plain order is as fast or faster, so both are kept. The
kernel is the same; the order of sums may differ.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ragblend.engine.model.device import available_bytes

MAX_PACKED_ROWS = 256
TYPICAL_ROWS = 64  # the number of rows for which oneDNN chooses the order
MAX_FREE_MEMORY_SHARE = 0.25


class PackedLinear(nn.Linear):
    """A linear layer over the same weight and bias, fast for up to MAX_PACKED_ROWS rows."""

    packed: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> "PackedLinear":
        """Shares linear's parameters; the packed copy is not part of the state dict."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = linear.in_features, linear.out_features
        made.weight, made.bias = linear.weight, linear.bias
        made.training = linear.training
        made.packed = _operators()._reorder_linear_weight(linear.weight.data, TYPICAL_ROWS)
        return made

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16 or input.numel() > MAX_PACKED_ROWS * self.in_features:
            return super().forward(input)
        out: Tensor = _operators()._linear_pointwise(input, self.packed, self.bias, "none", [], "")
        return out


def pack(model: nn.Module) -> int:
    """Pack the linear layers of a model on the CPU, if that is faster and memory allows it; returns how many."""
    if not can_pack():
        return 0
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
        and child.weight.dtype == torch.bfloat16
        and child.weight.device.type == "cpu"
    ]
    needed = sum(child.weight.nbytes for _, _, child in found)
    if needed > MAX_FREE_MEMORY_SHARE * available_bytes():
        return 0
    for parent, name, child in found:
        setattr(parent, name, PackedLinear.of(child))
    return len(found)


def can_pack() -> bool:
    """Whether this processor and torch multiply bfloat16 with oneDNN, and torch has the operators."""
    if not torch.backends.mkldnn.is_available():
        return False
    operators = _operators()
    needed = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    return all(hasattr(operators, name) for name in needed) and bool(operators._is_mkldnn_bf16_supported())


def _operators() -> Any:
    return torch.ops.mkldnn
