"""Summarises records as rows, one per method and ratio, and as paired comparisons of methods.

Intervals are percentile bootstrap intervals over prompts, seeded, so that the same records give the same interval.
Every method is measured on the same prompts, so differences and ratios are resampled in pairs: a hard prompt is hard
for both, and its difficulty cancels out.
"""

from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import fmean, median
from typing import Any

from ragblend.measuring.data import Question
from ragblend.measuring.metrics import recovery
from ragblend.measuring.records import Key, Record, Row
from ragblend.measuring.variants import EXACT, Variant

# What a policy has to beat: recomputing nothing, and two ways to spend the same budget blindly.
BASELINES = ("reuse", "random", "epic")
COUNTS = ("prompt_tokens", "generated_tokens")  # rows have their means over the questions
# Costs of selection. `recomputed_fraction` includes only its work on stored tokens.
COSTS = ("computed_fraction", "probe_rows", "select_ms")
FIGURE_COLUMNS = (
    "figures_n", "figures_kept", "figures_kept_ci", "figures_other", "figure_kl", "figure_kl_ci", "read_again",
)  # fmt: skip
TASK_COLUMNS = (
    "task", "method", "ratio", "n", "kl", "kl_ci", "accuracy", "accuracy_ci", "found", "f1", "exact_match",
    "rouge_l_to_full", *FIGURE_COLUMNS,
)  # fmt: skip
LOSSES = (0.01, 0.02)  # tolerated losses of the task score
SAME_COST = 0.01  # methods cost the same if their mean shares of recomputed tokens differ by at most this
RESAMPLES = 5000
LEVEL = 0.95
Interval = tuple[float, float]
Table = dict[Variant, list[Record]]


def summarise(
    records: dict[Key, Record],
    questions: Sequence[Question],
    variants: Sequence[Variant],
    seed: int,
    pairs: Sequence[tuple[Variant, Variant]] = (),
) -> tuple[list[Row], list[Row]]:
    """The rows (one per variant) and the comparisons (one per pair), over exactly these questions.

    Every question must have a record for every variant, since the numbers are paired. pairs: compared in addition to
    those with the baselines.
    """
    table = _table(records, questions, variants)
    reuse, full = table.get(Variant("reuse")), table.get(Variant("full"))
    rows = [
        _row(variant, table[variant], reuse, seed) | _score_share(table[variant], full, seed)
        for variant in variants
    ]
    wanted = dict.fromkeys([*pairs, *_with_baselines(table)])
    return rows, [_comparison(variant, other, table, seed) for variant, other in wanted]


def comparison_matrix(
    records: dict[Key, Record], questions: Sequence[Question], variants: Sequence[Variant], seed: int
) -> list[Row]:
    """Compare every two variants except for the reference."""
    table = _table(records, questions, variants)
    methods = [each for each in variants if each.method != "full"]
    return [_comparison(*pair, table, seed) for pair in combinations(methods, 2)]


def by_task(
    records: dict[Key, Record], questions: Sequence[Question], variants: Sequence[Variant], seed: int
) -> list[Row]:
    """One row per task and variant, if the questions are of several tasks."""
    tasks = list(dict.fromkeys(question.task for question in questions))
    if len(tasks) < 2:
        return []
    rows = []
    for task in tasks:
        own = [question for question in questions if question.task == task]
        for variant, found in _table(records, own, variants).items():
            row = _row(variant, found, None, seed) | {"task": task}
            rows.append({name: row[name] for name in TASK_COLUMNS})
    return rows


def _table(records: dict[Key, Record], questions: Sequence[Question], variants: Sequence[Variant]) -> Table:
    return {
        variant: [records[(question.digest, variant.method, variant.ratio)] for question in questions]
        for variant in variants
    }


