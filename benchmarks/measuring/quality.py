"""Measures how close each method's answers are to full prefill's (`ragblend bench quality`).

The reference is full prefill over the same token ids. Its greedy answer is teacher-forced through every method's
cache, so that next-token distributions are compared at the same positions; then each method answers greedily itself.
There is one record per (question, method, ratio), saved as soon as it is measured.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragblend.engine.prompts.figures import contains
from ragblend.kvstore.errors import PromptTooLongError, UsageError
from ragblend.measuring import metrics
from ragblend.measuring.data import Loaded, Question, Skipped
from ragblend.measuring.prefilling import (
    BenchError,
    Timed,
    continue_prefill,
    model_digest,
    prompt_of,
    settings_digest,
    settle_decoding,
    temporarily_stored,
    timed_prefill,
)
from ragblend.measuring.records import Journal, Record, Row
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from torch import Tensor

    from ragblend.engine.engine import Engine
    from ragblend.engine.prompts.segments import Prompt
    from ragblend.engine.results import Prefilled, Result

INSTRUCTION = "\nAnswer in a few words, not in a sentence."
ANSWER_TOKENS = 32
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Outcome(Timed):
    """A method's greedy answer, and its logits (n, vocab) before each token of the *reference's* answer."""

    answer: "Result"
    logits: "Tensor"


def run(
    engine: "Engine",
    questions: Sequence[Question],
    variants: Sequence[Variant],
    journal: Journal,
    max_new_tokens: int = ANSWER_TOKENS,
    seed: int = 0,
    keep_kv: bool = False,
    progress: Progress = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
    warm: bool = True,
    figures_only: bool = False,
) -> int:
    """Measure every (question, variant) that the journal does not have; returns how many questions are left.

    An interruption loses at most the measurement under way. keep_kv leaves the passages' KV in the store. should_stop
    is called before each question, and ends the run if it returns True. warm: run every method once, unrecorded,
    before the first question. figures_only: a question that full prefill answers with wrong figures gets a record of
    `full`, which must be among the variants, and no other.

    Questions must not repeat (see `data.without_repeats`). Raises PromptTooLongError before anything is measured;
    BenchError for a number that would be wrong.
    """
    pending = [
        (question, _pending(question, variants, journal, seed, figures_only)) for question in questions
    ]
    # All prompts first: one that is too long must stop the run before an hour of work.
    work = [(each, todo, _prompt_or_advice(engine, each, max_new_tokens)) for each, todo in pending if todo]
    total = sum(len(todo) for _, todo, _ in work)
    done, left = 0, len(work)
    for _, group in groupby(work, lambda each: frozenset(each[0].passages)):
        same_passages, before = list(group), None
        if should_stop():
            return left
        with temporarily_stored(engine, same_passages[0][0].passages, keep_kv):
            for question, todo, prompt in same_passages:
                if should_stop():
                    return left
                if left == len(work) and warm:
                    warm_up(engine, prompt, [variant for _, todo, _ in work for variant in todo])
                reference = before = reference_outcome(engine, prompt, max_new_tokens, before)
                left -= 1
                is_right = bool(metrics.right_figures(question, reference.answer.text))
                if figures_only and Variant("full") in todo and not is_right:
                    todo, total = [Variant("full")], total - len(todo) + 1
                for variant in todo:
                    journal.add(measure_method(variant, engine, question, prompt, reference, max_new_tokens))
                    done += 1
                    progress(done, total)
                if todo != [Variant("full")]:  # the next question must not repeat its time
                    before = replace(reference, is_compared=True)
    return 0


def _pending(
    question: Question, variants: Sequence[Variant], journal: Journal, seed: int, figures_only: bool
) -> list[Variant]:
    """The variants that are not measured yet, shuffled, so that no method always follows the same other one."""
    known = journal.records.get((question.digest, "full", None))
    if figures_only and known is not None and known.figures_kept is None:
        return []
    todo = [each for each in variants if (question.digest, each.method, each.ratio) not in journal]
    random.Random(f"{seed} {question.digest}").shuffle(todo)
    return todo


def _prompt_or_advice(engine: "Engine", question: Question, max_new_tokens: int) -> "Prompt":
    """As `build_prompt`, but a PromptTooLongError says what to do. With --skip such questions are dropped before."""
    try:
        return build_prompt(engine, question, max_new_tokens)
    except PromptTooLongError as error:
        raise PromptTooLongError(
            f"{error}; pass --passages N to read fewer passages a question, or --skip to leave it out"
        ) from error


def build_prompt(engine: "Engine", question: Question, max_new_tokens: int) -> "Prompt":
    """The question's prompt. Raises PromptTooLongError if the answer would not fit in the model's window."""
    prompt = prompt_of(engine, question.passages, question_text(question))
    needed = len(prompt.token_ids) + max_new_tokens
    if needed > engine.context_window:
        raise PromptTooLongError(
            f"{question.place} needs {needed} tokens with its answer, and {engine.model_name} takes "
            f"{engine.context_window}"
        )
    return prompt


def answer_tokens(engine: "Engine", questions: list[Question], asked: int | None) -> int:
    """The longest answer in tokens: as asked for, else enough for the longest gold answer that must be exact."""
    if asked is not None:
        return asked
    longest = max((engine.count_tokens(q.answers[0]) for q in questions if q.required), default=0)
    return max(ANSWER_TOKENS, longest + longest // 2 + 8 if longest else 0)


def fitting(engine: "Engine", loaded: Loaded, max_new_tokens: int) -> Loaded:
    """Drop, and report, the questions that do not fit the model's window. Raises UsageError if none fits."""
    kept, skipped = [], list(loaded.skipped)
    for question in loaded.questions:
        try:
            build_prompt(engine, question, max_new_tokens)
            kept.append(question)
        except PromptTooLongError as error:
            skipped.append(Skipped(question.place, str(error)))
    if not kept:
        raise UsageError(
            f"no question is left: {len(skipped)} were skipped, the last because {skipped[-1].reason}"
        )
    return Loaded(kept, tuple(skipped))


