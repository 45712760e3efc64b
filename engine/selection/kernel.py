"""The kernel form of a shift: a row changes as computed rows did that resemble it, or that stand near it.

Kernel ridge regression, which is the mean of a Gaussian process (Rasmussen and Williams, 2006, §2.2): with C the
computed rows and D their changes, row i gets strength x k(i, C) (k(C, C) + noise)^-1 D. Two rows resemble each other
by the keys and values that are stored for them, of all heads, keys turned back to position 0: together these say
nearly what the layer's input was. Rows of one chunk resemble each other more the nearer they stand. Far from all
computed rows the answer is nothing. k is the inverse multiquadric, 1 / sqrt(1 + d^2): as good as exp(-d) and one step.
Ours; what it is worth beside other forms, and how little hangs on the numbers below: docs/methods.md. Cost, for n rows
and c computed ones of F numbers: products of 4 n c F and a system of c unknowns a layer; of more than MOST_LEARNT
computed rows as many are taken, evenly.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ragblend.engine.controller import MOST_LEARNT
from ragblend.engine.plan import Plan
from ragblend.engine.selection.base import chunk_runs, spread_evenly
from ragblend.engine.selection.evidence import Change, Shift

# What a chunk's own rows count beside those of others: 1 + NEAR_GAIN where they stand together.
NEAR_GAIN = 2.0
# In how many tokens of a chunk that falls to its e-th part.
NEAR_TOKENS = 128.0
# What is added to a computed row's own kernel, 1 + NEAR_GAIN: how much of a change neither likeness nor place explains.
NOISE = 0.3
# At which part of the mean squared distance between learnt rows likeness begins to fall.
LENGTH = 0.25
# n computed rows count n / (n + D / 2), with heads of D numbers: what is learnt from few is a guess, the more so the
# more there is to tell, and those few are not like the others.
SHRINK_SIZES = 0.5


@dataclass(frozen=True)
class _Run:
    """One chunk's rows start..stop of the change's run, of which first..last of the learnt rows are.

    gain (stop - start, last - first): 1 + NEAR_GAIN x nearness.
    """

    start: int
    stop: int
    first: int
    last: int
    gain: Tensor


@dataclass(frozen=True)
class _Learnt:
    """What is the same in all layers of a request: which computed rows to learn from, and where all of them stand.

    of_change (C,): their places among the change's rows; of_run (C,): in its run of rows.
    """

    of_change: Tensor
    of_run: Tensor
    runs: tuple[_Run, ...]


def kernel_shift(strength: float, plan: Plan, change: Change) -> Shift | None:
    """The shift of one layer; None where fewer than two rows were computed, which tell no distance."""
    if change.rows.numel() < 2:
        return None
    learnt = _learnt(plan, change)
    rows, others, system = _likened(change, learnt.of_run)
    for run in learnt.runs:
        within = slice(run.first, run.last)
        system[within, within] *= run.gain[learnt.of_run[within] - run.start].float()
    system.diagonal().add_(NOISE)
    changes = torch.cat([_flat(part[:, learnt.of_change]) for part in (change.keys, change.values)], dim=1)
    trust = strength * changes.shape[0] / (changes.shape[0] + SHRINK_SIZES * change.stored_keys.shape[-1])
    factor, _ = torch.linalg.cholesky_ex(system)  # the other one waits for the device, to say what cannot be
    weights = torch.cholesky_solve(trust * changes, factor).to(rows)

    # Chunk by chunk, so that what lies between the two products fits into a processor's cache.
    shift = rows.new_zeros(rows.shape[0], weights.shape[1])
    longest = max(run.stop - run.start for run in learnt.runs)
    room = rows.new_empty(longest, others.shape[0])
    for run in learnt.runs:
        own = slice(run.start, run.stop)
        # 1 + d^2, of which rounding may leave less than 1.
        likeness = torch.mm(rows[own], others.T, out=room[: run.stop - run.start]).clamp_min_(1).rsqrt_()
        likeness[:, run.first : run.last] *= run.gain
        torch.mm(likeness, weights, out=shift[own])
    keys = change.stored_keys.shape[0] * change.stored_keys.shape[-1]
    return Shift(
        _by_head(shift[:, :keys], change.stored_keys), _by_head(shift[:, keys:], change.stored_values)
    )


def _likened(change: Change, learnt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rows (n, F + 4) and others (C, F + 4), whose products are 1 + d^2; and 1 / sqrt(1 + d^2) of the others, (C, C).

    d is the distance of two rows' features: each of keys and values in units of its own spread about the learnt rows'
    mean, both in units of a typical distance between learnt rows.
    """
    stored = change.stored_keys, change.stored_values
    known = [part[:, learnt].float() for part in stored]
    means = [part.mean(1, keepdim=True) for part in known]
    known = [part - mean for part, mean in zip(known, means, strict=True)]
    scales = [(part.square().mean() + 1e-12).rsqrt() for part in known]
    flat = torch.cat([_flat(part * scale) for part, scale in zip(known, scales, strict=True)], dim=1)
    apart = torch.cdist(flat, flat, compute_mode="use_mm_for_euclid_dist").square_().fill_diagonal_(0)
    count = flat.shape[0]
    unit = LENGTH * apart.sum() / (count * (count - 1)) + 1e-12

    size = flat.shape[1]
    rows = stored[0].new_empty(stored[0].shape[1], size + 4)
    at = 0
    for part, mean, scale in zip(stored, means, scales, strict=True):
        heads, _, width = part.shape
        place = rows[:, at : at + heads * width].unflatten(1, (heads, width)).transpose(0, 1)
        by = (scale * unit.rsqrt()).to(part)
        torch.addcmul(-(mean * by).to(part), part, by, out=place)
        at += heads * width
    # In bfloat16 a square needs two numbers: rounded to one, a large row's distance to its like could be below 0.
    squares = torch.linalg.vector_norm(rows[:, :size], dim=1, dtype=torch.float32).square_()
    rows[:, size] = squares
    rows[:, size + 1] = squares - rows[:, size].float()
    rows[:, size + 2 :] = 1
    others = rows[learnt]
    others = torch.cat([-2 * others[:, :size], others[:, size + 2 :], others[:, size : size + 2]], dim=1)
    squares = squares[learnt] + 1
    others[:, size + 2] = squares
    others[:, size + 3] = squares - others[:, size + 2].float()
    return rows, others, (apart / unit + 1).rsqrt_()


