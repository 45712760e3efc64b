"""What policies are shown, and what they answer with: KV beside what was stored, attention, changes, shifts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Of the rows behind the last chunk at most so many, the last ones, are watched: their weights are (N, W, T) numbers.
WATCHED_ROWS = 128


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
    """One layer's evidence, gathered in several goes."""
    if len(parts) == 1:
        return parts[0]
    heads = ("new_keys", "new_values", "old_keys", "old_values")
    kv = {name: torch.cat([getattr(part, name) for part in parts], dim=1) for name in heads}
    return Evidence(layer=parts[0].layer, rows=torch.cat([part.rows for part in parts]), **kv)


@dataclass(frozen=True)
class Attention:
    """What the rows behind the last chunk look at in one layer, during a probe.

    queries (N, W, D), rotated; keys (H, K, D), those from position first_key on, N a multiple of H; scaling: what
    products are multiplied by; mask (W, K) additive; weights (N, W, K): each row's shares, which sum to 1 (less where
    the model has sinks), 0 where the row may not look.
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
    """What the probes of a request have shown so far.

    scores: by layer, (T,) float32, what the last probe's `look` said (0 for keys out of its sight); computed (T,)
    bool: stored rows that probes have computed for good; passes: how many probes there were; cost_rows: rows that they
    computed, for good or to be computed again, averaged over layers.
    """

    scores: Mapping[int, Tensor]
    computed: Tensor
    passes: int
    cost_rows: float


@dataclass(frozen=True)
class Change:
    """What computing did to stored rows, in one layer, and what is stored there for all.

    rows (C,) positions; keys, values (H, C, D) float32: new minus stored; start, stop: the run of rows that may be
    corrected; stored_keys, stored_values (H, stop - start, D), bfloat16 in a model of that dtype, else float32: what is
    stored for these (zeros in rows among them that are not stored). All keys are turned back to
    position 0, so that they compare wherever they stand; still(keys (H, n, D), positions (n,)) does that to others, of
    the same layer. known: what a policy keeps of a request's rows, which are the same in all layers.
    """

    layer: int
    rows: Tensor
    keys: Tensor
    values: Tensor
    start: int
    stop: int
    stored_keys: Tensor
    stored_values: Tensor
    still: Callable[[Tensor, Tensor], Tensor]
    known: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Shift:
    """What to add to the stored KV of rows start to stop of the change: keys (at position 0) and values, of any dtype,
    (H, stop - start, D). Rows that are computed, that nothing can change, or that have no stored KV, get nothing of it.
    """

    keys: Tensor
    values: Tensor
