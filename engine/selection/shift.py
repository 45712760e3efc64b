"""The shift: predicts the change of stored rows that are not recomputed from the change of those that are.

The error of a chunk's isolated KV is not noise: the text before it changes all its rows in the same direction. So the
change of a recomputed row predicts that of rows that are similar to it, or near it. In each layer of each prompt, with
H key heads of D dimensions, n rows, C of them recomputed:

1. Observe    dX (C, F), F = 2 H D: new minus stored KV of the recomputed rows, with keys un-rotated to position 0, so
              that positions do not matter                                                      `LayerChange`
2. Fit        W (C, F) = (S + 0.3 I)^-1 dX, with S (C, C) the similarity of recomputed rows     `KernelShift.deltas`
3. Add        s(i, C) W (F,) to each row i, with keys rotated to its position                   `Delta`
4. Shrink     by 0.8 C / (C + D / 2): a fit to few rows is a guess, the more so the more dimensions there are.
              Far from all recomputed rows s is zero, so nothing is added there.

    s(i, j) = (1 + 2 [same chunk] exp(-|i - j| / 128)) / sqrt(1 + d(i, j)^2)

d^2 is the squared distance of two rows' stored keys (un-rotated) and values over all heads, each scaled by its spread,
in units of a quarter of its mean among the recomputed rows. Keys and values nearly determine the layer's input, and
similarity hardly changes from layer to layer: if many rows are recomputed, three layers share the first one's.
1 / sqrt(1 + d^2), the inverse multiquadric, is as good as exp(-d), and one operation.

This is kernel ridge regression, the mean of a Gaussian process (Rasmussen and Williams, 2006, §2.2), without training.
Ours; results, and how little depends on the constants: docs/methods.md. Cost: products of 2 n C F per layer, and for
similarity twice that and a system of C unknowns. Of more than MAX_FITTED_ROWS recomputed rows that many are fitted,
evenly spread.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ragblend.engine.model.device import fastest_s

NEAR_GAIN = 2.0  # s of near rows is up to 1 + NEAR_GAIN times as large
NEAR_TOKENS = 128.0
# Step 2: the part of a change that neither similarity nor position explains, added to s of a row with itself.
NOISE = 0.3
LENGTH_SCALE = 0.25  # d^2 is in units of this share of its mean among recomputed rows
# Step 4: a correction is multiplied by STRENGTH C / (C + SHRINK_PER_DIMENSION D).
STRENGTH, SHRINK_PER_DIMENSION = 0.8, 0.5
MAX_FITTED_ROWS = 768
MAX_CHOLESKY_SIZE = 128
# Layers that share one layer's similarity, which hardly changes from one to the next (docs/methods.md). With few rows
# it is computed in each layer: that costs less, and sharing would lose more.
SHARED_LAYERS, FEW_FITTED = 3, 256


@dataclass(frozen=True)
class ShiftContext:
    """State that all layers of a request share.

    computed (C,): positions of recomputed rows that had stored KV; chunks: (start, stop) of those that may be shifted;
    dtype: in which stored rows are compared.
    """

    computed: Tensor
    chunks: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    _shared: list["Similarity"] = field(default_factory=list, init=False, repr=False, compare=False)

    @cached_property
    def picked(self) -> Tensor:
        """(C',) indices of the fitted rows among the recomputed ones."""
        count = self.computed.numel()
        return evenly_spread(torch.arange(count, device=self.computed.device), MAX_FITTED_ROWS)

    @cached_property
    def fitted(self) -> Tensor:
        """(C',) ascending positions of the fitted rows."""
        return self.computed[self.picked]

    @cached_property
    def nearness(self) -> list[tuple[slice, slice, Tensor]]:
        """For each chunk its rows, its fitted rows, and the gain (rows, fitted rows), 1 + 2 exp(-distance / 128).

        By chunk on a CPU, so that intermediate results fit into its cache. On an accelerator, where calls cost more,
        all chunks are one range; rows between chunks, recomputed or exact, have no near rows.
        """
        by_chunk, edges = [], torch.tensor(self.chunks, dtype=torch.long, device=self.fitted.device)
        for (begin, end), (first, last) in zip(
            self.chunks, torch.searchsorted(self.fitted, edges).tolist(), strict=True
        ):
            rows = torch.arange(begin, end, device=self.fitted.device)
            distance = (rows[:, None] - self.fitted[first:last]).abs()
            gain = 1 + NEAR_GAIN * (-distance / NEAR_TOKENS).exp()
            by_chunk.append((slice(begin, end), slice(first, last), gain.to(self.dtype)))
        if not by_chunk or not shifts_chunks_together(self.fitted.device):
            return by_chunk
        begin, end = self.chunks[0][0], self.chunks[-1][1]
        gains = torch.ones(end - begin, self.fitted.numel(), dtype=self.dtype, device=self.fitted.device)
        for chunk, fitted, gain in by_chunk:
            gains[chunk.start - begin : chunk.stop - begin, fitted] = gain
        return [(slice(begin, end), slice(0, self.fitted.numel()), gains)]

    @cached_property
    def between_chunks(self) -> Tensor:
        """Indices of the rows outside chunks, if `nearness` has all chunks as one range."""
        (rows, _, _), *others = self.nearness
        outside = torch.ones(0 if others else rows.stop - rows.start, dtype=torch.bool)
        for begin, end in self.chunks:
            outside[begin - rows.start : end - rows.start] = False
        return outside.nonzero().squeeze(1).to(self.fitted.device)

    def similarity(self, change: "LayerChange") -> "Similarity":
        """This layer's similarity; with many fitted rows, that of one of the SHARED_LAYERS - 1 before it."""
        shared = SHARED_LAYERS if self.fitted.numel() > FEW_FITTED else 1
        if not self._shared or change.layer >= self._shared[0].layer + shared:
            self._shared[:] = [Similarity.of(change)]
        return self._shared[0]


@dataclass(frozen=True)
class LayerChange:
    """How recomputing changed stored rows in one layer, and access to all stored rows.

    keys, values (H, C, D) float32: new minus stored, of context.computed. stored(positions): stored keys and values
    (H, n, D) of context.dtype, of a slice or of positions. All keys are un-rotated to position 0; unrotated(keys
    (H, m, D), positions (m,)) does that to other keys of the layer. by_row (C, F): the same changes in one tensor, if
    they were computed so.
    """

    layer: int
    context: ShiftContext
    keys: Tensor
    values: Tensor
    stored: Callable[[Tensor | slice], tuple[Tensor, Tensor]]
    unrotated: Callable[[Tensor, Tensor], Tensor]
    by_row: Tensor | None = None

    def observed(self, picked: Tensor) -> Tensor:
        """(C', F): the changes of these of the computed rows."""
        if self.by_row is not None:
            return self.by_row.index_select(0, picked)
        return torch.cat(
            [part[:, picked].transpose(0, 1).flatten(1) for part in (self.keys, self.values)], dim=1
        )


@dataclass(frozen=True)
class Delta:
    """A correction of stored KV from position `start` on: keys (un-rotated) and values, of any dtype, (H, n, D).

    Recomputed rows in that range are overwritten later.
    """

    start: int
    keys: Tensor
    values: Tensor


class KernelShift:
    """The delta predictor of `probe-shift`, for any policy."""

    def deltas(self, change: LayerChange) -> Iterator[Delta]:
        """The corrections of one layer; none if fewer than two rows were recomputed, because distances need two."""
        context = change.context
        if context.computed.numel() < 2:
            return
        similarity = context.similarity(change)
        observed = change.observed(context.picked)  # (C, F)
        trust = STRENGTH * len(observed) / (len(observed) + SHRINK_PER_DIMENSION * change.keys.shape[-1])
        padded = pad((trust * observed).to(context.dtype), (0, 0, 0, len(similarity.inverse) - len(observed)))
        weights = similarity.inverse @ padded  # (C, F)
        key_width = change.keys.shape[0] * change.keys.shape[-1]
        for (rows, _, _), near in zip(context.nearness, similarity.near, strict=True):
            added = near @ weights  # (n, F)
            keys, values = added[:, :key_width], added[:, key_width:]
            yield Delta(rows.start, _by_head(keys, change.keys), _by_head(values, change.values))


@dataclass(frozen=True)
class Similarity:
    """Similarity of rows to the fitted ones, from their stored KV in `layer`.

    inverse (C, C): (S + 0.3 I)^-1. near: s(i, C) (n, C) of the rows of `ShiftContext.nearness`. C is padded with zeros
    (`padding`).
    """

    layer: int
    inverse: Tensor
    near: Sequence[Tensor]

    @classmethod
    def of(cls, change: LayerChange) -> "Similarity":
        context = change.context
        stored = change.stored(context.fitted)
        scale = RowScale.of(*stored)
        fitted = scale.scaled(*stored)
        others, extra = _mirrored(fitted), padding(len(fitted), fitted.device)
        system, near = _similar(fitted, others).float(), list[Tensor]()
        for chunk, in_chunk, gain in context.nearness:
            system[in_chunk, in_chunk].mul_(gain[context.fitted[in_chunk] - chunk.start])
            rows = fitted.new_zeros(len(gain), len(fitted) + extra)
            _similar(scale.scaled(*change.stored(chunk)), others, rows[:, : len(fitted)])
            rows[:, in_chunk].mul_(gain)
            if context.between_chunks.numel():
                rows[context.between_chunks] = 0  # not multiplied: unwritten rows may hold NaN
            near.append(rows)
        system.diagonal().add_(NOISE)
        return cls(change.layer, pad(_inverse(system).to(fitted), (0, extra, 0, extra)), near)


@dataclass(frozen=True)
class RowScale:
    """Scales stored rows for comparison, by the fitted rows' mean and spread.

    A number is scaled to factor * number + offset. offsets (H, 1, D) and factors (), of keys and of values.
    """

    offsets: Sequence[Tensor]
    factors: Sequence[Tensor]

    @classmethod
    def of(cls, keys: Tensor, values: Tensor) -> "RowScale":
        parts = keys.float(), values.float()
        means = [part.mean(1, keepdim=True) for part in parts]
        count, size = keys.shape[1], keys.shape[0] * (keys.shape[2] + values.shape[2])
        # With a spread of 1, the mean squared difference of two rows is 2 count / (count - 1) per dimension.
        unit = LENGTH_SCALE * 2 * size * count / (count - 1)
        # Equal rows (a repeated token) differ only by rounding, which must not become the unit.
        rounding = torch.finfo(keys.dtype).eps ** 2
        spreads = [
            (part - mean).square_().mean() + rounding * mean.square().mean()
            for part, mean in zip(parts, means, strict=True)
        ]
        factors = [(unit * (spread + 1e-12)).rsqrt().to(keys) for spread in spreads]
        return cls([(-mean * factor).to(keys) for mean, factor in zip(means, factors, strict=True)], factors)

    def scaled(self, keys: Tensor, values: Tensor) -> Tensor:
        """(n, F + 4): scaled rows i, zeros (`padding`), then |i|^2 in two numbers and two ones. In a single bfloat16
        number a large row's distance to a similar one would be lost.
        """
        size = keys.shape[0] * (keys.shape[2] + values.shape[2])
        last = size + padding(size + 4, keys.device)
        rows, filled = keys.new_empty(keys.shape[1], last + 4), 0
        for part, offset, factor in zip((keys, values), self.offsets, self.factors, strict=True):
            heads, _, width = part.shape
            target = rows[:, filled : filled + heads * width].unflatten(1, (heads, width)).transpose(0, 1)
            torch.addcmul(offset, part, factor, out=target)
            filled += heads * width
        _split_in_two(rows[:, :size].float().square().sum(1), rows[:, last : last + 2])
        rows[:, size:last] = 0
        rows[:, last + 2 :] = 1
        return rows


def _mirrored(rows: Tensor) -> Tensor:
    """From compared rows j: -2 j, 1, 1, 1 + |j|^2 in two; their products with compared rows i are 1 + |i - j|^2."""
    size = rows.shape[1] - 4
    mirrored = torch.cat([-2 * rows[:, :size], rows[:, size + 2 :], rows[:, size + 2 :]], dim=1)
    _split_in_two(rows[:, size : size + 2].float().sum(1) + 1, mirrored[:, size + 2 :])
    return mirrored


def _similar(rows: Tensor, others: Tensor, out: Tensor | None = None) -> Tensor:
    """1 / sqrt(1 + d^2): the products are 1 + d^2, which rounding may make less than 1."""
    return torch.mm(rows, others.T, out=out).clamp_min_(1).rsqrt_()


def _inverse(system: Tensor) -> Tensor:
    """The inverse of a symmetric positive definite (n, n), float32, by recursive halves.

    On a CPU, factoring 400 unknowns and solving takes twice as long as products and factors of 100.
    """
    count = len(system)
    if count > MAX_CHOLESKY_SIZE and system.device.type != "cpu" and products_are_faster(system.device):
        return inverse_by_products(system)
    if count <= MAX_CHOLESKY_SIZE or system.device.type != "cpu":
        # `cholesky` would wait for the device to check for errors
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(system)[0])
    half, inverse = count // 2, torch.empty_like(system)
    first = _inverse(system[:half, :half])
    across = first @ system[:half, half:]
    last = _inverse(torch.addmm(system[half:, half:], system[half:, :half], across, alpha=-1))
    between = across @ last
    torch.addmm(first, between, across.T, out=inverse[:half, :half])
    inverse[:half, half:] = between.neg_()
    inverse[half:, :half], inverse[half:, half:] = between.T, last
    return inverse


