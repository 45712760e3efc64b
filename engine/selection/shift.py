"""Shifts: rows that are not computed again get a part of what changed where rows were.

What a chunk's KV lacks is in part the same for all its tokens: the text before it pulls every row's values and keys
(turned back to position 0) the same way, and draws them away from what they had from the chunk alone. So the mean
change of the computed rows is worth adding to the others (`common`, `chunk`, `mix`), and what a row's own stored key,
value and place say about its change, by regression on the computed rows, is worth adding to that (`linear`); and how
the rows changed that resemble it says more (`kernel`, in a file of its own). Nothing is learnt beforehand: every
prompt, layer and head has its own regression. The computed rows were chosen for what the question looks at, so they say
less about rows unlike them: the regression's part shrinks with how far a row is from them, and all of a shift with how
few they are beside the numbers that they are to tell. Ours; measured in docs/methods.md. Cost: one pass over the
layer's KV and, of `linear`, two systems of F = D + 3 unknowns a head and products (T, F) by (F, D).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import chunk_runs
from ragblend.engine.selection.evidence import Change, Shift
from ragblend.engine.selection.kernel import kernel_shift

FORMS = ("none", "common", "chunk", "mix", "linear", "kernel")
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
    rows = change.rows.numel()
    if rows == 0:
        return None
    if form == "kernel":
        return kernel_shift(strength, plan, change)
    places = _places(plan, change)
    stored, changes = (change.stored_keys, change.stored_values), (change.keys, change.values)
    weights = [strength * rows / (rows + SHRINK_SIZES * part.shape[-1]) for part in stored]
    if form == "linear":
        fits = _fits(stored, changes, places)
        triples = zip(fits, stored, weights, strict=True)
        return Shift(*(fit.shift(part, places, weight) for fit, part, weight in triples))
    shrink = {"common": torch.inf, "chunk": 0.0, "mix": SHRINK_ROWS}[form]
    parts = (
        places.with_means(
            torch.zeros_like(part),
            torch.ones_like(part[..., :1]),
            (weight * places.means(of, shrink)).to(part.dtype),
        )
        for part, of, weight in zip(stored, changes, weights, strict=True)
    )
    return Shift(*parts)


def chunk_of(plan: Plan) -> Tensor:
    """(T,) number of the chunk that each row belongs to, -1 for none."""
    numbers = torch.full((plan.tokens,), -1)
    for number, span in enumerate(plan.spans):
        numbers[span.start : span.stop] = number
    return numbers.to(plan.token_ids.device)


def _places(plan: Plan, change: Change) -> "_Places":
    """The same in all layers of a request."""
    found = change.known.get("places")
    if not isinstance(found, _Places):
        found = change.known["places"] = _Places(plan, change)
    return found


class _Places:
    """Where the rows of a change stand: in which chunk, and where in it."""

    def __init__(self, plan: Plan, change: Change) -> None:
        chunks, self._chunks = chunk_of(plan), len(plan.spans)
        self.computed = change.rows - change.start  # (C,) where they are in the run
        picked = chunks[change.rows]
        self._members = (
            picked[:, None] == torch.arange(self._chunks, device=chunks.device)
        ).float()  # (C, chunks)
        self._runs = chunk_runs(plan, change)
        starts = torch.tensor([span.start for span in plan.spans], device=chunks.device)
        where = torch.arange(change.start, change.stop, device=chunks.device)
        place = (where - starts[chunks[where].clamp_min(0)]).clamp_min(0).float()
        # (n, 3), each from 0 to about 1: nearness to the chunk's beginning, logarithm of its distance, position. About
        # the computed rows' mean.
        of_rows = torch.stack([1 / (1 + place), place.log1p() / 6, where / plan.tokens], dim=-1)
        of_rows -= of_rows[self.computed].mean(0)
        self.of_rows = of_rows.to(change.stored_keys.dtype)

    def means(self, changes: Tensor, shrink: float) -> Tensor:
        """(H, chunks, D): the mean change of each chunk, drawn to that of all as if `shrink` more rows had had it."""
        common = changes.mean(1, keepdim=True)
        if shrink == torch.inf:
            return common.expand(-1, self._chunks, -1)
        # By products, because index_add_ takes several times as long.
        sums = self._members.T @ changes
        return (sums + shrink * common) / (self._members.sum(0) + shrink).clamp_min(1)[:, None]

    def of_computed(self, means: Tensor) -> Tensor:
        """(H, C, D): of means (H, chunks, D), that of each computed row's chunk."""
        return self._members @ means

    def with_means(self, shift: Tensor, nearness: Tensor, means: Tensor) -> Tensor:
        """Shift (H, n, D) of the run's rows, times nearness (H, n, 1), and each one's of means (H, chunks, D)."""
        for number, start, stop in self._runs:
            rows = shift[:, start:stop]
            torch.addcmul(means[:, number, None], rows, nearness[:, start:stop], out=rows)
        return shift


