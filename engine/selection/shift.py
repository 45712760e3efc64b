"""Shifts: rows that are not computed again get a part of what changed, on the mean, where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the sinks and the text before it pull every row's values and
keys (turned back to position 0) the same way. So the mean change of the computed rows is worth adding to the others. Ours;
measured in docs/methods.md. Cost: one pass over the layer's KV, no row of a layer.
"""

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.evidence import Change, Shift

FORMS = ("none", "chunk", "common", "mix")
# A chunk's own mean counts n / (n + this) beside the mean of all, where n of its rows were computed.
SHRINK_ROWS = 16


def shift_of(form: str, strength: float, plan: Plan, change: Change) -> Shift | None:
    """The shift of that form: the mean by chunk, of all (common), or the first drawn to the second (mix)."""
    if change.rows.numel() == 0:
        return None
    group_of = chunk_of(plan)
    keys, values = change.keys, change.values
    groups = len(plan.spans)
    picked = group_of[change.rows]
    if form == "common":
        return Shift(
            strength * keys.mean(1, keepdim=True),
            strength * values.mean(1, keepdim=True),
            torch.where(group_of >= 0, 0, -1),
        )
    counts = torch.bincount(picked, minlength=groups).float()  # (C,)
    shrink = {"chunk": 0.0, "mix": float(SHRINK_ROWS)}[form]
    return Shift(
        strength * _means(keys, picked, counts, shrink),
        strength * _means(values, picked, counts, shrink),
        group_of,
    )


def chunk_of(plan: Plan) -> Tensor:
    """(T,) number of the chunk that each row belongs to, -1 for none."""
    numbers = torch.full((plan.tokens,), -1)
    for number, span in enumerate(plan.spans):
        numbers[span.start : span.stop] = number
    return numbers.to(plan.token_ids.device)


def _means(changes: Tensor, picked: Tensor, counts: Tensor, shrink: float) -> Tensor:
    """(H, C, D): the mean change of each chunk, drawn to that of all as if `shrink` more rows had had it."""
    sums = changes.new_zeros(changes.shape[0], counts.numel(), changes.shape[2]).index_add_(
        1, picked, changes
    )
    common = changes.mean(1, keepdim=True)
    return (sums + shrink * common) / (counts + shrink).clamp_min(1)[None, :, None]