def inverse_by_products(system: Tensor) -> Tensor:
    """The inverse of a similarity's system S (n, n), float32, by Newton's iteration (Schulz, 1933): X <- X (2 - S X).

    S has eigenvalues between NOISE and its largest sum of a row, at most n (1 + NEAR_GAIN) + NOISE. From a multiple X
    of the identity, those of S X lie within 1 - e and 1 + e; a step leaves 1 - e^2 and 1, which are scaled around 1
    again (Pan and Schreiber, 1991: half the steps), until e is nothing. Products are what a device does best.
    """
    count = len(system)
    largest = system.sum(1).max()
    inverse = torch.eye(count, device=system.device).mul_(2 / (largest + NOISE))
    error = 1 - 2 * NOISE / (count * (1 + NEAR_GAIN) + 2 * NOISE)
    while error > 1e-7:
        scale = 2 / (2 - error**2)
        inverse = torch.addmm(inverse, inverse, system @ inverse, beta=2 * scale, alpha=-scale)
        error = error**2 * scale / 2
    return inverse


@functools.cache
def products_are_faster(device: torch.device) -> bool:
    """Whether `inverse_by_products` is faster there than factoring; measured once, in some 20 ms."""
    system = torch.eye(MAX_FITTED_ROWS, device=device)

    def factored() -> Tensor:
        return torch.cholesky_inverse(torch.linalg.cholesky_ex(system)[0])

    return fastest_s(device, lambda: inverse_by_products(system)) < fastest_s(device, factored)


