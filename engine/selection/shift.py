"""Shifts: rows that are not computed again get a part of what changed, on the mean, where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the sinks and the text before it pull every row's values and
keys (turned back to position 0) the same way. So the mean change of the computed rows is worth adding to the others. Ours;
measured in docs/methods.md. Cost: one pass over the layer's KV, no row of a layer.
"""

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.evidence import Change, Shift

FORMS = ("none", "common", "chunk", "mix", "linear")
# A chunk's own mean counts n / (n + this) beside the mean of all, where n of its rows were computed.
SHRINK_ROWS = 16
# The ridge of the linear form, in units of features / rows x the features' mean square.
RIDGE = 4.0


def shift_of(form: str, strength: float, plan: Plan, change: Change) -> Shift | None:
    """The shift of that form; None where no row was computed."""
    if change.rows.numel() == 0:
        return None
    chunks = chunk_of(plan)
    if form == "linear":
        features = _features(plan, change)
        keys, values = (_linear(change, chunks, of, features) for of in (change.keys, change.values))
    else:
        shrink = {"common": torch.inf, "chunk": 0.0, "mix": SHRINK_ROWS}[form]
        of_rows = chunks[change.start : change.stop].clamp_min(0)
        keys, values = (
            _means(of, chunks[change.rows], len(plan.spans), shrink)[:, of_rows]
            for of in (change.keys, change.values)
        )
    return Shift(strength * keys, strength * values)


def chunk_of(plan: Plan) -> Tensor:
    """(T,) number of the chunk that each row belongs to, -1 for none."""
    numbers = torch.full((plan.tokens,), -1)
    for number, span in enumerate(plan.spans):
        numbers[span.start : span.stop] = number
    return numbers.to(plan.token_ids.device)


def _means(changes: Tensor, picked: Tensor, chunks: int, shrink: float) -> Tensor:
    """(H, C, D): the mean change of each chunk, drawn to that of all as if `shrink` more rows had had it."""
    common = changes.mean(1, keepdim=True)
    if shrink == torch.inf:
        return common.expand(-1, chunks, -1)
    counts = torch.bincount(picked, minlength=chunks).float()  # (C,)
    sums = changes.new_zeros(changes.shape[0], chunks, changes.shape[2]).index_add_(1, picked, changes)
    return (sums + shrink * common) / (counts + shrink).clamp_min(1)[None, :, None]


def _features(plan: Plan, change: Change) -> Tensor:
    """(H, n, F): what a row's change may depend on linearly: its stored key and value, its place in chunk and prompt."""
    stored = torch.cat([change.stored_keys, change.stored_values], dim=-1)
    place = torch.zeros(plan.tokens)
    for span in plan.spans:
        place[span.start : span.stop] = torch.arange(span.length)
    place = place[change.start : change.stop].to(stored.device)
    where = torch.arange(change.start, change.stop, device=stored.device) / plan.tokens
    places = torch.stack([1 / (1 + place), place.log1p() / 6, where], dim=-1)
    return torch.cat(
        [stored, (3 * stored[:, change.rows - change.start].std() * places).expand(stored.shape[0], -1, -1)],
        dim=-1,
    )


def _linear(change: Change, chunks: Tensor, changes: Tensor, features: Tensor) -> Tensor:
    """(H, n, D): the chunk's mean and, by ridge regression on the computed rows, what a row's features add to it."""
    picked = chunks[change.rows]
    means = _means(changes, picked, int(chunks.max()) + 1, SHRINK_ROWS)
    known = features[:, change.rows - change.start]  # (H, C, F)
    centre = known.mean(1, keepdim=True)
    known = known - centre
    gram = known.transpose(1, 2) @ known
    size = gram.shape[-1]
    ridge = RIDGE * size / change.rows.numel() * gram.diagonal(dim1=1, dim2=2).mean(1) + 1e-6
    gram.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    weights = torch.linalg.solve(gram, known.transpose(1, 2) @ (changes - means[:, picked]))  # (H, F, D)
    of_rows = chunks[change.start : change.stop].clamp_min(0)
    return means[:, of_rows] + (features - centre) @ weights