def _learnt(plan: Plan, change: Change) -> _Learnt:
    found = change.known.get("learnt")
    if isinstance(found, _Learnt):
        return found
    device, count = change.rows.device, change.rows.numel()
    picked = spread_evenly(torch.arange(count, device=device), MOST_LEARNT)
    where = change.rows[picked] - change.start  # ascending, as the chunks are
    dtype, runs = change.stored_keys.dtype, []
    for _, start, stop in chunk_runs(plan, change):
        first, last = (int(torch.searchsorted(where, edge)) for edge in (start, stop))
        apart = torch.arange(start, stop, device=device)[:, None] - where[first:last]
        gain = 1 + NEAR_GAIN * (-apart.abs() / NEAR_TOKENS).exp()
        runs.append(_Run(start, stop, first, last, gain.to(dtype)))
    learnt = change.known["learnt"] = _Learnt(picked, where, tuple(runs))
    return learnt


def _flat(part: Tensor) -> Tensor:
    """(H, n, D) -> (n, H D)"""
    return part.transpose(0, 1).flatten(1)


def _by_head(flat: Tensor, like: Tensor) -> Tensor:
    """(n, H D) -> (H, n, D), as a view."""
    return flat.view(flat.shape[0], like.shape[0], like.shape[-1]).transpose(0, 1)
