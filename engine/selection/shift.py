"""The shift: what stored rows that are not computed again get, foretold from those that are.

What an isolated chunk's KV lacks is not noise: the text before it pulls all its rows the same way, and draws them away
from what they had from the chunk alone. So the change of a computed row says something of rows that resemble it, or
that stand near it. In each layer of each prompt, with H key heads of D numbers, a run of n rows, C of them computed:

1. Observed   dX (C, F), F = 2 H D: of the computed rows new minus stored, keys un-rotated to position 0, so that they
              compare wherever they stand, beside values                                        `Change`
2. Fitted     W (C, F) = (S + 0.3 I)^-1 dX, with S (C, C) the similarity of computed rows       `KernelShift.delta`
3. Added      s(i, C) W (F,) to each row i, its keys rotated to where it stands                 `Delta`
4. Trusted    times 0.8 C / (C + D / 2): what is fitted to few rows is a guess, the more so the more there is to tell.
              And far from all computed rows s is nothing, so that nothing is added there.

    s(i, j) = (1 + 2 [same chunk] exp(-|i - j| / 128)) / sqrt(1 + d(i, j)^2)

d^2 is the squared distance of what is stored for two rows: keys (un-rotated) and values of all heads, each in units of
its own spread, together in units of a quarter of the mean among computed rows. Together these say nearly what the
layer's input was. 1 / sqrt(1 + d^2), the inverse multiquadric, is as good as exp(-d) and one step.

This is kernel ridge regression, the mean of a Gaussian process (Rasmussen and Williams, 2006, §2.2). Nothing is trained
beforehand. Ours; what it is worth, and how little hangs on the numbers: docs/methods.md. Cost: products of 4 n C F and
a system of C unknowns a layer; of more than MOST_FITTED computed rows as many are fitted, evenly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ragblend.engine.plan import Plan

STRENGTH = 0.8
NEAR_GAIN = 2.0
NEAR_TOKENS = 128.0
# How much of a change neither similarity nor place explains: added to a computed row's own s, 1 + NEAR_GAIN.
NOISE = 0.3
LENGTH = 0.25
SHRINK_SIZES = 0.5
MOST_FITTED = 768


@dataclass(frozen=True)
class Run:
    """Rows start to stop, which may be shifted, and computed (C,), positions: the same in all layers of a request.

    chunks: where each chunk in the run begins and ends, counted from start.
    """

    start: int
    stop: int
    computed: Tensor
    chunks: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, plan: Plan, start: int, stop: int, computed: Tensor) -> "Run":
        edges = ((max(span.start, start) - start, min(span.stop, stop) - start) for span in plan.spans)
        return cls(start, stop, computed, [(begin, end) for begin, end in edges if begin < end])

    @cached_property
    def picked(self) -> Tensor:
        """(C',) places among the computed rows of those that are fitted."""
        count = self.computed.numel()
        return evenly_spread(torch.arange(count, device=self.computed.device), MOST_FITTED)

    @cached_property
    def fitted(self) -> Tensor:
        """(C',) ascending: where the fitted rows stand, counted from start."""
        return self.computed[self.picked] - self.start

    @cached_property
    def nearness(self) -> list[tuple[slice, slice, Tensor]]:
        """Of each chunk its rows, its fitted rows, and (rows, fitted rows) float32, 1 + 2 exp(-distance / 128)."""
        found = []
        for begin, end in self.chunks:
            first, last = (int(torch.searchsorted(self.fitted, edge)) for edge in (begin, end))
            rows = torch.arange(begin, end, device=self.fitted.device)
            apart = (rows[:, None] - self.fitted[first:last]).abs()
            gain = 1 + NEAR_GAIN * (-apart / NEAR_TOKENS).exp()
            found.append((slice(begin, end), slice(first, last), gain))
        return found


@dataclass(frozen=True)
class Change:
    """What computing did to stored rows, in one layer, and what is stored there for all.

    keys, values (H, C, D) float32: new minus stored, of run.computed; stored_keys, stored_values (H, n, D), bfloat16 in
    a model of that dtype, else float32: what is stored for the rows of the run (zeros in rows among them that are not
    stored). All keys are un-rotated, to position 0; unrotated(keys (H, m, D), positions (m,)) does that to others, of
    the same layer.
    """

    layer: int
    run: Run
    keys: Tensor
    values: Tensor
    stored_keys: Tensor
    stored_values: Tensor
    unrotated: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Delta:
    """What to add to the stored KV of the rows of a run: keys (at position 0) and values, of any dtype, (H, n, D).

    Rows that are computed, that nothing can change, or that have no stored KV, get nothing of it.
    """

    keys: Tensor
    values: Tensor


class KernelShift:
    """The delta predictor of `probe-shift`; any policy may have it."""

    def delta(self, change: Change) -> Delta | None:
        """What to add in one layer; None where fewer than two rows were computed, which tell no distance."""
        run, keys, values = change.run, change.stored_keys, change.stored_values
        if run.computed.numel() < 2:
            return None
        observed = torch.cat([_flat(part[:, run.picked]) for part in (change.keys, change.values)], dim=1)
        rows, fitted_rows, similarity = _compared(change)
        nearness = [(chunk, fitted, gain.to(rows)) for chunk, fitted, gain in run.nearness]
        for chunk, fitted, gain in nearness:
            similarity[fitted, fitted] *= gain[run.fitted[fitted] - chunk.start].float()
        similarity.diagonal().add_(NOISE)
        trust = STRENGTH * len(observed) / (len(observed) + SHRINK_SIZES * keys.shape[-1])
        factor, _ = torch.linalg.cholesky_ex(
            similarity
        )  # the other one waits for the device, to say what cannot be
        weights = torch.cholesky_solve(trust * observed, factor).to(rows)  # (C, F)

        # Chunk by chunk, so that what lies between the two products fits into a processor's cache.
        added = rows.new_zeros(len(rows), weights.shape[1])  # (n, F)
        room = rows.new_empty(max(end - begin for begin, end in run.chunks), len(fitted_rows))
        for chunk, fitted, gain in nearness:
            # 1 + d^2, of which rounding may leave less than 1.
            near = torch.mm(rows[chunk], fitted_rows.T, out=room[: len(gain)]).clamp_min_(1).rsqrt_()
            near[:, fitted] *= gain
            torch.mm(near, weights, out=added[chunk])
        of_keys = keys.shape[0] * keys.shape[-1]
        return Delta(_by_head(added[:, :of_keys], keys), _by_head(added[:, of_keys:], values))


def _compared(change: Change) -> tuple[Tensor, Tensor, Tensor]:
    """rows (n, F + 4) and fitted rows (C, F + 4), whose products are 1 + d^2; and (C, C) 1 / sqrt(1 + d^2)."""
    stored, at = (change.stored_keys, change.stored_values), change.run.fitted
    fitted = [part[:, at].float() for part in stored]
    means = [part.mean(1, keepdim=True) for part in fitted]
    fitted = [part - mean for part, mean in zip(fitted, means, strict=True)]
    scales = [(part.square().mean() + 1e-12).rsqrt() for part in fitted]
    flat = torch.cat([_flat(part * scale) for part, scale in zip(fitted, scales, strict=True)], dim=1)
    apart = torch.cdist(flat, flat, compute_mode="use_mm_for_euclid_dist").square_().fill_diagonal_(0)
    count, size = flat.shape
    unit = LENGTH * apart.sum() / (count * (count - 1)) + 1e-12

    rows, filled = stored[0].new_empty(stored[0].shape[1], size + 4), 0
    for part, mean, scale in zip(stored, means, scales, strict=True):
        heads, _, width = part.shape
        place = rows[:, filled : filled + heads * width].unflatten(1, (heads, width)).transpose(0, 1)
        by = (scale * unit.rsqrt()).to(part)
        torch.addcmul(-(mean * by).to(part), part, by, out=place)
        filled += heads * width
    # d^2 = |i|^2 - 2 i.j + |j|^2 as one product: i, |i|^2, 1 times -2 j, 1, |j|^2. In bfloat16 a square needs two
    # numbers: rounded to one, a large row's distance to its like could be below 0.
    squares = torch.linalg.vector_norm(rows[:, :size], dim=1, dtype=torch.float32).square_()
    rows[:, size : size + 2] = _in_two(squares, rows)
    rows[:, size + 2 :] = 1
    others = rows[at]
    squares = _in_two(squares[at] + 1, rows)
    others = torch.cat([-2 * others[:, :size], others[:, size + 2 :], squares], dim=1)
    return rows, others, (apart / unit + 1).rsqrt_()


def _in_two(numbers: Tensor, like: Tensor) -> Tensor:
    """(n, 2), of like's dtype: float32 numbers (n,) rounded, and what that left of them."""
    rounded = numbers.to(like)
    return torch.stack([rounded, (numbers - rounded.float()).to(like)], dim=1)


def _flat(part: Tensor) -> Tensor:
    """(H, n, D) -> (n, H D)"""
    return part.transpose(0, 1).flatten(1)


def _by_head(flat: Tensor, like: Tensor) -> Tensor:
    """(n, H D) -> (H, n, D), as a view."""
    return flat.view(flat.shape[0], like.shape[0], like.shape[-1]).transpose(0, 1)


def evenly_spread(rows: Tensor, count: int) -> Tensor:
    """`count` of the ascending rows (R,), evenly; all of them where there are no more."""
    if count >= rows.numel():
        return rows
    each = rows.numel() / max(count, 1)
    return rows[((torch.arange(count, device=rows.device, dtype=torch.float64) + 0.5) * each).long()]