def open_journal(engine: "Engine", folder: Path, fresh: bool, kv_codec: str, max_new_tokens: int) -> Journal:
    """Open the journal, whose name is a digest of everything its records depend on and do not contain."""
    settings: Row = {
        "model": model_digest(engine),
        "device": engine.device,
        "kv_codec": kv_codec,
        "decoding": settle_decoding(engine),
        "max_new_tokens": max_new_tokens,
        "instruction": INSTRUCTION,
    }
    return Journal(folder / f"quality-{settings_digest(settings)}.jsonl", fresh)


def question_text(question: Question) -> str:
    """The text that every method gets: the question with its instruction."""
    return question.text + (INSTRUCTION if question.instruction is None else question.instruction)


def warm_up(engine: "Engine", prompt: "Prompt", variants: Sequence[Variant]) -> None:
    """Prefill once by every method, unrecorded: a method's first run also allocates memory and starts threads."""
    for variant in {each.method: each for each in (Variant("full"), *variants)}.values():
        engine.prefill(prompt, **variant.arguments)


def measure_method(
    variant: Variant,
    engine: "Engine",
    question: Question,
    prompt: "Prompt",
    reference: Outcome,
    max_new_tokens: int,
) -> Record:
    """The record of one of the engine's methods on one question."""
    outcome = reference
    if variant.method != "full":
        outcome = method_outcome(engine, prompt, variant, reference, max_new_tokens)
    return record_of(question, variant, reference, outcome, engine)


def reference_outcome(
    engine: "Engine", prompt: "Prompt", max_new_tokens: int, before: Timed | None = None
) -> Outcome:
    """The reference: full prefill, its greedy answer, and its logits along that answer.

    before: the previous question's prefill, whose KV is overwritten. If it has the same passages in the same order,
    their KV, which depends on nothing after them, and the time to first token are taken from it.
    """
    timed = continue_prefill(engine, before, prompt) or timed_prefill(engine, prompt, Variant("full"))
    answer = engine.decode(timed.prefilled, max_new_tokens=max_new_tokens, temperature=0.0)
    return _outcome(timed, answer, teacher_logits(engine, timed.prefilled, answer))


def _outcome(timed: Timed, answer: "Result", logits: "Tensor") -> Outcome:
    return Outcome(
        timed.prefilled, timed.report, timed.ttft_ms, answer, logits, is_compared=timed.is_compared
    )


def method_outcome(
    engine: "Engine", prompt: "Prompt", variant: Variant, reference: Outcome, max_new_tokens: int
) -> Outcome:
    """A method's outcome."""
    timed = timed_prefill(engine, prompt, variant)
    logits = teacher_logits(engine, timed.prefilled, reference.answer)
    # If decoding may prefill again because of an uncertain figure, only decoding shows whether it does.
    if would_give_answer(logits, reference.answer) and not timed.prefilled.sure:
        # The greedy answer equals the reference's, so decoding, which takes as long as the prefill, can be skipped.
        answer = reference.answer
    else:
        answer = engine.decode(timed.prefilled, max_new_tokens=max_new_tokens, temperature=0.0)
    return _outcome(timed, answer, logits)


