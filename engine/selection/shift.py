"""The shift: what stored rows that are not computed again get, foretold from those that are.

What an isolated chunk's KV lacks is not noise: the text before it pulls all its rows the same way, and draws them away
from what they had from the chunk alone. So the change of a computed row says something of rows that resemble it, or
that stand near it. In each layer of each prompt, with H key heads of D numbers, a run of n rows, C of them computed:

1. Observed   dX (C, F), F = 2 H D: of the computed rows new minus stored, keys un-rotated to position 0, so that they
              compare wherever they stand, beside values                                        `LayerChange`
2. Fitted     W (C, F) = (S + 0.3 I)^-1 dX, with S (C, C) the similarity of computed rows       `KernelShift.delta`
3. Added      s(i, C) W (F,) to each row i, its keys rotated to where it stands                 `Delta`
4. Trusted    times 0.8 C / (C + D / 2): what is fitted to few rows is a guess, the more so the more there is to tell.
              And far from all computed rows s is nothing, so that nothing is added there.

    s(i, j) = (1 + 2 [same chunk] exp(-|i - j| / 128)) / sqrt(1 + d(i, j)^2)

d^2 is the squared distance of what is stored for two rows: keys (un-rotated) and values of all heads, each in units of
its own spread, together in units of a quarter of the mean among computed rows. Together these say nearly what the
layer's input was, and what resembles what hardly changes from layer to layer: where many rows are computed, three take
what the first of them says.
1 / sqrt(1 + d^2), the inverse multiquadric, is as good as exp(-d) and one step.

This is kernel ridge regression, the mean of a Gaussian process (Rasmussen and Williams, 2006, §2.2). Nothing is trained
beforehand. Ours; what it is worth, and how little hangs on the numbers: docs/methods.md. Cost: products of 2 n C F a
layer, where similarity is made twice that and a system of C unknowns; of more than MAX_FITTED_ROWS computed rows as many
are fitted, evenly.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

STRENGTH = 0.8
NEAR_GAIN = 2.0
NEAR_TOKENS = 128.0
# How much of a change neither similarity nor place explains: added to a computed row's own s, 1 + NEAR_GAIN.
NOISE = 0.3
LENGTH = 0.25
SHRINK_SIZES = 0.5
MAX_FITTED_ROWS = 768
MAX_CHOLESKY_SIZE = 128
# Layers that take one layer's similarity: what resembles what hardly changes from one to the next (docs/methods.md).
# From few rows all is told that can be: it costs less, and sharing would lose more.
SHARED_LAYERS, FEW_FITTED = 3, 256


@dataclass(frozen=True)
class ShiftContext:
    """What is the same in all layers of a request: positions computed (C,) that had stored KV, and chunks that may be
    shifted, (start, stop) each; dtype: of what is stored, as it is compared.
    """

    computed: Tensor
    chunks: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    _latest: list["Similarity"] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def picked(self) -> Tensor:
        """(C',) places among the computed rows of those that are fitted."""
        count = self.computed.numel()
        return evenly_spread(torch.arange(count, device=self.computed.device), MAX_FITTED_ROWS)

    @cached_property
    def fitted(self) -> Tensor:
        """(C',) ascending positions of the fitted rows."""
        return self.computed[self.picked]

    @cached_property
    def nearness(self) -> list[tuple[slice, slice, Tensor]]:
        """Of each chunk its rows, its fitted rows, and (rows, fitted rows) of dtype, 1 + 2 exp(-distance / 128).

        On a CPU, so that what lies between the products fits into its cache. An accelerator takes all chunks as one,
        for there calls cost more; what lies between them is computed, or exact, and near nothing.
        """
        found, edges = [], torch.tensor(self.chunks, dtype=torch.long, device=self.fitted.device)
        for (begin, end), (first, last) in zip(
            self.chunks, torch.searchsorted(self.fitted, edges).tolist(), strict=True
        ):
            rows = torch.arange(begin, end, device=self.fitted.device)
            apart = (rows[:, None] - self.fitted[first:last]).abs()
            gain = 1 + NEAR_GAIN * (-apart / NEAR_TOKENS).exp()
            found.append((slice(begin, end), slice(first, last), gain.to(self.dtype)))
        if not found or not shifts_chunks_together(self.fitted.device):
            return found
        begin, end = self.chunks[0][0], self.chunks[-1][1]
        gains = torch.ones(end - begin, self.fitted.numel(), dtype=self.dtype, device=self.fitted.device)
        for chunk, those, gain in found:
            gains[chunk.start - begin : chunk.stop - begin, those] = gain
        return [(slice(begin, end), slice(0, self.fitted.numel()), gains)]

    @cached_property
    def between(self) -> Tensor:
        """Of the rows of `nearness`, where they are one run, those that stand in none of the chunks."""
        (rows, _, _), *others = self.nearness
        apart = torch.ones(0 if others else rows.stop - rows.start, dtype=torch.bool)
        for begin, end in self.chunks:
            apart[begin - rows.start : end - rows.start] = False
        return apart.nonzero().squeeze(1).to(self.fitted.device)

    def similarity(self, change: "LayerChange") -> "Similarity":
        """By what this layer stored, or one of the SHARED_LAYERS - 1 before it where many rows are fitted."""
        shared = SHARED_LAYERS if self.fitted.numel() > FEW_FITTED else 1
        if not self._latest or change.layer >= self._latest[0].layer + shared:
            self._latest[:] = [Similarity.of(change)]
        return self._latest[0]


@dataclass(frozen=True)
class LayerChange:
    """What computing did to stored rows, in one layer, and what is stored there for all.

    keys, values (H, C, D) float32: new minus stored, of run.computed. stored(positions): keys and values (H, n, D) of
    run.dtype, as stored, of a run of rows or of some. All keys are un-rotated, to position 0; unrotated(keys (H, m, D),
    positions (m,)) does that to others, of the same layer.
    """

    layer: int
    context: ShiftContext
    keys: Tensor
    values: Tensor
    stored: Callable[[Tensor | slice], tuple[Tensor, Tensor]]
    unrotated: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Delta:
    """What to add to stored KV from position start on: keys (un-rotated) and values, of any dtype, (H, n, D).

    What is added to rows that are computed is written over.
    """

    start: int
    keys: Tensor
    values: Tensor


class KernelShift:
    """The delta predictor of `probe-shift`; any policy may have it."""

    def deltas(self, change: LayerChange) -> Iterator[Delta]:
        """What to add in one layer; nothing where fewer than two rows were computed, which tell no distance."""
        run = change.context
        if run.computed.numel() < 2:
            return
        similarity = run.similarity(change)
        observed = _flat(*(part[:, run.picked] for part in (change.keys, change.values)))
        trust = STRENGTH * len(observed) / (len(observed) + SHRINK_SIZES * change.keys.shape[-1])
        padded = pad((trust * observed).to(run.dtype), (0, 0, 0, len(similarity.inverse) - len(observed)))
        weights = similarity.inverse @ padded  # (C, F)
        of_keys = change.keys.shape[0] * change.keys.shape[-1]
        for (rows, _, _), near in zip(run.nearness, similarity.near, strict=True):
            added = near @ weights  # (n, F)
            keys, values = added[:, :of_keys], added[:, of_keys:]
            yield Delta(rows.start, _by_head(keys, change.keys), _by_head(values, change.values))


@dataclass(frozen=True)
class Similarity:
    """How rows resemble the fitted ones, by what `layer` stored for them.

    inverse (C, C): (S + 0.3 I)^-1. near: s(i, C) (n, C) of the rows of `ShiftContext.nearness`. C is an even number, and the
    last may be of zeros: of an odd one oneDNN's bfloat16 product reads, times zero, what is behind a row.
    """

    layer: int
    inverse: Tensor
    near: Sequence[Tensor]

    @classmethod
    def of(cls, change: LayerChange) -> "Similarity":
        run = change.context
        known = change.stored(run.fitted)
        scale = RowScale.of(*known)
        fitted = scale.compared(*known)
        others, odd = _mirrored(fitted), len(fitted) % 2
        system, near = _similar(fitted, others).float(), list[Tensor]()
        for chunk, those, gain in run.nearness:
            system[those, those].mul_(gain[run.fitted[those] - chunk.start])
            rows = fitted.new_zeros(len(gain), len(fitted) + odd)
            _similar(scale.compared(*change.stored(chunk)), others, rows[:, : len(fitted)])
            rows[:, those].mul_(gain)
            if run.between.numel():
                rows[run.between] = 0  # not times: what is not written yet may be no number
            near.append(rows)
        system.diagonal().add_(NOISE)
        return cls(change.layer, pad(_inverse(system).to(fitted), (0, odd, 0, odd)), near)


@dataclass(frozen=True)
class RowScale:
    """What makes stored rows comparable, as the fitted ones have it: of keys and of values what is added (H, 1, D), and
    a factor before that.
    """

    added: Sequence[Tensor]
    factors: Sequence[Tensor]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "RowScale":
        parts = keys.float(), values.float()
        means = [part.mean(1, keepdim=True) for part in parts]
        count, size = keys.shape[1], keys.shape[0] * (keys.shape[2] + values.shape[2])
        # With a spread of 1 in either, the mean square of what two rows differ by is 2 count / (count - 1) a number.
        unit = LENGTH * 2 * size * count / (count - 1)
        # Rows that are all alike (one token, again and again) differ by what rounding left of them, which is no unit.
        told = torch.finfo(keys.dtype).eps ** 2
        spreads = [
            (part - mean).square_().mean() + told * mean.square().mean()
            for part, mean in zip(parts, means, strict=True)
        ]
        factors = [(unit * (spread + 1e-12)).rsqrt().to(keys) for spread in spreads]
        return cls([(-mean * by).to(keys) for mean, by in zip(means, factors, strict=True)], factors)

    def compared(self, keys: Tensor, values: Tensor) -> Tensor:
        """(n, F + 4): rows i in these units, then |i|^2 in two numbers, for in one bfloat16 would lose a large row's
        distance to its like, and two of 1.
        """
        size = keys.shape[0] * (keys.shape[2] + values.shape[2])
        rows, filled = keys.new_empty(keys.shape[1], size + 4), 0
        for part, added, by in zip((keys, values), self.added, self.factors, strict=True):
            heads, _, width = part.shape
            place = rows[:, filled : filled + heads * width].unflatten(1, (heads, width)).transpose(0, 1)
            torch.addcmul(added, part, by, out=place)
            filled += heads * width
        _in_two(rows[:, :size].float().square().sum(1), rows[:, size : size + 2])
        rows[:, size + 2 :] = 1
        return rows


def _mirrored(rows: Tensor) -> Tensor:
    """Of compared rows j: -2 j, 1, 1, 1 + |j|^2 in two, whose products with compared rows i are 1 + |i - j|^2."""
    size = rows.shape[1] - 4
    mirrored = torch.cat([-2 * rows[:, :size], rows[:, size + 2 :], rows[:, size + 2 :]], dim=1)
    _in_two(rows[:, size : size + 2].float().sum(1) + 1, mirrored[:, size + 2 :])
    return mirrored


def _similar(rows: Tensor, others: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / sqrt(1 + d^2) of which the products are 1 + d^2; rounding may leave less than 1."""
    return torch.mm(rows, others.T, out=out).clamp_min_(1).rsqrt_()


def _inverse(system: Tensor) -> Tensor:
    """Of a symmetric positive definite (n, n), float32, by halves.

    On a CPU one factor of 400 unknowns and its triangular systems take twice as long as products and factors of 100.
    """
    count = len(system)
    if count <= MAX_CHOLESKY_SIZE or system.device.type != "cpu":
        factor, _ = torch.linalg.cholesky_ex(
            system
        )  # the other one waits for the device, to say what cannot be
        return torch.cholesky_inverse(factor)
    half, inverse = count // 2, torch.empty_like(system)
    first = _inverse(system[:half, :half])
    across = first @ system[:half, half:]
    last = _inverse(torch.addmm(system[half:, half:], system[half:, :half], across, alpha=-1))
    between = across @ last
    torch.addmm(first, between, across.T, out=inverse[:half, :half])
    inverse[:half, half:] = between.neg_()
    inverse[half:, :half], inverse[half:, half:] = between.T, last
    return inverse


def _in_two(numbers: Tensor, out: Tensor) -> None:
    """out (n, 2), of any dtype: float32 numbers (n,) rounded, and what that left of them."""
    out[:, 0] = numbers
    out[:, 1] = numbers - out[:, 0]


def _flat(*parts: Tensor) -> Tensor:
    """(H, n, D) each -> (n, F)"""
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1)


def _by_head(flat: Tensor, like: Tensor) -> Tensor:
    """(n, H D) -> (H, n, D), as a view."""
    return flat.view(flat.shape[0], like.shape[0], like.shape[-1]).transpose(0, 1)


def shifts_chunks_together(device: torch.device) -> bool:
    """Whether chunks are shifted together."""
    return device.type != "cpu"


def evenly_spread(rows: Tensor, count: int) -> Tensor:
    """`count` of the ascending rows (R,), evenly; all of them where there are no more."""
    if count >= rows.numel():
        return rows
    each = rows.numel() / max(count, 1)
    # On the host, in numbers that Apple's devices have not.
    return rows[((torch.arange(count, dtype=torch.float64) + 0.5) * each).long().to(rows.device)]
