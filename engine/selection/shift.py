"""Shifts: rows that are not computed again get a part of what changed where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the text before it pulls every row's values and keys
(turned back to position 0) the same way, and draws them away from what they had from the chunk alone. So the mean
change of the computed rows is worth adding to the others (`common`, `chunk`, `mix`), and what a row's own stored key,
value and place say about its change, by regression on the computed rows, is worth adding to that (`linear`). Nothing is
learnt beforehand: every prompt, layer and head has its own regression. The computed rows were chosen for what the
question looks at, so they say less about rows unlike them: the regression's part shrinks with how far a row is from
them, and all of a shift with how few they are beside the numbers that they are to tell. Ours; measured in
docs/methods.md. Cost: one pass over the layer's KV and, of `linear`, two systems of F = D + 3 unknowns a head and
products (T, F) by (F, D).
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
# Where a row's squared distance from the computed rows' mean is k times theirs, the regression counts
# 1 / (1 + 8 (k - 1)).
CAUTION = 8.0
# n computed rows count n / (n + 1.5 D): with few rows even their mean is a guess.
SHRINK_SIZES = 1.5


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
    rows = change.rows.numel()
    keys, values = (
        part.mul_(strength * rows / (rows + SHRINK_SIZES * part.shape[-1])) for part in (keys, values)
    )
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
    squares, gram = _system(known - centre)
    weights = torch.cholesky_solve(
        (known - centre).transpose(1, 2) @ (changes - means[:, chunks[change.rows]]),
        torch.linalg.cholesky(gram),
    )  # (H, D + 3, D)
    size = stored.shape[-1]
    predicted = (places[run] @ weights[:, size:] - centre @ weights).baddbmm_(stored, weights[:, :size])
    nearness = _nearness(stored, places[run], centre, gram.diagonal(dim1=1, dim2=2), squares)
    return predicted.mul_(nearness[..., None]).add_(means[:, chunks[run].clamp_min(0)])


def _nearness(stored: Tensor, places: Tensor, centre: Tensor, scales: Tensor, squares: Tensor) -> Tensor:
    """(H, n), at most 1: how far the regression may be trusted about rows of stored (H, n, D) at places (n, 3).

    By the squared distance from centre (H, 1, F), each feature in units of scales (H, F), beside that of the computed
    rows, whose features have mean squares (H, F).
    """
    size, units = stored.shape[-1], 1 / scales[..., None]
    away = (stored - centre[..., :size]).square() @ units[:, :size]
    away = away + (places - centre[..., size:]).square() @ units[:, size:]
    typical = (squares[:, None] @ units).clamp_min(1e-12)  # (H, 1, 1)
    return (1 / (1 + CAUTION * (away / typical - 1).clamp_min(0)))[..., 0]


def _places(plan: Plan, chunks: Tensor) -> Tensor:
    """(T, 3), each from 0 to about 1: nearness to the chunk's beginning, logarithm of its distance, position."""
    starts = torch.tensor([span.start for span in plan.spans], device=chunks.device)
    where = torch.arange(plan.tokens, device=chunks.device)
    place = (where - starts[chunks.clamp_min(0)]).clamp_min(0).float()
    return torch.stack([1 / (1 + place), place.log1p() / 6, where / plan.tokens], dim=-1)


def _system(known: Tensor) -> tuple[Tensor, Tensor]:
    """Of known (H, C, F), about its mean: mean squares of the features (H, F), and the ridged gram (H, F, F)."""
    rows, size = known.shape[1:]
    gram = known.transpose(1, 2) @ known
    diagonal = gram.diagonal(dim1=1, dim2=2)  # a view
    squares = diagonal / rows
    diagonal += (RIDGE * size / rows * diagonal.mean(1) + 1e-6)[:, None]
    return squares, gram
