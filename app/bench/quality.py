"""Is the fused answer the answer of a full prefill? (`ragblend bench quality`, design.md sections 7 and 8)

The reference is full prefill over the same token ids. Its greedy answer is teacher-forced through every
method's prefilled cache, so that all next-token distributions are compared at the same positions; then each
method answers greedily itself. One record a (question, method, ratio), kept as soon as it is measured.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from ragblend.app.bench import metrics
from ragblend.app.bench.data import Question
from ragblend.app.bench.records import Journal, Record
from ragblend.app.bench.variants import Variant
from ragblend.kvstore.errors import PromptTooLongError, RagBlendError

if TYPE_CHECKING:
    from torch import Tensor

    from ragblend.engine.config import Report
    from ragblend.engine.engine import Engine, Prefilled, Result
    from ragblend.engine.prompt import Prompt

INSTRUCTION = "\nAnswer in a few words, not in a sentence."
Progress = Callable[[int, int], None]


class BenchError(RagBlendError):
    """The run would have measured something else than it says."""


@dataclass(frozen=True)
class Reference:
    """What full prefill says: its greedy answer, its logits before each token of it (n, vocab), its time."""

    answer: "Result"
    logits: "Tensor"
    report: "Report"
    ttft_ms: float


def run(
    engine: "Engine",
    questions: Sequence[Question],
    variants: Sequence[Variant],
    journal: Journal,
    max_new_tokens: int = 32,
    seed: int = 0,
    keep_kv: bool = False,
    progress: Progress | None = None,
) -> None:
    """Measure what the journal does not have yet; it has every (question, variant) afterwards.

    Stopping at any moment loses at most the one measurement under way. keep_kv leaves the passages' KV in
    the store.
    """
    pending = [(question, _pending(question, variants, journal, seed)) for question in questions]
    # All prompts first: one that is too long must stop the run now and not after an hour of work.
    work = [(each, todo, build_prompt(engine, each, max_new_tokens)) for each, todo in pending if todo]
    total = sum(len(todo) for _, todo, _ in work)
    done = 0
    for place, (question, todo, prompt) in enumerate(work):
        with _encoded(engine, question, keep_kv):
            if place == 0:
                warm_up(engine, prompt, todo)
            for record in measure(engine, question, prompt, todo, max_new_tokens):
                journal.add(record)
                done += 1
                if progress is not None:
                    progress(done, total)


def _pending(question: Question, variants: Sequence[Variant], journal: Journal, seed: int) -> list[Variant]:
    """What is left to measure, shuffled: no method always runs in the wake of the same other one."""
    todo = [each for each in variants if (question.digest, each.method, each.ratio) not in journal]
    random.Random(f"{seed} {question.digest}").shuffle(todo)
    return todo


@contextmanager
def _encoded(engine: "Engine", question: Question, keep_kv: bool) -> Iterator[None]:
    """The passages' KV is in the store inside the block; what was not there before is taken out again.

    75 questions of 10 passages are 10 GB with SmolLM2: left in, they would push the user's own documents out.
    """
    before = frozenset() if keep_kv else frozenset(engine.store.keys())
    report = engine.encode(list(question.passages))
    try:
        yield
    finally:
        for key in () if keep_kv else set(report.keys) - before:
            engine.store.delete(key)


def build_prompt(engine: "Engine", question: Question, max_new_tokens: int) -> "Prompt":
    """The passages first, the question last, in the model's chat template; tokenized, so that is not timed.

    Raises PromptTooLongError if the answer would not fit in the model's window.
    """
    from ragblend.engine.prompt import Chunk

    chunks = [Chunk(passage) for passage in question.passages]
    prompt = engine.tokenize(engine.chat_prompt(None, chunks, INSTRUCTION + question.text))
    needed = len(prompt.token_ids) + max_new_tokens
    if needed > engine.context_window:
        raise PromptTooLongError(
            f"question {question.index} needs {needed} tokens with its answer, and {engine.model_name} takes "
            f"{engine.context_window}; pass --passages N to read fewer passages a question"
        )
    return prompt


def warm_up(engine: "Engine", prompt: "Prompt", variants: Sequence[Variant]) -> None:
    """One unrecorded prefill of every method: a process' first ones pay for pages, threads and kernels."""
    for variant in {each.method: each for each in (Variant("full"), *variants)}.values():
        engine.prefill(prompt, **variant.arguments)


