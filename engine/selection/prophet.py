"""ProphetKV: recompute what the user's question attends to, over all layers and heads.

Source: ProphetKV (arXiv 2602.02579, ICML'26), whose first stage lets the question attend to the reused KV in all layers
and fuses the attention of the layers into one set of tokens. Here: each layer's attention, summed over the rows behind
the last chunk, averaged over heads and layers; the paper's own weights for layers are not used. Cost: as `Asking`, all
layers.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.asking import Asking
from ragblend.engine.selection.evidence import Attention


@dataclass(frozen=True)
class Prophet(Asking):
    """The question's attention, averaged over all layers and heads."""

    name: str = field(default="prophet", kw_only=True)

    def watches(self, plan: Plan, layer: int) -> bool:
        return True

    def look(self, plan: Plan, attention: Attention) -> Tensor:
        return attention.weights.sum(dim=1, dtype=torch.float32).mean(0)  # (N, W, K) -> (N, K) -> (K,)
