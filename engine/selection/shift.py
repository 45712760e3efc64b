"""Shifts: rows that are not computed again get a part of what changed where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the text before it pulls every row's values and keys
(turned back to position 0) the same way, and draws them away from what they had from the chunk alone. So the mean
change of the computed rows is worth adding to the others (`common`, `chunk`, `mix`), and what a row's own stored key,
value and place say about its change, by regression on the computed rows, is worth adding to that (`linear`). Nothing is
learnt beforehand: every prompt, layer and head has its own regression. Ours; measured in docs/methods.md. Cost: one
pass over the layer's KV and, of `linear`, a system of F = 2 D + 3 unknowns a head and a product (T, F) by (F, 2 D).
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
# How large a row's places stand beside its keys and values: what is large is shrunk less.
PLACE_SCALE = 3.0


def shift_of(form: str, strength: float, plan: Plan, change: Change) -> Shift | None:
    """The shift of that form; None where no row was computed."""
    if change.rows.numel() == 0:
        return None
    chunks = chunk_of(plan)
    changes = torch.cat([change.keys, change.values], dim=-1)  # (H, C, D + D)
    if form == "linear":
        shift = _linear(plan, change, changes, chunks)
    else:
        shrink = {"common": torch.inf, "chunk": 0.0, "mix": SHRINK_ROWS}[form]
        means = _means(changes, chunks[change.rows], len(plan.spans), shrink)
        shift = means[:, chunks[change.start : change.stop].clamp_min(0)]
    keys, values = (strength * shift).split([change.keys.shape[-1], change.values.shape[-1]], dim=-1)
    return Shift(keys, values)


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


def _linear(plan: Plan, change: Change, changes: Tensor, chunks: Tensor) -> Tensor:
    """(H, n, D + D): the chunk's mean and, by regression on the computed rows, what a row's features add to it."""
    picked, features = chunks[change.rows], _features(plan, change)
    means = _means(changes, picked, len(plan.spans), SHRINK_ROWS)
    known = features[:, change.rows - change.start]  # (H, C, F)
    centre = known.mean(1, keepdim=True)
    weights = _ridge(known - centre, changes - means[:, picked])
    means = means - centre @ weights  # (H, chunks, D + D)
    return means[:, chunks[change.start : change.stop].clamp_min(0)].baddbmm_(features, weights)


def _features(plan: Plan, change: Change) -> Tensor:
    """(H, n, F): what a row's change may depend on: its stored key and value, its place in chunk and prompt."""
    stored = torch.cat([change.stored_keys, change.stored_values], dim=-1)
    place = torch.zeros(plan.tokens)
    for span in plan.spans:
        place[span.start : span.stop] = torch.arange(span.length)
    place = place[change.start : change.stop].to(stored.device)
    where = torch.arange(change.start, change.stop, device=stored.device) / plan.tokens
    places = torch.stack(
        [1 / (1 + place), place.log1p() / 6, where], dim=-1
    )  # (n, 3), each from 0 to about 1
    places = places * PLACE_SCALE * stored[:, change.rows - change.start].std()
    return torch.cat([stored, places.expand(stored.shape[0], -1, -1)], dim=-1)


def _ridge(known: Tensor, wanted: Tensor) -> Tensor:
    """Weights (H, F, D) of the ridge regression of wanted (H, C, D) on known (H, C, F), both about their means."""
    rows, size = known.shape[1:]
    gram = known.transpose(1, 2) @ known
    diagonal = gram.diagonal(dim1=1, dim2=2)  # a view
    diagonal += (RIDGE * size / rows * diagonal.mean(1) + 1e-6)[:, None]
    return torch.cholesky_solve(known.transpose(1, 2) @ wanted, torch.linalg.cholesky(gram))