def _row(variant: Variant, records: list[Record], reuse: list[Record] | None, seed: int) -> Row:
    """A variant's row. All rows have the same names; a number that the variant lacks is None."""
    row: Row = {"method": variant.method, "ratio": variant.ratio, "n": len(records)}
    row |= _mean_and_interval("kl", records, seed) | {"top1": _mean("top1", records)}
    row |= {"first_kl": _mean("first_kl", records)}
    for name in ("exact_match", "f1", "rouge_l", "rouge_l_to_full"):
        row |= _mean_and_interval(name, records, seed)
    row |= _recovery(records, reuse, seed) | _exact(records, seed) | _figures(records, seed)
    # Medians, so that one outlier does not count; the speed-up is paired, as prompts differ in length.
    own_ms = [each.ttft_ms for each in records if each.ttft_ms]
    ratios = [each.full_ttft_ms / each.ttft_ms for each in records if each.ttft_ms and each.full_ttft_ms]
    row["ttft_ms"] = median(own_ms) if own_ms else None
    row |= {"speedup": median(ratios) if ratios else None, "speedup_n": len(ratios)}
    for name in ("recomputed_fraction", "gold_match", *COUNTS, *COSTS):
        row[name] = _mean(name, records)
    return row


def _score_share(records: list[Record], full: list[Record] | None, seed: int) -> Row:
    """The share of full prefill's task score that is left: of `found` if the questions have it, else of F1."""
    name = "found" if _column("found", records) else "f1"
    own, theirs = (_column(name, each or []) for each in (records, full))
    if not own or not theirs or not fmean(theirs):
        return {"score_share": None, "score_share_ci": None}
    around = difference_interval(own, theirs, seed)
    return {
        "score_share": fmean(own) / fmean(theirs),
        "score_share_ci": None if around is None else tuple(1 + end / fmean(theirs) for end in around),
    }


def fastest_within(rows: Sequence[Row], losses: Sequence[float] = LOSSES) -> list[Row]:
    """For each tolerated loss of full prefill's task score, the fastest row within it, if there is one.

    The criterion of QCFuse (arXiv 2606.05875): a speed-up counts if at most 1% or 2% of the score is lost.
    """
    found: list[Row] = []
    for loss in losses:
        kept = [row for row in rows if row["score_share"] is not None and row["score_share"] >= 1 - loss]
        fused = [row for row in kept if row["method"] not in EXACT]
        if fused:
            best = max(fused, key=lambda row: row["speedup"] or 0)
            names = ("method", "ratio", "n", "score_share", "score_share_ci", "ttft_ms", "speedup")
            found.append({"loss": loss} | {name: best[name] for name in names})
    return found


def _mean_and_interval(name: str, records: list[Record], seed: int) -> Row:
    column = _column(name, records)
    return {name: _mean(name, records), f"{name}_ci": None if column is None else mean_interval(column, seed)}


def _exact(records: list[Record], seed: int) -> Row:
    """accuracy: the share of answers that contain all required strings; found: the mean share that they contain."""
    column = _column("found", records)
    if column is None:
        return {"accuracy": None, "accuracy_ci": None, "found": None}
    exact = [float(value == 1) for value in column]
    return {"accuracy": fmean(exact), "accuracy_ci": mean_interval(exact, seed), "found": fmean(column)}


def _figures(records: list[Record], seed: int) -> Row:
    """Over answers that full prefill has right: the share with figures kept, with another figure instead, and their KL.

    The interval is Wilson's: near 1 a bootstrap interval would be empty.
    """
    own = [record for record in records if record.figures_kept is not None]
    if not own:
        return dict.fromkeys(FIGURE_COLUMNS)
    from scipy.stats import binomtest

    kept = sum(bool(record.figures_kept) for record in own)
    around = binomtest(kept, len(own)).proportion_ci(LEVEL, "wilson")
    at_figures = [record.figure_kl for record in own if record.figure_kl is not None]
    return {
        "figures_n": len(own),
        "figures_kept": kept / len(own),
        "figures_kept_ci": (float(around.low), float(around.high)),
        "figures_other": fmean(bool(record.figures_other) for record in own),
        "figure_kl": fmean(at_figures) if at_figures else None,
        "read_again": fmean(bool(record.read_again) for record in own),
        "figure_kl_ci": mean_interval(at_figures, seed) if at_figures else None,
    }


def _mean(name: str, records: list[Record]) -> float | None:
    column = _column(name, records)
    return None if column is None else fmean(column)


