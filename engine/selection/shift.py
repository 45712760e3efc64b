"""Shifts: rows that are not computed again get a part of what changed where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the text before it pulls every row's values and keys
(turned back to position 0) the same way, and draws them away from what they had from the chunk alone. So the mean
change of the computed rows is worth adding to the others (`common`, `chunk`, `mix`), and what a row's own stored key,
value and place say about its change, by regression on the computed rows, is worth adding to that (`linear`). Nothing is
learnt beforehand: every prompt, layer and head has its own regression. Ours; measured in docs/methods.md. Cost: one
pass over the layer's KV and, of `linear`, two systems of F = D + 3 unknowns a head and products (T, F) by (F, D).
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
    chunks, count = chunk_of(plan), len(plan.spans)
    if form == "linear":
        places = _places(plan, chunks)
        keys = _linear(change, change.stored_keys, change.keys, chunks, places)
        values = _linear(change, change.stored_values, change.values, chunks, places)
    else:
        shrink = {"common": torch.inf, "chunk": 0.0, "mix": SHRINK_ROWS}[form]
        picked, of_rows = chunks[change.rows], chunks[change.start : change.stop].clamp_min(0)
        keys, values = (_means(of, picked, count, shrink)[:, of_rows] for of in (change.keys, change.values))
    return Shift(keys.mul_(strength), values.mul_(strength))


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


def _linear(change: Change, stored: Tensor, changes: Tensor, chunks: Tensor, places: Tensor) -> Tensor:
    """(H, n, D): the chunk's mean, and what a row's stored key or value and its place say beside that.

    stored (H, n, D); changes (H, C, D); places (T, 3). By regression on the computed rows.
    """
    run, count = slice(change.start, change.stop), int(chunks.max()) + 1
    known = stored[:, change.rows - change.start]  # (H, C, D)
    places = places * PLACE_SCALE * known.std()
    known = torch.cat([known, places[change.rows].expand(known.shape[0], -1, -1)], dim=-1)
    centre = known.mean(1, keepdim=True)
    means = _means(changes, chunks[change.rows], count, SHRINK_ROWS)
    weights = _ridge(known - centre, changes - means[:, chunks[change.rows]])  # (H, D + 3, D)
    by_chunk = means - centre @ weights
    # One product for all that is the same in every head: which chunk a row is of, and its place.
    static = torch.cat([places[run], _one_hot(chunks[run], count)], dim=-1)
    of_static = torch.cat([weights[:, stored.shape[-1] :], by_chunk], dim=1)
    return (static @ of_static).baddbmm_(stored, weights[:, : stored.shape[-1]])


def _places(plan: Plan, chunks: Tensor) -> Tensor:
    """(T, 3), each from 0 to about 1: nearness to the chunk's beginning, logarithm of its distance, position."""
    starts = torch.tensor([span.start for span in plan.spans], device=chunks.device)
    where = torch.arange(plan.tokens, device=chunks.device)
    place = (where - starts[chunks.clamp_min(0)]).clamp_min(0).float()
    return torch.stack([1 / (1 + place), place.log1p() / 6, where / plan.tokens], dim=-1)


def _one_hot(chunks: Tensor, count: int) -> Tensor:
    return (chunks[:, None] == torch.arange(count, device=chunks.device)).float()


def _ridge(known: Tensor, wanted: Tensor) -> Tensor:
    """Weights (H, F, D) of the ridge regression of wanted (H, C, D) on known (H, C, F), both about their means."""
    rows, size = known.shape[1:]
    gram = known.transpose(1, 2) @ known
    diagonal = gram.diagonal(dim1=1, dim2=2)  # a view
    diagonal += (RIDGE * size / rows * diagonal.mean(1) + 1e-6)[:, None]
    return torch.cholesky_solve(known.transpose(1, 2) @ wanted, torch.linalg.cholesky(gram))
