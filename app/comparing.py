"""One question answered in two ways over one prompt: the answers, when they began, how far from full prefill they are.

Full prefill is read as well, whatever the two are: the divergences are taken along its greedy answer, as in
`bench quality`.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ragblend.app.bench.metrics import kl_divergence, top1_agreement
from ragblend.app.conversation import ANY, AskOptions, Conversations
from ragblend.kvstore.errors import Cancelled, LibraryError

if TYPE_CHECKING:
    from torch import Tensor

    from ragblend.engine.engine import Engine
    from ragblend.engine.prompt import Prompt
    from ragblend.engine.results import Prefilled

FULL = "full"
ANSWER_TOKENS = 48


@dataclass(frozen=True)
class Side:
    """One way to read the prompt; ratio None: the method's own, or the default."""

    method: str
    ratio: float | None = None


@dataclass(frozen=True)
class Compared:
    """What one way gave. kl in nats and same_next in [0, 1], both against full prefill along its answer.

    warning: why it was read in another way than was asked for, if it was.
    """

    side: Side
    text: str
    ttft_ms: float
    kl: float
    same_next: float
    tokens: dict[str, int]
    recomputed_fraction: float
    warning: str | None = None


@dataclass(frozen=True)
class Comparison:
    """As far as it has come: full prefill first, then the sides in their order."""

    question: str
    prompt_tokens: int
    passages: int
    notice: str | None = None
    full: Compared | None = None
    sides: tuple[Compared, ...] = ()


def compare(
    talks: Conversations,
    question: str,
    collection: str,
    sides: Sequence[Side],
    cancel: threading.Event | None = None,
) -> Iterator[Comparison]:
    """A fuller comparison each time. Raises UsageError, LibraryError, PromptTooLongError, Cancelled."""
    longest = min(talks.settings.answer_tokens, ANSWER_TOKENS)
    asked = talks.prepare(question, AskOptions((collection,), max_new_tokens=longest, least_score=ANY))
    context = asked.context
    if context is None:
        raise LibraryError(f"Comparing: {asked.notice}")
    now = Comparison(question, len(context.prompt.token_ids), len(context.sources), asked.notice)
    yield now
    lab = _Lab(talks.engine, context.prompt, asked.settings.answer_tokens, cancel)
    for variant in _warm(sides):  # a method's first prefill pays for pages and kernels
        lab.prefill(variant)
    now = replace(now, full=lab.read_full())
    yield now
    for side in sides:
        now = replace(now, sides=(*now.sides, lab.read(side)))
        yield now


def _warm(sides: Sequence[Side]) -> list[Side]:
    return [side for side in dict.fromkeys(sides) if side.method != FULL]


class _Lab:
    """One prompt, read in several ways."""

    def __init__(
        self, engine: "Engine", prompt: "Prompt", most_tokens: int, cancel: threading.Event | None
    ) -> None:
        self._engine, self._prompt, self._cancel = engine, prompt, cancel
        self._decoding: dict[str, Any] = {"max_new_tokens": most_tokens, "temperature": 0.0}
        self._reference: tuple[tuple[int, ...], Tensor] | None = None
        self._full: Compared | None = None

    def prefill(self, side: Side) -> "Prefilled":
        ratio: dict[str, Any] = {} if side.ratio is None else {"ratio": side.ratio}
        return self._engine.prefill(self._prompt, side.method, cancel=self._cancel, **ratio)

    def read_full(self) -> Compared:
        """Read all of it, and keep what it predicts along its own answer."""
        side = Side(FULL)
        prefilled = self.prefill(side)
        answer = self._engine.decode(prefilled, **self._decoding)
        self._reference = answer.token_ids, self._engine.continue_logits(prefilled, answer.token_ids)
        self._full = self._compared(side, prefilled, answer.text, self._reference[1])
        return self._full

    def read(self, side: Side) -> Compared:
        assert self._reference is not None and self._full is not None, "full prefill comes first"
        if side.method == FULL:
            return self._full
        prefilled = self.prefill(side)
        answer = self._engine.decode(prefilled, **self._decoding)
        logits = self._engine.continue_logits(prefilled, self._reference[0])
        return self._compared(side, prefilled, answer.text, logits)

    def _compared(self, side: Side, prefilled: "Prefilled", text: str, logits: "Tensor") -> Compared:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled("the comparison was stopped")
        assert self._reference is not None
        report, reference = prefilled.report, self._reference[1]
        counts = ("prompt", "reused", "recomputed", "fresh", "missing")
        return Compared(
            side=side,
            text=text,
            ttft_ms=report.timings.prefill_ms,
            kl=kl_divergence(reference, logits),
            same_next=top1_agreement(reference, logits),
            tokens={name: getattr(report.tokens, name) for name in counts},
            recomputed_fraction=report.recomputed_fraction,
            warning=report.warning,
        )
