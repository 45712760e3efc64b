"""`ragblend tune`: find the method and ratio that suit this model best, by measuring for a limited time.

Candidates are measured on the same questions, a few at a time. After each round, candidates that are clearly worse
than a cheaper or equally cheap one are dropped, so that the remaining time goes to comparing the others. The variant
in the settings is a candidate too. It is replaced only by one that is shown to be better, or as good and cheaper, or
if it loses the figures of at least two answers more than another. If it cannot be compared (it is exact, or its ratio
is `auto`), it is replaced only at the user's request.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragblend.kvstore.errors import UsageError
from ragblend.measuring import quality
from ragblend.measuring.data import Question
from ragblend.measuring.records import Journal, Record, Row
from ragblend.measuring.summary import SAME_COST, comparison_matrix, difference_interval, summarise, verdict
from ragblend.measuring.variants import Variant

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ROUND_QUESTIONS = 4
MIN_QUESTIONS = 6  # with fewer, an interval says nothing
ANSWER_TOKENS = 16
EQUALLY_GOOD = 1.1  # up to so many times the lowest divergence counts as equally good
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
Clock = Callable[[], float]


@dataclass(frozen=True)
class TuneResult:
    """The result of tuning. best: the variant to use; better: whether it should replace the current one.

    questions: how many all remaining variants answered. on_request: best could not be compared with the current
    variant, so it replaces that only if the user asks for it. rows: as in `bench quality`, of the variants that were
    measured to the end; dropped: the last rows of the others.
    """

    best: Variant
    better: bool
    reason: str
    questions: int
    seconds: float
    rows: list[Row]
    dropped: list[Row]
    comparison: Row | None = None
    on_request: bool = False


def check_request(minutes: float, limit: int | None) -> None:
    """Raise UsageError if the time or the number of questions is too small to choose by."""
    if not (math.isfinite(minutes) and minutes > 0):
        raise UsageError(f"--minutes is {minutes:g}; it must be a number above 0, such as 15")
    if limit is not None and limit < MIN_QUESTIONS:
        raise UsageError(f"--limit is {limit}; {MIN_QUESTIONS} questions are the fewest to choose by")


def current_variant(method: str, ratio: float | str) -> Variant:
    """The variant in the settings, without a ratio if the method takes none or it is `auto`. Raises UsageError."""
    from ragblend.engine.selection import policy_named

    policy = policy_named(method)
    return Variant(method, None if policy.fixed_ratio is not None or isinstance(ratio, str) else ratio)


def candidates(methods: dict[str, Any], most_ratio: float, current: Variant) -> tuple[Variant, ...]:
    """`reuse`, every policy that takes a ratio (except controls) at up to three ratios, and the current variant."""
    from ragblend.engine.selection import CONTROLS

    if not 0 <= most_ratio <= 1:
        raise UsageError(f"--most-ratio is {most_ratio}; it must be a share from 0 to 1")
    ratios = [*(ratio for ratio in RATIOS if ratio < most_ratio), *([most_ratio] if most_ratio else [])][-3:]
    found = [Variant("reuse")]
    for name, policy in methods.items():
        if policy.fixed_ratio is None and not policy.uses_tree and name not in CONTROLS:
            found += [Variant(name, ratio) for ratio in ratios]
    own = [current] if why_not_comparable(current) is None else []
    return tuple(dict.fromkeys([*found, *own]))


def why_not_comparable(current: Variant) -> str | None:
    """Why the current variant cannot be compared with the candidates; None: it can. Raises UsageError."""
    from ragblend.engine.selection import policy_named

    fixed = policy_named(current.method).fixed_ratio
    if fixed is not None and fixed >= 1:
        return f"the current method {current} is exact: another one can only be faster"
    if fixed is None and current.ratio is None:
        return f"the current method {current} has the ratio auto, which differs per request, so it was not compared"
    return None


def find_best(
    engine: "Engine",
    questions: Sequence[Question],
    variants: Sequence[Variant],
    current: Variant,
    most_ratio: float,
    journal: Journal,
    seconds: float,
    progress: quality.Progress = lambda done, total: None,
    clock: Clock = time.monotonic,
    seed: int = 0,
) -> TuneResult:
    """Measure until the time is over or all questions are answered, then choose the best variant.

    Records in the journal are not measured again. The question under way is finished. progress counts seconds, since
    the number of questions is not known in advance. Raises UsageError if too few questions are given or measured.
    """
    if len(questions) < MIN_QUESTIONS:
        raise UsageError(
            f"Tuning: there are {len(questions)} questions; {MIN_QUESTIONS} are the fewest to choose by. Give more."
        )
    begun = clock()
    remaining, asked, is_warm = list(variants), list[Question](), False
    dropped: dict[Variant, Row] = {}
    while len(asked) < len(questions):
        batch = questions[len(asked) : len(asked) + ROUND_QUESTIONS]
        before = len(journal.records)
        unmeasured = quality.run(
            engine,
            batch,
            remaining,
            journal,
            max_new_tokens=ANSWER_TOKENS,
            seed=seed,
            progress=lambda *_: progress(round(min(clock() - begun, seconds)), round(seconds)),
            should_stop=lambda: clock() - begun >= seconds,
            warm=not is_warm,
        )
        # A resumed run has records of the first batches, so that nothing runs in them.
        is_warm = is_warm or len(journal.records) > before
        # Methods are compared on the same questions, so a question counts if all have answered it.
        keys = [(each.method, each.ratio) for each in remaining]
        asked += [each for each in batch if all((each.digest, *key) in journal for key in keys)]
        if unmeasured:
            break
        for variant in _clearly_worse(journal, asked, remaining, current, seed):
            dropped[variant] = summarise(journal.records, asked, [variant], seed)[0][0]
            remaining.remove(variant)
    spent = clock() - begun
    if len(asked) < MIN_QUESTIONS:
        n = len(asked)
        each = f"one took {spent / n:.0f} s" if n else f"the first was not done after {spent:.0f} s"
        raise UsageError(
            f"Tuning: {n} questions were measured, and {MIN_QUESTIONS} are the fewest to choose by ({each}). The "
            "measurements are kept; run the same command again with more --minutes."
        )
    rows, _ = summarise(journal.records, asked, remaining, seed)
    found = TuneResult(current, False, "", len(asked), spent, rows, list(dropped.values()))
    return _decide(found, journal, asked, remaining, current, most_ratio, seed)


def _clearly_worse(
    journal: Journal, asked: Sequence[Question], remaining: Sequence[Variant], current: Variant, seed: int
) -> list[Variant]:
    """Variants that diverge clearly more than one that costs no more and loses no more figures.

    The current variant is kept to the end.
    """
    if len(asked) < MIN_QUESTIONS:
        return []
    records = {
        each: [journal.records[question.digest, each.method, each.ratio] for question in asked]
        for each in remaining
    }
    kl = {each: [_kl(record) for record in own] for each, own in records.items()}
    mean = {each: sum(values) / len(values) for each, values in kl.items()}
    lost = {each: sum(record.figures_kept is False for record in own) for each, own in records.items()}
    found = []
    for variant in remaining:
        rivals = [
            each
            for each in remaining
            if (each.ratio or 0) <= (variant.ratio or 0) and lost[each] <= lost[variant] and each != variant
        ]
        best = min(rivals, key=lambda each: mean[each], default=None)
        if variant == current or best is None:
            continue
        if verdict(difference_interval(kl[variant], kl[best], seed)) == "worse":
            found.append(variant)
    return found


def _decide(
    found: TuneResult,
    journal: Journal,
    asked: Sequence[Question],
    remaining: Sequence[Variant],
    current: Variant,
    most_ratio: float,
    seed: int,
) -> TuneResult:
    by_variant = dict(zip(remaining, found.rows, strict=True))
    allowed = {each: row for each, row in by_variant.items() if (each.ratio or 0) <= most_ratio}
    allowed = _keeping_figures(allowed)
    lowest = min(row["kl"] for row in allowed.values())
    near = [each for each, row in allowed.items() if row["kl"] <= EQUALLY_GOOD * lowest]
    best = min(near, key=lambda each: (allowed[each]["recomputed_fraction"], allowed[each]["kl"]))
    common = dataclasses.replace(found, best=best)
    if best == current:
        return dataclasses.replace(common, reason="the current method is the best of them")
    if (why := why_not_comparable(current)) is not None:
        row = allowed[best]
        gain = f"KL {row['kl']:.4f}"
        if row["speedup"] is not None:
            gain += f", first token {row['speedup']:.1f} times faster than full prefill's"
        return dataclasses.replace(common, on_request=True, reason=f"{why} ({gain})")
    if (current.ratio or 0) > most_ratio:
        return dataclasses.replace(common, better=True, reason=f"{current} spends more than {most_ratio:g}")
    if current not in allowed:
        lost, fewer, count = _lost(by_variant[current]), _lost(allowed[best]), allowed[best]["figures_n"]
        reason = f"{current} loses figures in {lost} of {count} answers, {best} in {fewer}"
        return dataclasses.replace(common, better=True, reason=reason)
    (pair,) = comparison_matrix(journal.records, asked, (best, current), seed)
    better, reason = _compare(pair)
    return dataclasses.replace(common, better=better, reason=reason, comparison=pair)


def _kl(record: Record) -> float:
    return record.kl


def _keeping_figures(rows: dict[Variant, Row]) -> dict[Variant, Row]:
    """Variants that lose the figures of at most one answer more than the best one does; all if no answer has figures.

    A wrong number is worse than other words.
    """
    counted = {each: row for each, row in rows.items() if row["figures_n"]}
    if not counted:
        return rows
    fewest = min(_lost(row) for row in counted.values())
    return {each: row for each, row in counted.items() if _lost(row) <= fewest + 1}


def _lost(row: Row) -> int:
    return round(row["figures_n"] * (1 - row["figures_kept"]))


def _compare(pair: Row) -> tuple[bool, str]:
    """Whether the first of the pair should replace the second, and why."""
    ratio, ends = pair["kl_ratio"], pair["kl_ratio_ci"]
    comparison = f"{ratio:.2f} times its divergence" if ratio is not None else "no divergence to compare"
    if ends is not None:
        comparison += f" (95% interval {ends[0]:.2f} to {ends[1]:.2f})"
    if pair["verdict"] == "better":
        return True, f"better: {comparison}"
    if pair["cost_difference"] < -SAME_COST and ends is not None and ends[1] <= EQUALLY_GOOD:
        return True, f"as good, and cheaper: {comparison}"
    return False, f"not shown to be better than the current method: {comparison}; more minutes may tell"
