"""Compares two methods on one prompt: their answers, times to first token, and divergence from full prefill.

Full prefill always runs as the reference: divergences are measured along its greedy answer, as in `bench quality`.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragblend.app.answering.conversation import AskOptions, Conversations
from ragblend.engine.config import TokenCounts
from ragblend.kvstore.errors import Cancelled, LibraryError
from ragblend.measuring.metrics import kl_divergence, top1_agreement
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.results import Prefilled, Result

FULL = "full"
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class MethodResult:
    """The result of one method. kl (nats) and same_next (0 to 1) compare it with full prefill along full's answer.

    warning: why another method was used instead, if one was.
    """

    side: Variant
    text: str
    ttft_ms: float
    kl: float
    same_next: float
    tokens: TokenCounts
    warning: str | None = None


@dataclass(frozen=True)
class Comparison:
    """The results so far: full prefill first, then the sides in order."""

    prompt_tokens: int
    passages: int
    notice: str | None = None
    full: MethodResult | None = None
    sides: tuple[MethodResult, ...] = ()


def compare(
    conversations: Conversations,
    question: str,
    collection: str,
    sides: Sequence[Variant],
    cancel: threading.Event | None = None,
) -> Iterator[Comparison]:
    """Yield the comparison after each result. Raises UsageError, LibraryError, PromptTooLongError, Cancelled."""
    from ragblend.engine.engine import require_local_engine

    max_tokens = min(conversations.settings.answer_tokens, ANSWER_TOKENS)
    options = AskOptions((collection,), max_new_tokens=max_tokens, cancel=cancel)
    prepared = conversations.prepare(question, options)
    context = prepared.context
    if context is None:
        raise LibraryError(f"Comparing: {prepared.notice}")
    engine = require_local_engine(conversations.engine, "comparing logits")
    comparison = Comparison(len(context.prompt.token_ids), len(context.sources), prepared.notice)
    yield comparison

    def prefill(side: Variant) -> "Prefilled":
        return engine.prefill(context.prompt, cancel=cancel, **side.arguments)

    def decode(prefilled: "Prefilled") -> "Result":
        return engine.decode(prefilled, max_new_tokens=prepared.settings.answer_tokens, temperature=0.0)

    def compare_with_full(side: Variant, prefilled: "Prefilled", answer: "Result") -> MethodResult:
        """Compare the method's predictions with those of full prefill, along full prefill's answer."""
        if cancel is not None and cancel.is_set():
            raise Cancelled("the comparison was stopped")
        logits, report = engine.continue_logits(prefilled, reference.token_ids), prefilled.report
        return MethodResult(
            side=side,
            text=answer.text,
            ttft_ms=report.timings.prefill_ms,
            kl=kl_divergence(expected, logits),
            same_next=top1_agreement(expected, logits),
            tokens=report.tokens,
            warning=report.warning,
        )

    for side in dict.fromkeys(sides):  # warm up: the first prefill allocates memory and compiles kernels
        if side.method != FULL:
            prefill(side)
    prefilled = prefill(Variant(FULL))
    reference = decode(prefilled)
    expected = engine.continue_logits(prefilled, reference.token_ids)
    full = compare_with_full(Variant(FULL), prefilled, reference)
    comparison = replace(comparison, full=full)
    yield comparison
    for side in sides:
        if side.method == FULL:
            result = full
        else:
            prefilled = prefill(side)
            result = compare_with_full(side, prefilled, decode(prefilled))
        comparison = replace(comparison, sides=(*comparison.sides, result))
        yield comparison