def would_give_answer(logits: "Tensor", answer: "Result") -> bool:
    """Whether greedy decoding by these logits gives this answer, with its end token."""
    return bool(answer.token_ids) and logits.argmax(-1).tolist() == list(answer.token_ids)


def record_of(
    question: Question, variant: Variant, reference: Outcome, outcome: Outcome, engine: "Engine"
) -> Record:
    """Compare a method's outcome with the reference and with the gold answers. Raises BenchError."""
    text = outcome.answer.text
    return Record(
        **_figure_fields(question, reference, outcome, engine.tokenizer),
        question=question.digest,
        method=variant.method,
        ratio=variant.ratio,
        kl=_divergence(question, variant, reference, outcome),
        top1=metrics.top1_agreement(reference.logits, outcome.logits),
        exact_match=outcome.answer.token_ids == reference.answer.token_ids,
        **gold_fields(text, question),
        first_kl=metrics.kl_divergence(reference.logits[:1], outcome.logits[:1]),
        read_again=outcome.answer.report.read_again_at is not None,
        rouge_l_to_full=metrics.rouge_l(text, [reference.answer.text]),
        recomputed_fraction=outcome.report.recomputed_fraction,
        ttft_ms=None if outcome.is_compared else outcome.ttft_ms,
        full_ttft_ms=None if reference.is_compared else reference.ttft_ms,
        prompt_tokens=outcome.report.tokens.prompt,
        generated_tokens=outcome.answer.report.tokens.generated,
        select_ms=outcome.report.timings.select_ms,
        probe_rows=outcome.report.probe_rows,
        computed_fraction=outcome.report.computed_fraction,
    )


def _figure_fields(
    question: Question, reference: Outcome, outcome: Outcome, tokenizer: Any
) -> dict[str, Any]:
    """A record's fields about the figures that full prefill has right; empty if there are none."""
    figures = metrics.right_figures(question, reference.answer.text)
    if not figures:
        return {}
    text, ids = outcome.answer.text, reference.answer.token_ids
    kept = all(contains(text, each) for each in figures)
    so_far = [tokenizer.decode(ids[:end], skip_special_tokens=True) for end in range(len(ids) + 1)]
    pieces = [behind[len(before) :] for before, behind in pairwise(so_far)]
    at = metrics.figure_positions(pieces, figures)
    return {
        "figures_kept": kept,
        "figures_other": not kept and metrics.has_other_figure(text, question, figures),
        "figure_kl": metrics.kl_divergence(reference.logits[at], outcome.logits[at]) if at else None,
    }


def _divergence(question: Question, variant: Variant, reference: Outcome, outcome: Outcome) -> float:
    """KL divergence in nats. Raises BenchError if it is not finite: it would spoil every mean, or look perfect."""
    kl = metrics.kl_divergence(reference.logits, outcome.logits)
    if math.isfinite(kl):
        return kl
    at = "" if variant.ratio is None else f" at ratio {variant.ratio:g}"
    whose = "full prefill's" if reference.logits.isnan().any() else "the method's"
    raise BenchError(
        f"{question.place}, method {variant.method}{at}: the KL divergence is {kl}, because {whose} logits hold NaN or "
        "infinity, so there is nothing to compare; take the method out of --methods, or measure with another --dtype"
    )


def gold_fields(text: str, question: Question) -> dict[str, Any]:
    """A record's fields that compare an answer with the gold answers."""
    return {
        "gold_match": metrics.gold_match(text, question.answers),
        "f1": metrics.f1(text, question.answers),
        "rouge_l": metrics.rouge_l(text, question.answers),
        "found": metrics.found_share(text, question.required),
        "answer": text,
    }


def teacher_logits(engine: "Engine", prefilled: "Prefilled", answer: "Result") -> "Tensor":
    """Logits (n, vocab), float32, before each token of the answer; the first are the prompt's."""
    logits = engine.continue_logits(prefilled, answer.token_ids)
    assert logits.shape[0] == max(1, len(answer.token_ids)), (logits.shape, len(answer.token_ids))
    return logits
