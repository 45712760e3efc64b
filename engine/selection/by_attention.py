"""Rows that the question attends to most, found by a probe: A3, ProphetKV, QCFuse, and our own.

The probe runs the fresh rows once over the stored KV, up to the last layer whose attention is collected. Each of those
layers scores its keys, a token's score is the mean over layers, and the highest are computed, with the fresh rows.
Missing chunks are left out of the probe, where they would cost as much as after it. The cost of the probe, taken from
the budget, is its rows that are computed again (all but the prompt's beginning), times its share of the layers.

    merged_heads    A3 (arXiv 2511.17560), equations 3 to 5
    summed_rows     ProphetKV (arXiv 2602.02579, ICML'26), first stage; QCFuse (arXiv 2606.05875), in middle layers
    rooted_squares  ours
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragblend.engine.plan import Plan, TokenKind
from ragblend.engine.selection import base
from ragblend.engine.selection.base import COLLECTED_ROWS, Attention, Policy, ProbeResult
from ragblend.engine.selection.shift import evenly_spread
from ragblend.engine.selection.static import nearness_to_beginning
from ragblend.kvstore.errors import UsageError

# The share of the budget that a probe may take. Without a limit, figures of short prompts were lost (docs/methods.md).
PROBE_SHARE = 0.6
# The number of rows that must remain for selection.
MIN_CHOSEN = 8
# If a shift is fitted, this many of the selected rows, at most a quarter, are an even sample of all rows, and this
# share are beginnings of chunks. The fit would otherwise see only rows that the question attends to, which change more.
CALIBRATION_ROWS = 48
BEGINNINGS = 0.2


def question_rows(plan: Plan) -> Tensor:
    """Rows of our probe: the fresh rows, but only the last ones of a long literal after the chunks (a conversation)."""
    rows = base.fresh_rows(plan)
    if int((rows >= plan.settled_tokens).sum()) > COLLECTED_ROWS:
        end = max(plan.suffix_start, plan.tokens - COLLECTED_ROWS)
        rows = rows[(rows < plan.settled_tokens) | (rows >= end)]
    return rows


@dataclass(frozen=True)
class ByAttention(Policy):
    """Selects the rows with the highest mean score over some layers' attention in a probe.

    layers(L): the layers of L whose attention is collected; score(plan, attention): (K,) float32 in one layer;
    smooth: (T,) -> (T,), of the mean score; probe(plan): (R,) fresh rows to run, or None: beginnings of chunks are
    computed instead, with an even sample for a shift; anchors(plan): the keys that the probe sees, as `probe_keys`;
    figure_gain: selected rows go to whole figures, best lines first, up to this many times the figures' share of the
    passages; cheaper_layers: used if probing `layers` would take more than PROBE_SHARE of the budget, and if these
    would too there is no probe. None: the probe may take the whole budget.
    """

    layers: Callable[[int], range]
    score: Callable[[Plan, Attention], Tensor]
    smooth: Callable[[Tensor], Tensor] | None = None
    probe: Callable[[Plan], Tensor | None] = base.fresh_rows
    cheaper_layers: Callable[[int], range] | None = field(default=None, kw_only=True)
    anchors: Callable[[Plan], Tensor] | None = field(default=None, kw_only=True)
    figure_gain: float = field(default=0.0, kw_only=True)
    needs_attention: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        if self.figure_gain < 0:
            raise UsageError(f"figure_gain must be at least 0, not {self.figure_gain}")

    def probe_rows(self, plan: Plan) -> Tensor | None:
        return self._affordable_probe(plan)[0] if base.can_choose(plan) else None

    def attention_layers(self, plan: Plan) -> range:
        return self._affordable_probe(plan)[1]

    def _affordable_probe(self, plan: Plan) -> tuple[Tensor | None, range]:
        """The probe's rows (None if a probe would exceed its share of the budget), and the layers that it scores."""
        rows, every = self.probe(plan), self.layers(plan.layers)
        if rows is None or self.cheaper_layers is None:
            return rows, every
        budget, repeated = base.budget_rows(plan), int((rows >= plan.settled_tokens).sum())
        cheaper = self.cheaper_layers(plan.layers)
        for layers in (every, cheaper):
            if repeated * layers.stop / plan.layers <= min(PROBE_SHARE * budget, budget - MIN_CHOSEN):
                return rows, layers
        return None, cheaper

    def probe_keys(self, plan: Plan) -> Tensor | None:
        return None if self.anchors is None else self.anchors(plan)

    def layer_scores(self, plan: Plan, attention: Attention) -> Tensor:
        return self.score(plan, attention)

    def passes(self, plan: Plan) -> list[tuple[float, float]]:
        probe = self.probe_rows(plan)
        if probe is None:
            return super().passes(plan)
        settled, layers = plan.settled_rows(probe), self.attention_layers(plan)
        stop = layers.stop
        probe_layers = stop if self.anchors is None else stop + len(layers) - 1
        repeated = probe.numel() * probe_layers - settled * stop
        count = base.budget_rows(plan, ProbeResult({}, repeated / plan.layers))
        rows = plan.always_tokens + min(count, plan.candidate_tokens)
        return [(probe.numel(), probe_layers), (rows - settled, stop), (rows, plan.layers - stop)]

    def scores(self, probed: ProbeResult) -> Tensor:
        """(T,) float32: the mean over layers, smoothed."""
        mean = torch.stack(list(probed.scores.values())).mean(0)
        return mean if self.smooth is None else self.smooth(mean)

    def rows(self, plan: Plan, probed: ProbeResult | None = None) -> Tensor:
        if not base.can_choose(plan):
            return base.needed_rows(plan) if plan.budget == 0 else base.inexact_rows(plan)
        count, nearness = base.budget_rows(plan, probed), nearness_to_beginning(plan)
        if probed is None:
            sample = count // 2 if self.shift is not None else 0
            return _select(plan, sample, (nearness, count - sample))
        sample = beginnings = 0
        if self.shift is not None:
            sample, beginnings = min(CALIBRATION_ROWS, count // 4), round(count * BEGINNINGS)
        best, scores = count - sample - beginnings, self.scores(probed)
        figures = whole_figures(plan, scores, self.figure_gain, best) if self.figure_gain else None
        return _select(plan, sample, (scores, best), (nearness, beginnings), figures=figures)


def _select(plan: Plan, sample: int, *ranked: tuple[Tensor, int], figures: Tensor | None = None) -> Tensor:
    """(R,) rows without stored KV, `sample` candidates evenly spread over all, and the best remaining candidates for
    each of `ranked`, (scores (T,), count). figures (F,): always taken, and counted as the first of `ranked`.
    """
    remaining, rows = plan.candidates.clone(), plan.always.clone()
    evenly = evenly_spread(remaining.nonzero().squeeze(1), sample)

    def take(selected: Tensor) -> None:
        rows[selected], remaining[selected] = True, False

    total = sample
    if figures is not None:
        take(figures)
    take(evenly)
    for scores, count in ranked:
        total += count  # a row that is in both figures and the sample leaves room for one more of the first `ranked`
        wanted = min(max(total - int((plan.candidates & ~remaining).sum()), 0), int(remaining.sum()))
        take(scores.masked_fill(~remaining, -torch.inf).topk(wanted).indices)
    return rows.nonzero().squeeze(1)


def whole_figures(plan: Plan, scores: Tensor, gain: float, best: int) -> Tensor:
    """(F,) rows of whole figures, those in the lines with the best score first: of `best` rows at most `gain` times the
    figures' share of the candidates.

    A figure that is recomputed only in part is misread, and what the question attends to most is the label before it
    (docs/methods.md).
    """
    if plan.figures is None:
        return torch.empty(0, dtype=torch.long, device=scores.device)
    is_figure, lines = plan.figures.is_figure & plan.candidates, plan.figures.lines
    rows = is_figure.nonzero().squeeze(1)
    most = round(best * min(1.0, gain * rows.numel() / plan.candidate_tokens))
    begins = torch.ones_like(rows, dtype=torch.bool)
    begins[1:] = (rows.diff() > 1) | (lines[rows].diff() > 0)
    figure = begins.cumsum(0) - 1  # the number of each row's figure
    sizes = torch.bincount(figure)
    known = scores.masked_fill(~plan.candidates, -torch.inf)
    nothing = scores.new_full((plan.tokens + 1,), -torch.inf)  # lines are counted from 1
    best_of_line = nothing.scatter_reduce(0, lines, known, "amax")
    order = best_of_line[lines[rows[begins]]].argsort(descending=True, stable=True)
    order = order[sizes[order] <= most]
    taken = torch.zeros_like(sizes, dtype=torch.bool)
    taken[order[sizes[order].cumsum(0) <= most]] = True
    return rows[taken[figure]]


def second_layer(count: int) -> range:
    """Layer 1, whose queries and keys depend only on layer 0, where reused KV is exact."""
    layer = min(1, count - 1)
    return range(layer, layer + 1)


def later_layers(count: int) -> range:
    """From a quarter of the depth on: earlier layers attend to sinks, neighbours and separators."""
    return range(count // 4, count)


def second_quarter(count: int) -> range:
    """The second quarter of the depth: half the cost of `later_layers`, and nearly as good for figures."""
    return range(count // 4, max(count // 2, count // 4 + 1))


def middle_layers(count: int) -> range:
    """Three from the middle on: about where QCFuse's profiles of five models (32 to 64 layers) have the best layers."""
    first = min(count // 2, max(0, count - 3))
    return range(first, min(first + 3, count))


def merged_heads(plan: Plan, attention: Attention) -> Tensor:
    """A3: softmax over the documents' keys of one dot product over all heads, summed over the question's rows.

    softmax over keys k of documents of sum_h(q_wh . k_kh) x scaling / sqrt(N), summed over rows w.
    """
    queries, keys = attention.queries, attention.keys
    # The heads of a group share their keys.
    grouped = queries.reshape(keys.shape[0], -1, *queries.shape[1:]).sum(1)
    merged = torch.einsum("hwd,hkd->wk", grouped.float(), keys.float())
    merged *= attention.scaling / queries.shape[0] ** 0.5
    of_documents = plan.kinds[attention.first_key :] > TokenKind.NOT_LOADED
    merged = (merged + attention.mask).masked_fill(~of_documents, -torch.inf)
    return merged.softmax(dim=-1).nan_to_num(0.0).sum(0)  # NaN: a window without any document


def summed_rows(plan: Plan, attention: Attention) -> Tensor:
    """ProphetKV: attention summed over the question's rows, averaged over heads. The paper's weights are not used."""
    return attention.weights.sum(dim=1, dtype=torch.float32).mean(0)  # (N, W, K) -> (N, K) -> (K,)


def rooted_squares(plan: Plan, attention: Attention) -> Tensor:
    """Ours: the L2 norm of a key's weights over the question's rows, averaged over heads.

    It prefers a token that one row attends to strongly over one that all attend to weakly.
    """
    weights = attention.weights  # (N, W, K)
    if weights.device.type != "cpu":
        norms: Tensor = torch.linalg.vector_norm(weights, dim=1, dtype=torch.float32)
        return norms.mean(0)
    # One head at a time, in the processor's cache, and bfloat16 squared as such: all at once takes 3 to 9 times as long
    # (9 x 51 x 3,161), float32 squares 3 times, torch's vector_norm over a middle dimension 11 times. Squares of
    # float16 may underflow.
    total = weights.new_zeros(weights.shape[-1], dtype=torch.float32)
    for heads in weights:
        wide = heads if heads.dtype == torch.bfloat16 else heads.float()
        total += wide.square().sum(dim=0, dtype=torch.float32).sqrt_()
    return total / len(weights)


@dataclass(frozen=True)
class Anchors:
    """QCFuse's compressed view: all rows that are no candidates, and `digest_ratio` of each chunk's rows.

    Evenly spread; the paper takes the best by KVzip's scores, for which each chunk is read again (docs/methods.md).
    """

    digest_ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.digest_ratio <= 1:
            raise UsageError(f"digest_ratio must be above 0 and at most 1, not {self.digest_ratio}")

    def __call__(self, plan: Plan) -> Tensor:
        seen = ~plan.candidates
        for span in plan.spans:
            rows = torch.arange(span.start, span.stop, device=seen.device)
            seen[evenly_spread(rows, math.ceil(self.digest_ratio * span.length))] = True
        return seen.nonzero().squeeze(1)


@dataclass(frozen=True)
class AveragePool:
    """A3's smoothing: the mean over `kernel` tokens, an odd number, around each."""

    kernel: int

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UsageError(f"kernel must be odd and above 0, not {self.kernel}")

    def __call__(self, scores: Tensor) -> Tensor:
        pool = torch.nn.AvgPool1d(self.kernel, stride=1, padding=self.kernel // 2)
        pooled: Tensor = pool(scores[None])[0]
        return pooled