def _split_in_two(numbers: Tensor, out: Tensor) -> None:
    """out (n, 2), of any dtype: float32 numbers (n,) rounded, and the remainder."""
    out[:, 0] = numbers
    out[:, 1] = numbers - out[:, 0]


def _by_head(flat: Tensor, like: Tensor) -> Tensor:
    """(n, H D) -> (H, n, D), as a view."""
    return flat.view(flat.shape[0], like.shape[0], like.shape[-1]).transpose(0, 1)


def padding(count: int, device: torch.device) -> int:
    """How many numbers to add to a row of `count` numbers in a factor of a product.

    For an odd number oneDNN's bfloat16 product reads beyond each row, and multiplies that by zero. On a GPU products
    are several times slower for rows that are not aligned to 16 bytes.
    """
    return -count % (2 if device.type == "cpu" else 8)


def shifts_chunks_together(device: torch.device) -> bool:
    """Whether all chunks are shifted as one range."""
    return device.type != "cpu"


def evenly_spread(rows: Tensor, count: int) -> Tensor:
    """`count` of the ascending rows (R,), evenly spread; all of them if there are no more."""
    if count >= rows.numel():
        return rows
    each = rows.numel() / max(count, 1)
    # On the host: Apple's devices have no float64.
    return rows[((torch.arange(count, dtype=torch.float64) + 0.5) * each).long().to(rows.device)]