@dataclass(frozen=True)
class _Fit:
    """A regression of changes on what is stored, by ridge, for H heads; F = D + 3, with the places.

    centre (H, 1, D): the mean of what is stored for the computed rows; units (H, F, 1): what a feature's square about
    the mean counts in a row's distance, which is 1 for the computed rows in the mean; weights (H, F, D); means
    (H, chunks, D).
    """

    centre: Tensor
    units: Tensor
    weights: Tensor
    means: Tensor

    def shift(self, stored: Tensor, places: _Places, weight: float) -> Tensor:
        """(H, n, D), of stored's dtype: the chunk's mean, and what a row's own KV and place say beside that, by weight.

        Most of a shift's cost: n is 10 to 20 times the computed rows. So it takes few passes, and in stored's dtype.
        """
        heads, rows, size = stored.shape
        away = stored.new_empty(heads, rows, size + places.of_rows.shape[1])
        torch.sub(stored, self.centre.to(stored), out=away[..., :size])
        away[..., size:] = places.of_rows
        shift = away @ (weight * self.weights).to(stored)
        return places.with_means(shift, self._nearness(away), (weight * self.means).to(stored))

    def _nearness(self, away: Tensor) -> Tensor:
        """(H, n, 1), at most 1: how far the regression may be trusted about rows that are away (H, n, F) from centre.

        By their squared distance beside that of the computed rows, in the same units.
        """
        distance = away.square() @ self.units.to(away)
        return 1 / (distance - 1).clamp_min_(0).mul_(CAUTION).add_(1)


def _fits(stored: Sequence[Tensor], changes: Sequence[Tensor], places: _Places) -> list[_Fit]:
    """A regression for each of stored (H, n, D), with changes (H, C, D) float32; at once where D is the same."""
    if len({part.shape for part in stored}) > 1:
        pairs = zip(stored, changes, strict=True)
        return [fit for part, changed in pairs for fit in _fits([part], [changed], places)]
    known = torch.stack([part[:, places.computed] for part in stored]).float()  # (P, H, C, D)
    heads, size = known.shape[1], known.shape[-1]
    scale = PLACE_SCALE * _spread(known)  # (P, 1, 1, 1), how large places stand beside what is stored
    where = places.of_rows[places.computed].float() * scale  # (P, 1, C, 3)
    where = where.expand(-1, heads, -1, -1)
    # Rounded as it is where it is taken from all rows.
    centre = known.mean(2, keepdim=True).to(stored[0].dtype).float()
    known = torch.cat([known - centre, where], dim=-1).flatten(0, 1)  # (P H, C, F)
    changed = torch.cat(list(changes))
    means = places.means(changed, SHRINK_ROWS)
    squares, gram = _system(known)
    weights = torch.cholesky_solve(
        known.transpose(1, 2) @ (changed - places.of_computed(means)), torch.linalg.cholesky(gram)
    )
    units = 1 / gram.diagonal(dim1=1, dim2=2)[..., None]
    units /= (squares[:, None] @ units).clamp_min(1e-12)
    # The scale is taken into what places are multiplied by, so that those of all rows are the same everywhere.
    scales = scale.expand(-1, heads, 1, 1).flatten(0, 1)
    weights[:, size:] *= scales
    units[:, size:] *= scales.square()
    whole = (centre.flatten(0, 1), units, weights, means)
    return [_Fit(*parts) for parts in zip(*(part.chunk(len(stored)) for part in whole), strict=True)]


def _spread(known: Tensor) -> Tensor:
    """(P, 1, 1, 1): the standard deviation of each part of known (P, H, C, D). std() takes 30 times as long."""
    about = known - known.mean((1, 2, 3), keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(about, dim=(1, 2, 3), keepdim=True)
    return norm / math.sqrt(max(known[0].numel() - 1, 1))


def _system(known: Tensor) -> tuple[Tensor, Tensor]:
    """Of known (H, C, F), about its mean: mean squares of the features (H, F), and the ridged gram (H, F, F)."""
    rows, size = known.shape[1:]
    gram = known.transpose(1, 2) @ known
    diagonal = gram.diagonal(dim1=1, dim2=2)  # a view
    squares = diagonal / rows
    diagonal += (RIDGE * size / rows * diagonal.mean(1) + 1e-6)[:, None]
    return squares, gram