def _recovery(records: list[Record], reuse: list[Record] | None, seed: int) -> Row:
    kl, kl_reuse = _column("kl", records), _column("kl", reuse or [])
    if not kl or not kl_reuse:
        return {"recovery": None, "recovery_ci": None}
    around = recovery_interval(kl, kl_reuse, seed)
    return {"recovery": recovery(fmean(kl), fmean(kl_reuse)), "recovery_ci": around}


def _with_baselines(table: Table) -> list[tuple[Variant, Variant]]:
    """Pairs of every method that takes a ratio with the baselines: reuse, and the controls at the same ratio."""
    return [
        (variant, other)
        for variant in table
        if variant.ratio is not None
        for other in (Variant(name, None if name == "reuse" else variant.ratio) for name in BASELINES)
        if other in table and other.method != variant.method
    ]


def _comparison(variant: Variant, other: Variant, table: Table, seed: int) -> Row:
    """Compare two variants: `kl_difference` < 0 and `kl_ratio` < 1 mean that `method` is closer to full prefill."""
    kl, kl_other = (_column("kl", table[each]) for each in (variant, other))
    f1, f1_other = (_column("f1", table[each]) for each in (variant, other))
    assert kl and kl_other and f1 and f1_other, (variant, other)
    interval = difference_interval(kl, kl_other, seed)
    return {
        "method": variant.method,
        "against": other.method,
        "ratio": variant.ratio,
        "against_ratio": other.ratio,
        "n": len(kl),
        "kl_difference": fmean(kl) - fmean(kl_other),
        "kl_difference_ci": interval,
        "kl_ratio": fmean(kl) / fmean(kl_other) if fmean(kl_other) > 0 else None,
        "kl_ratio_ci": ratio_interval(kl, kl_other, seed),
        "verdict": verdict(interval),
        "nearer_on": fmean(a < b for a, b in zip(kl, kl_other, strict=True)),
        "f1_difference": fmean(f1) - fmean(f1_other),
        "f1_difference_ci": difference_interval(f1, f1_other, seed),
        **_costs(table[variant], table[other]),
    }


def _costs(records: list[Record], others: list[Record]) -> Row:
    """The difference in recomputed shares, and whether it counts as the same cost."""
    spent, spent_other = (_mean("recomputed_fraction", each) for each in (records, others))
    assert spent is not None and spent_other is not None
    return {"cost_difference": spent - spent_other, "same_cost": abs(spent - spent_other) <= SAME_COST}


def verdict(interval: Interval | None) -> str:
    """The verdict of a difference's interval; lower is better."""
    if interval is None or interval[0] <= 0 <= interval[1]:
        return "undecided"
    return "better" if interval[1] < 0 else "worse"


def _column(name: str, records: list[Record]) -> list[float] | None:
    """A field of all records; None if one record lacks it, since a mean over the others would be of other questions."""
    values = [getattr(record, name) for record in records]
    return None if None in values else [float(value) for value in values]


def mean_interval(values: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of the mean; None for fewer than two values."""
    return _interval([values], lambda mean: mean, seed)


def difference_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) - mean(others); both in the same order of prompts."""
    return _interval([values, others], lambda mean, other: mean - other, seed)


def ratio_interval(values: Sequence[float], others: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of mean(values) / mean(others), in pairs; None if an `others` is not above 0."""
    if min(others, default=0.0) <= 0:
        return None
    return _interval([values, others], lambda mean, other: mean / other, seed)


def recovery_interval(kl: Sequence[float], kl_reuse: Sequence[float], seed: int = 0) -> Interval | None:
    """The 95% interval of 1 - mean(kl)/mean(kl_reuse); None if reuse does not diverge on every prompt."""
    ends = ratio_interval(kl, kl_reuse, seed)
    return None if ends is None else (1 - ends[1], 1 - ends[0])


def _interval(columns: Sequence[Sequence[float]], of_means: Callable[..., Any], seed: int) -> Interval | None:
    from scipy.stats import bootstrap

    if len(columns[0]) < 2:
        return None
    found = bootstrap(
        columns,
        lambda *drawn, axis: of_means(*(column.mean(axis=axis) for column in drawn)),
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        paired=len(columns) > 1,
        rng=seed,
    ).confidence_interval
    return float(found.low), float(found.high)
