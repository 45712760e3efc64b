"""What a policy is shown of a layer: new KV beside what was stored, and the attention of a probe."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Of the rows behind the last chunk at most so many, the last ones, have their attention collected: it is (N, W, T).
COLLECTED_ROWS = 128


@dataclass(frozen=True)
class Evidence:
    """KV of the rows being computed, beside what was stored for them, in one layer.

    rows (R,) positions; new_* and old_* (H, R, D). old_* hold nothing meaningful for rows without stored KV.
    """

    layer: int
    rows: Tensor
    new_keys: Tensor
    new_values: Tensor
    old_keys: Tensor
    old_values: Tensor


def joined(parts: list[Evidence]) -> Evidence:
    """One layer's evidence, gathered in several row blocks."""
    if len(parts) == 1:
        return parts[0]
    heads = ("new_keys", "new_values", "old_keys", "old_values")
    kv = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in heads}
    return Evidence(layer=parts[0].layer, rows=torch.cat([part.rows for part in parts]), **kv)


@dataclass(frozen=True)
class Attention:
    """What the rows behind the last chunk attend to in one layer, during a probe.

    queries (N, W, D), rotated; keys (H, K, D), those from position first_key on, N a multiple of H; scaling: what
    products are multiplied by; mask (W, K) additive; weights (N, W, K): each row's shares, which sum to 1 (less where
    the model has sinks), 0 where the row may not attend.
    """

    layer: int
    first_key: int
    queries: Tensor
    keys: Tensor
    scaling: float
    mask: Tensor
    weights: Tensor


@dataclass(frozen=True)
class Probed:
    """What the probe of a request has shown.

    scores: by layer, (T,) float32, what the policy's `layer_scores` said (0 for keys out of sight); cost_rows: rows of
    the probe that are computed again after it, averaged over layers.
    """

    scores: Mapping[int, Tensor]
    cost_rows: float
