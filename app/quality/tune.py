"""`ragblend tune`: the method and ratio that this model does best with, found by measuring within a time.

Candidates are measured on the same questions, a few at a time. After each round those that are clearly worse than
another that costs no more are dropped, so that the time left goes to telling the others apart. What stands in the
settings is a candidate too, and is replaced only by what is shown to be better, or as good and cheaper, or where it
loses the figures of two answers more than another. Where it cannot
be compared (it is exact, or loading decides its ratio), only the user can say that it is to be replaced.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragblend.app.quality import quality
from ragblend.app.quality.data import Question
from ragblend.app.quality.records import Journal, Row
from ragblend.app.quality.summary import SAME_COST, comparison_matrix, difference_interval, summarise, verdict
from ragblend.app.quality.variants import Variant
from ragblend.kvstore.errors import UsageError

if TYPE_CHECKING:
    from ragblend.engine.engine import Engine

ROUND_QUESTIONS = 4
FEWEST_QUESTIONS = 6  # of fewer, an interval says nothing
ANSWER_TOKENS = 16
NEAR = 1.1  # times the lowest divergence: as good, if it costs less
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
CONTROLS = ("random",)  # those of a fixed ratio are left out anyway
Clock = Callable[[], float]


@dataclass(frozen=True)
class TuneResult:
    """What was found. best: what to use; better: whether it is to replace what stands; questions: that all were asked.

    on_request: it was not compared with what stands, so it replaces that only if the user asks for it.
    rows: as in `bench quality`, of those that were measured to the end; dropped: the others, with their last row.
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
    """Raises UsageError for a time or a number of questions that nothing can be chosen by."""
    if not (math.isfinite(minutes) and minutes > 0):
        raise UsageError(f"--minutes is {minutes:g}; it must be a number above 0, such as 15")
    if limit is not None and limit < FEWEST_QUESTIONS:
        raise UsageError(f"--limit is {limit}; {FEWEST_QUESTIONS} questions are the fewest to choose by")


def standing(method: str, ratio: float | str) -> Variant:
    """What the settings say, without a ratio where the method takes none or loading decides it. Raises UsageError."""
    from ragblend.engine.selection import policy_named

    policy = policy_named(method)
    return Variant(method, None if policy.fixed_ratio is not None or isinstance(ratio, str) else ratio)


def candidates(methods: dict[str, Any], most_ratio: float, stands: Variant) -> tuple[Variant, ...]:
    """Every policy but the controls at up to three ratios that may be spent, reuse, and what stands in the settings."""
    if not 0 <= most_ratio <= 1:
        raise UsageError(f"--most-ratio is {most_ratio}; it must be a share from 0 to 1")
    ratios = [*(ratio for ratio in RATIOS if ratio < most_ratio), *([most_ratio] if most_ratio else [])][-3:]
    found = [Variant("reuse")]
    for name, policy in methods.items():
        if policy.fixed_ratio is None and not policy.follows and name not in CONTROLS:
            found += [Variant(name, ratio) for ratio in ratios]
    own = [stands] if not_compared(stands) is None else []
    return tuple(dict.fromkeys([*found, *own]))


def not_compared(stands: Variant) -> str | None:
    """Why what stands cannot be measured beside the candidates; None: it can. Raises UsageError for no method."""
    from ragblend.engine.selection import policy_named

    fixed = policy_named(stands.method).fixed_ratio
    if fixed is not None and fixed >= 1:
        return f"{stands} stands, which is exact: nothing is nearer to full prefill, and what can be gained is time"
    if fixed is None and stands.ratio is None:
        return f"{stands} stands at the ratio auto, which each request has anew, so the two were not compared"
    return None


def find_best(
    engine: "Engine",
    questions: Sequence[Question],
    variants: Sequence[Variant],
    stands: Variant,
    most_ratio: float,
    journal: Journal,
    seconds: float,
    progress: quality.Progress = lambda done, total: None,
    clock: Clock = time.monotonic,
    seed: int = 0,
) -> TuneResult:
    """Measure until the time is over or the questions are used up, then choose. Raises UsageError if it was too short.

    What the journal has is not measured again. A question that was begun is finished, however long that takes.
    progress is in seconds: how many questions there will be is not known before.
    """
    if len(questions) < FEWEST_QUESTIONS:
        raise UsageError(
            f"Tuning: there are {len(questions)} questions; {FEWEST_QUESTIONS} are the fewest to choose by. Give more."
        )
    begun = clock()
    left, asked = list(variants), list[Question]()
    dropped: dict[Variant, Row] = {}
    while len(asked) < len(questions):
        batch = questions[len(asked) : len(asked) + ROUND_QUESTIONS]
        unmeasured = quality.run(
            engine,
            batch,
            left,
            journal,
            max_new_tokens=ANSWER_TOKENS,
            seed=seed,
            progress=lambda *_: progress(round(min(clock() - begun, seconds)), round(seconds)),
            until=lambda: clock() - begun >= seconds,
            warm=not asked,
        )
        keys = [(each.method, each.ratio) for each in left]  # the numbers are paired: of all, or of none
        asked += [each for each in batch if all((each.digest, *key) in journal for key in keys)]
        if unmeasured:
            break
        for variant in _worse(journal, asked, left, stands, seed):
            dropped[variant] = summarise(journal.records, asked, [variant], seed)[0][0]
            left.remove(variant)
    spent = clock() - begun
    if len(asked) < FEWEST_QUESTIONS:
        n = len(asked)
        each = f"one took {spent / n:.0f} s" if n else f"the first was not done after {spent:.0f} s"
        raise UsageError(
            f"Tuning: {n} questions were measured, and {FEWEST_QUESTIONS} are the fewest to choose by ({each}). What "
            "was measured is kept; run the same command again with more --minutes."
        )
    rows, _ = summarise(journal.records, asked, left, seed)
    found = TuneResult(stands, False, "", len(asked), spent, rows, list(dropped.values()))
    return _decided(found, journal, asked, left, stands, most_ratio, seed)


