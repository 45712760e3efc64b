"""The plan of a prefill: which tokens have stored KV, at which positions, and how many rows may be recomputed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from ragblend.engine.prompts.figure_rows import FigureRows
from ragblend.kvstore.codec import Source


class Kind(IntEnum):
    """How one token is served."""

    FRESH = 0  # a literal: always computed
    MISSING = 1  # of a chunk without stored KV: computed in place
    NOT_LOADED = 2  # of a chunk whose stored KV would take longer to load: computed in place
    EXACT = 3  # its KV was computed after the same tokens: nothing to correct
    REUSABLE = 4  # stored, and a candidate for recomputing


@dataclass(frozen=True)
class Span:
    """A chunk in the prompt: its position, and its stored KV if there is any. exact: it was encoded after the same
    tokens.

    held: not a chunk, but the beginning of the prompt, which a session holds. not_loaded: it has stored KV that is not
    used, because computing it is faster.
    """

    start: int
    length: int
    reader: Source | None
    exact: bool = False
    held: bool = False
    not_loaded: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def source(self) -> Source:
        """Its stored KV, which it must have."""
        assert self.reader is not None
        return self.reader

    def rotation(self, moves_keys: bool) -> int | Tensor:
        """How far the keys that are read must be rotated, in tokens: one number, or (T,) on the CPU.

        moves_keys: else they stay where they were encoded.
        """
        start = self.start if moves_keys else self.source.start
        if self.source.unrotated:
            return torch.arange(start, start + self.length)
        return start - self.source.start


@dataclass(frozen=True)
class Plan:
    """The prompt as rows. kinds (T,) int8 of `Kind`; token_ids (T,) int64; both on the device.

    The counts are on the host, so that reading them never waits for the device. settled_tokens: how many fresh, exact
    and not loaded tokens the prompt begins with; no other token can change their KV. budget: stored rows that may be
    recomputed, averaged over layers, selection included. figures: the positions of figures and lines, on the device;
    None without a tokenizer.
    """

    token_ids: Tensor
    kinds: Tensor
    spans: tuple[Span, ...]
    layers: int
    budget: int
    attention_share: float
    seed: int
    always_tokens: int
    missing_tokens: int
    not_loaded_tokens: int
    candidate_tokens: int
    stored_tokens: int
    settled_tokens: int
    figures: FigureRows | None = None

    @property
    def tokens(self) -> int:
        return self.token_ids.numel()

    @property
    def ratio(self) -> float:
        """The budget as a share of the stored tokens; 0 if there are none."""
        return self.budget / self.stored_tokens if self.stored_tokens else 0.0

    def at(self, ratio: float) -> "Plan":
        """The same plan with that share of the stored tokens as its budget."""
        return replace(self, budget=round(ratio * self.stored_tokens))

    @property
    def held_tokens(self) -> int:
        """Number of stored tokens that a session holds."""
        return sum(span.length for span in self.spans if span.held)

    @property
    def always(self) -> Tensor:
        """(T,) bool: rows that every policy computes (literals, and chunks that are missing or not loaded)."""
        return self.kinds <= Kind.NOT_LOADED

    @property
    def candidates(self) -> Tensor:
        """(T,) bool: rows that a policy may choose to compute."""
        return self.kinds == Kind.REUSABLE

    def settled_by(self, rows: Tensor) -> int:
        """How many of these rows have final KV after a probe: all rows of the settled tokens, or none."""
        found = int((rows < self.settled_tokens).sum())
        return found if found == int(self.always[: self.settled_tokens].sum()) else 0

    def to(self, device: torch.device) -> "Plan":
        """The same plan on that device."""
        figures = None if self.figures is None else self.figures.to(device)
        return replace(
            self, token_ids=self.token_ids.to(device), kinds=self.kinds.to(device), figures=figures
        )

    @property
    def piece_stops(self) -> list[int]:
        """The ends of the prefix and of each chunk."""
        return sorted({span.stop for span in self.spans} | {span.start for span in self.spans[:1]})

    @property
    def suffix_start(self) -> int:
        """Position after the last chunk, but at most that of the last token."""
        return min(max((span.stop for span in self.spans), default=0), self.tokens - 1)

    def without(self, lost: Iterable[Span], not_loaded: bool = False) -> "Plan":
        """The same plan without the stored KV of these spans. not_loaded: it is there, but computing is faster."""
        starts = {span.start for span in lost}
        spans = tuple(
            replace(span, reader=None, exact=False, not_loaded=not_loaded) if span.start in starts else span
            for span in self.spans
        )
        shares = self.ratio, self.attention_share
        return make_plan(self.token_ids, spans, self.layers, *shares, self.seed, self.figures)


def make_plan(
    token_ids: Tensor,
    spans: tuple[Span, ...],
    layers: int,
    ratio: float,
    attention_share: float,
    seed: int = 0,
    figures: FigureRows | None = None,
) -> Plan:
    """Make the plan: assign a kind to every token. The last token is always fresh: its row gives the first logits.

    ratio: the budget, as a share of the stored tokens.
    """
    kinds = torch.full(token_ids.shape, int(Kind.FRESH), dtype=torch.int8)
    for span in spans:
        kinds[span.start : span.stop] = int(_kind_of(span))
    if kinds.numel():
        kinds[-1] = int(Kind.FRESH)
    counts = torch.bincount(kinds.long(), minlength=len(Kind)).tolist()
    stored_tokens = counts[Kind.EXACT] + counts[Kind.REUSABLE]
    open_rows = ((kinds == int(Kind.MISSING)) | (kinds == int(Kind.REUSABLE))).nonzero()
    return Plan(
        token_ids,
        kinds.to(token_ids.device),
        spans,
        layers,
        round(ratio * stored_tokens),
        attention_share,
        seed,
        always_tokens=counts[Kind.FRESH] + counts[Kind.MISSING] + counts[Kind.NOT_LOADED],
        missing_tokens=counts[Kind.MISSING],
        not_loaded_tokens=counts[Kind.NOT_LOADED],
        candidate_tokens=counts[Kind.REUSABLE],
        stored_tokens=stored_tokens,
        settled_tokens=int(open_rows[0]) if open_rows.numel() else token_ids.numel(),
        figures=None if figures is None else figures.to(token_ids.device),
    )


def _kind_of(span: Span) -> Kind:
    if span.reader is None:
        return Kind.NOT_LOADED if span.not_loaded else Kind.MISSING
    return Kind.EXACT if span.exact else Kind.REUSABLE
