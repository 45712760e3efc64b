"""The plan of a prefill: which tokens have stored KV, at which positions, and how many rows may be recomputed."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

from ragblend.engine.prompts.figure_rows import FigureRows
from ragblend.kvstore.codec import Source


class TokenKind(IntEnum):
    """Where one token's KV comes from. Up to NOT_LOADED it is computed, from EXACT on it is stored."""

    FRESH = 0  # part of a literal: always computed
    MISSING = 1  # part of a chunk without stored KV: computed in the prompt
    NOT_LOADED = 2  # part of a chunk whose stored KV would take longer to load: computed in the prompt
    EXACT = 3  # stored, and computed after the same tokens as in this prompt: nothing to correct
    REUSABLE = 4  # stored, and computed after other tokens: may be recomputed


@dataclass(frozen=True)
class Span:
    """A run of the prompt's tokens that has, or could have, stored KV: a chunk, or a beginning that a session holds.

    start, length: in tokens. stored: its KV, None if it is computed. exact: the KV was computed after the same tokens
    as in this prompt. held: the beginning of the prompt, whose KV a session holds in memory. not_loaded: `stored` is
    None because computing is faster than loading.
    """

    start: int
    length: int
    stored: Source | None
    exact: bool = False
    held: bool = False
    not_loaded: bool = False

    @property
    def stop(self) -> int:
        return self.start + self.length

    @property
    def source(self) -> Source:
        """`stored`, for spans that have it."""
        assert self.stored is not None
        return self.stored

    def rotation(self, moves_keys: bool) -> int | Tensor:
        """How many positions to rotate the stored keys by: one number, or (T,) on the CPU for keys stored unrotated.

        moves_keys: whether to rotate them to this prompt's positions; if not, to those they were encoded at.
        """
        start = self.start if moves_keys else self.source.start
        if self.source.unrotated:
            return torch.arange(start, start + self.length)
        return start - self.source.start


@dataclass(frozen=True)
class Plan:
    """Which of a prompt's tokens have stored KV, and how many of them may be recomputed.

    token_ids (T,) int64 and kinds (T,) int8 of `TokenKind`, on the device; figures: which tokens are part of a figure,
    on the device, None without a tokenizer. spans: ascending. layers: of the model. budget: stored rows that may be
    recomputed, averaged over layers, the cost of choosing them included. attention_share: as in `Decoder`. seed: for
    policies that choose by chance.

    The counts are on the host, so that reading them never waits for the device: always_tokens of `always`,
    candidate_tokens of `candidates`, stored_tokens of EXACT and REUSABLE. settled_tokens: length of the prompt's
    beginning without MISSING and REUSABLE tokens; its KV is final once it is computed.
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

    def with_ratio(self, ratio: float) -> "Plan":
        """The same plan with this share of the stored tokens as its budget."""
        return replace(self, budget=round(ratio * self.stored_tokens))

    @property
    def held_tokens(self) -> int:
        """Number of stored tokens that a session holds."""
        return sum(span.length for span in self.spans if span.held)

    @property
    def always(self) -> Tensor:
        """(T,) bool: rows that every policy computes (literals, and chunks that are missing or not loaded)."""
        return self.kinds <= TokenKind.NOT_LOADED

    @property
    def candidates(self) -> Tensor:
        """(T,) bool: rows that a policy may choose to compute."""
        return self.kinds == TokenKind.REUSABLE

    def settled_rows(self, probe_rows: Tensor) -> int:
        """How many of a probe's rows (R,) need not be computed again after it: those of the settled tokens.

        0 if the probe leaves out a settled token that must be computed, because the others then lack its KV.
        """
        found = int((probe_rows < self.settled_tokens).sum())
        return found if found == int(self.always[: self.settled_tokens].sum()) else 0

    def to(self, device: torch.device) -> "Plan":
        """The same plan on that device."""
        figures = None if self.figures is None else self.figures.to(device)
        return replace(
            self, token_ids=self.token_ids.to(device), kinds=self.kinds.to(device), figures=figures
        )

    @property
    def piece_stops(self) -> list[int]:
        """Positions after the prefix and after each span, ascending."""
        return sorted({span.stop for span in self.spans} | {span.start for span in self.spans[:1]})

    @property
    def suffix_start(self) -> int:
        """Position after the last span, but at most that of the last token."""
        return min(max((span.stop for span in self.spans), default=0), self.tokens - 1)

    def without(self, computed: Iterable[Span], not_loaded: bool = False) -> "Plan":
        """The plan in which these spans are computed although KV is stored. not_loaded: because that is faster."""
        starts = {span.start for span in computed}
        spans = tuple(
            replace(span, stored=None, exact=False, not_loaded=not_loaded) if span.start in starts else span
            for span in self.spans
        )
        return make_plan(
            self.token_ids, spans, self.layers, self.ratio, self.attention_share, self.seed, self.figures
        )


def make_plan(
    token_ids: Tensor,
    spans: tuple[Span, ...],
    layers: int,
    ratio: float,
    attention_share: float,
    seed: int = 0,
    figures: FigureRows | None = None,
) -> Plan:
    """The plan of a prompt: assigns a kind to every token. ratio: the budget as a share of the stored tokens.

    The last token is always fresh: its row gives the first logits. The other parameters are as in `Plan`.
    """
    kinds = torch.full(token_ids.shape, int(TokenKind.FRESH), dtype=torch.int8)
    for span in spans:
        kinds[span.start : span.stop] = int(_kind_of(span))
    if kinds.numel():
        kinds[-1] = int(TokenKind.FRESH)
    counts = torch.bincount(kinds.long(), minlength=len(TokenKind)).tolist()
    stored_tokens = counts[TokenKind.EXACT] + counts[TokenKind.REUSABLE]
    unsettled = ((kinds == int(TokenKind.MISSING)) | (kinds == int(TokenKind.REUSABLE))).nonzero()
    return Plan(
        token_ids,
        kinds.to(token_ids.device),
        spans,
        layers,
        round(ratio * stored_tokens),
        attention_share,
        seed,
        always_tokens=counts[TokenKind.FRESH] + counts[TokenKind.MISSING] + counts[TokenKind.NOT_LOADED],
        missing_tokens=counts[TokenKind.MISSING],
        not_loaded_tokens=counts[TokenKind.NOT_LOADED],
        candidate_tokens=counts[TokenKind.REUSABLE],
        stored_tokens=stored_tokens,
        settled_tokens=int(unsettled[0]) if unsettled.numel() else token_ids.numel(),
        figures=None if figures is None else figures.to(token_ids.device),
    )


def _kind_of(span: Span) -> TokenKind:
    if span.stored is None:
        return TokenKind.NOT_LOADED if span.not_loaded else TokenKind.MISSING
    return TokenKind.EXACT if span.exact else TokenKind.REUSABLE