def _worse(
    journal: Journal, asked: Sequence[Question], left: Sequence[Variant], stands: Variant, seed: int
) -> list[Variant]:
    """Those whose divergence is clearly above that of another that costs no more and loses no more figures.

    What stands is kept to the end.
    """
    if len(asked) < FEWEST_QUESTIONS:
        return []
    kl = {each: [_kl(journal, question, each) for question in asked] for each in left}
    mean = {each: sum(values) / len(values) for each, values in kl.items()}
    lost = {each: sum(_loses(journal, question, each) for question in asked) for each in left}
    found = []
    for variant in left:
        rivals = [
            each
            for each in left
            if (each.ratio or 0) <= (variant.ratio or 0) and lost[each] <= lost[variant] and each != variant
        ]
        best = min(rivals, key=lambda each: mean[each], default=None)
        if variant == stands or best is None:
            continue
        if verdict(difference_interval(kl[variant], kl[best], seed)) == "worse":
            found.append(variant)
    return found


def _loses(journal: Journal, question: Question, variant: Variant) -> bool:
    return journal.records[question.digest, variant.method, variant.ratio].figures_kept is False


def _kl(journal: Journal, question: Question, variant: Variant) -> float:
    value = journal.records[question.digest, variant.method, variant.ratio].kl
    assert value is not None, variant
    return value


def _decided(
    found: TuneResult,
    journal: Journal,
    asked: Sequence[Question],
    left: Sequence[Variant],
    stands: Variant,
    most_ratio: float,
    seed: int,
) -> TuneResult:
    by_variant = dict(zip(left, found.rows, strict=True))
    allowed = {each: row for each, row in by_variant.items() if (each.ratio or 0) <= most_ratio}
    allowed = _keeping_figures(allowed)
    lowest = min(row["kl"] for row in allowed.values())
    near = [each for each, row in allowed.items() if row["kl"] <= NEAR * lowest]
    best = min(near, key=lambda each: (allowed[each]["recomputed_fraction"], allowed[each]["kl"]))
    common = dataclasses.replace(found, best=best)
    if best == stands:
        return dataclasses.replace(common, reason="what stands is the best of them")
    if (why := not_compared(stands)) is not None:
        row = allowed[best]
        gain = f"KL {row['kl']:.4f}, first token {row['speedup']:.1f} times as soon as full prefill's"
        return dataclasses.replace(common, on_request=True, reason=f"{why} ({gain})")
    if (stands.ratio or 0) > most_ratio:
        return dataclasses.replace(common, better=True, reason=f"{stands} spends more than {most_ratio:g}")
    if stands not in allowed:
        lost, fewer, count = _lost(by_variant[stands]), _lost(allowed[best]), allowed[best]["figures_n"]
        reason = f"{stands} loses figures in {lost} of {count} answers, {best} in {fewer}"
        return dataclasses.replace(common, better=True, reason=reason)
    (pair,) = comparison_matrix(journal.records, asked, (best, stands), seed)
    better, reason = _compared(pair)
    return dataclasses.replace(common, better=better, reason=reason, comparison=pair)


def _keeping_figures(rows: dict[Variant, Row]) -> dict[Variant, Row]:
    """Those that lose at most one answer's figures more than the one that loses fewest: a wrong number is worse than
    other words. All of them where no answer has figures.
    """
    counted = {each: row for each, row in rows.items() if row["figures_n"]}
    if not counted:
        return rows
    fewest = min(_lost(row) for row in counted.values())
    return {each: row for each, row in counted.items() if _lost(row) <= fewest + 1}


def _lost(row: Row) -> int:
    return round(row["figures_n"] * (1 - row["figures_kept"]))


def _compared(pair: Row) -> tuple[bool, str]:
    """Whether the first of the pair is to replace the second, and why."""
    ratio, ends = pair["kl_ratio"], pair["kl_ratio_ci"]
    said = f"{ratio:.2f} times its divergence" if ratio is not None else "no divergence to compare"
    if ends is not None:
        said += f" (95% interval {ends[0]:.2f} to {ends[1]:.2f})"
    if pair["verdict"] == "better":
        return True, f"better: {said}"
    if pair["cost_difference"] < -SAME_COST and ends is not None and ends[1] <= NEAR:
        return True, f"as good, and cheaper: {said}"
    return False, f"not shown to be better than what stands: {said}; more minutes may tell"