def measure(
    engine: "Engine", question: Question, prompt: "Prompt", variants: Sequence[Variant], max_new_tokens: int
) -> Iterator[Record]:
    """One record a variant, on one question, each beside the reference of this very run."""
    reference = measure_reference(engine, prompt, max_new_tokens)
    for variant in variants:
        if variant.method == "full":
            report, ttft_ms, logits, answer = (
                reference.report,
                reference.ttft_ms,
                reference.logits,
                reference.answer,
            )
        else:
            prefilled, ttft_ms = timed_prefill(engine, prompt, variant)
            report, logits = prefilled.report, teacher_logits(engine, prefilled, reference.answer.token_ids)
            answer = greedy_answer(engine, prefilled, logits, reference, max_new_tokens)
            del (
                prefilled
            )  # its cache is as large as all the passages' KV: two at a time would double the peak
        yield Record(
            question=question.digest,
            method=variant.method,
            ratio=variant.ratio,
            kl=metrics.kl_divergence(reference.logits, logits),
            top1=metrics.top1_agreement(reference.logits, logits),
            exact_match=tuple(answer.token_ids) == tuple(reference.answer.token_ids),
            gold_match=metrics.gold_match(answer.text, question.answers),
            f1=metrics.f1(answer.text, question.answers),
            rouge_l=metrics.rouge_l(answer.text, question.answers),
            recomputed_fraction=report.recomputed_fraction,
            ttft_ms=ttft_ms,
            full_ttft_ms=reference.ttft_ms,
            prompt_tokens=len(prompt.token_ids),
            answer=answer.text,
        )


def measure_reference(engine: "Engine", prompt: "Prompt", max_new_tokens: int) -> Reference:
    """Full prefill, its greedy answer, and its logits along that answer."""
    prefilled, ttft_ms = timed_prefill(engine, prompt, Variant("full"))
    answer = engine.decode(prefilled, max_new_tokens=max_new_tokens, temperature=0.0)
    return Reference(answer, teacher_logits(engine, prefilled, answer.token_ids), prefilled.report, ttft_ms)


def greedy_answer(
    engine: "Engine", prefilled: "Prefilled", logits: "Tensor", reference: Reference, max_new_tokens: int
) -> "Result":
    """What the method answers itself; it is the reference's answer if it takes every step of it, end token
    included.

    Then decoding it again, which takes as long as the prefill, would only repeat what the logits (n, vocab)
    say.
    """
    said = reference.answer.token_ids
    if said and logits.argmax(-1).tolist() == list(said):
        return reference.answer
    return engine.decode(prefilled, max_new_tokens=max_new_tokens, temperature=0.0)


def timed_prefill(engine: "Engine", prompt: "Prompt", variant: Variant) -> "tuple[Prefilled, float]":
    """The prefilled prompt, and the milliseconds on our own clock until its first token is known.

    Raises BenchError if something else was measured than was asked for: a passage that the store does not
    have is computed exactly, and a model that cannot be fused is served by full prefill, so either would
    look perfect.
    """
    started = perf_counter()
    prefilled = engine.prefill(prompt, **variant.arguments)
    prefilled.logits.argmax().item()  # a device that works in the background has to be done
    ttft_ms = 1000 * (perf_counter() - started)
    report = prefilled.report
    if report.method != variant.method:
        raise BenchError(
            f"{variant} was served by {report.method} prefill: {report.warning}; choose another --model"
        )
    if variant.method != "full" and report.misses:
        passages = report.hits + report.misses
        raise BenchError(
            f"{variant} found {report.hits} of {passages} passages in the store, the others would be "
            "computed exactly; the store's budget is too small for one question, or another process is evicting"
        )
    return prefilled, ttft_ms


def teacher_logits(engine: "Engine", prefilled: "Prefilled", token_ids: Sequence[int]) -> "Tensor":
    """(n, vocab) float32: what is predicted before each of the n tokens; the first is the prompt's own
    prediction.

    An answer that ended before its first token still has one position to compare.
    """
    logits = engine.continue_logits(prefilled, token_ids) if token_ids else prefilled.logits.unsqueeze(0)
    assert logits.shape[0] == max(1, len(token_ids)), (logits.shape, len(token_ids))
    return logits
