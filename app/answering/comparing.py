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
    """The result of one method. kl (nats) and same_next (0 to 1) compare it with full prefill along that answer.

    warning: why another method was used, if it was.
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
    from ragblend.engine.engine import loaded_here

    longest = min(conversations.settings.answer_tokens, ANSWER_TOKENS)
    asked = conversations.prepare(question, AskOptions((collection,), max_new_tokens=longest, cancel=cancel))
    context = asked.context
    if context is None:
        raise LibraryError(f"Comparing: {asked.notice}")
    engine = loaded_here(conversations.engine, "comparing logits")
    now = Comparison(len(context.prompt.token_ids), len(context.sources), asked.notice)
    yield now

    def prefill(side: Variant) -> "Prefilled":
        return engine.prefill(context.prompt, cancel=cancel, **side.arguments)

    def answered(prefilled: "Prefilled") -> "Result":
        return engine.decode(prefilled, max_new_tokens=asked.settings.answer_tokens, temperature=0.0)

    def compared(side: Variant, prefilled: "Prefilled", answer: "Result") -> MethodResult:
        """Compare the predictions with those of full prefill along its answer."""
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
    read = prefill(Variant(FULL))
    reference = answered(read)
    expected = engine.continue_logits(read, reference.token_ids)
    full = compared(Variant(FULL), read, reference)
    now = replace(now, full=full)
    yield now
    for side in sides:
        if side.method != FULL:
            read = prefill(side)
        found = full if side.method == FULL else compared(side, read, answered(read))
        now = replace(now, sides=(*now.sides, found))
        yield now
